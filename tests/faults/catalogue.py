"""The faults: for each class of mistake in parallel training those that a review would miss most easily.

By default every third one of types is tried (`test_faults.py`), and one of every tenth class that
the exact comparison finds; with the long grids all. Rows of `test_field.py` compare exactly by default. The others name
their tests.
"""

from fault import Caught, Fault
from tiny import GPT_OSS, LATENT, LINEAR, MIXTURE

from megajax.core.models.lora_config import LoraConfig

# Meshes (data, pipe, tensor) and what else shows a fault; the configuration is small otherwise (`trial.py`).
ON_TENSOR = {"mesh": (1, 1, 2)}
ON_SEQUENCE = {"mesh": (1, 1, 2), "sequence_parallel": True}
ON_STAGES_AND_DATA = {"mesh": (2, 2, 1)}
ON_DATA = {"mesh": (2, 1, 1)}
ON_OVERLAPPED = ON_DATA | {"optimizer": {"overlap_reductions": "true"}}
ON_GATHERED = ON_DATA | {"optimizer": {"overlap_gathers": "true"}}
ON_CONTEXT = {"mesh": (1, 1, 2, 1), "context_attention": "gather"}
ON_DOCUMENTS = ON_CONTEXT | {"reset_attention": True}
ON_HEADS = ON_CONTEXT | {"context_attention": "heads"}
ON_ROWS_AND_CONTEXT = {"mesh": (2, 1, 2, 1)}
ON_ZERO3 = {"mesh": (2, 1, 1), "zero": 3}
ON_ODD = {"mesh": (3, 1, 1), "global_batch": 6}
ON_REPLICAS = {"mesh": (4, 1, 1), "optimizer": {"zero_ranks": 2}}
ON_PIPE = {"mesh": (1, 2, 1)}
ON_BOTH_VOCABULARIES = {"mesh": (1, 2, 2), "vocabulary": "split"}
ON_RING = {"mesh": (1, 2, 1), "schedule": "interleaved", "chunks": 2, "num_layers": 4}
ON_CHUNKS = {"mesh": (1, 3, 1), "schedule": "interleaved", "chunks": 2, "num_layers": 6, "global_batch": 3}
ON_INBOX = ON_RING | {"global_batch": 3}  # 3 microbatches on 2 stages: something waits for more than a tick
ON_MUON = {"mesh": (2, 1, 2), "optimizer": {"name": "muon"}}
ON_DEFERRED = {"mesh": (1, 2, 1), "weight_gradients": "deferred", "num_layers": 4}
ON_EXPERTS = {"mesh": (1, 1, 1), "expert": 2, "expert_capacity": 1.0, **MIXTURE}
ON_DROPLESS = ON_EXPERTS | {"expert_capacity": 0.0}
ON_ADAPTED_EXPERTS = ON_EXPERTS | {"lora": LoraConfig(rank=2, targets=("experts",))}
ON_SHARED_SEQUENCES = ON_EXPERTS | {"mesh": (1, 1, 2, 1), "expert": 1}
ON_SHARED_BALANCE = ON_SHARED_SEQUENCES | {"balance": "loss", "balance_coefficient": 0.3}
ON_BIASES = ON_EXPERTS | {"balance": "bias"}
ON_AVERAGED_BIASES = ON_BIASES | {"ema": 0.5}
WITH_SINKS = {"attention_sinks": True}
ON_LATENTS = ON_TENSOR | LATENT
ON_GROUPS = ON_DROPLESS | {"router_scores": "sigmoid", "expert_groups": 2}
BERT = {"family": "bert"}
GROWING = "growing_batches(samples, sizes=self.order.sizes, rows_of=rows_of"
FEW_KEYS = {
    **{"norm": "rmsnorm", "positions": "rotary", "activation": "swiglu", "bias": "none", "query_key_norm": True},
    **{"head_size": 4, "num_kv_heads": 2, "mlp_size": 24, "sliding_window": 5},
}
ON_SHARED_KEYS = {"mesh": (1, 1, 4), **FEW_KEYS}
ON_LINEAR = ON_CONTEXT | LINEAR
ON_KINDS = LINEAR | {"mesh": (1, 2, 1), "linear_layers": "1,1", "num_layers": 8, "weight_gradients": "deferred"}


def types(message: str, on: dict) -> Caught:
    """Refused while the step is traced: by the types of `shard_map`, by shapes, or by the schedule's own check."""
    return Caught("types", message, on)


def named(first: str, on: dict) -> Caught:
    """`verify --exact` names this place first."""
    return Caught("exact", first, on)


def compiled(first: str, on: dict) -> Caught:
    """The exact comparison finds everything right; the compiled ones do not, and name this."""
    return Caught("verify", first, on)


def gradient(leaf: str, on: dict, collective: str = "") -> Caught:
    """`verify --exact` finds every activation right, and names the gradient of this weight, and the collective if that
    is wrong."""
    wrong = f" … the collective that is wrong: {collective} of the gradient of " if collective else ""
    return named(f"no activation of step 1: a gradient of weights, or its reduction: {leaf}{wrong}", on)


def tests(arguments: str) -> Caught:
    """The same error on every mesh, or beside the step: these tests fail."""
    return Caught("tests", arguments)


VARYING = "varying"
DOUBLED = "(lambda y, n: n * y - (n - 1) * lax.stop_gradient(y))"  # on n devices: n times the gradient
MEAN_OVER_TENSOR = "(lax.pmean if 'tensor' in axes else lax.psum)(tree, axes)"

STATES, CHUNKS = "ungated_heads of layer 0, forward", "models.delta_chunks."
CACHED = named("no difference in the step: exact generation with a cache: ", ON_DATA | LINEAR)
LIKE_PEERS = tests("tests/core/models/test_peer_delta.py -m peer -k olmo")
NORMALIZED = "x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + _EPSILON)"
OF_LINEAR = {
    "a document does not begin anew on the last device of a context group": (
        "models.delta._Pieces.positions", "place_1T - select(first_BT)",
        "place_1T - select(first_BT) + (axis_index(CONTEXT) == 1).astype('int32')",
        named(STATES, ON_LINEAR | ON_DOCUMENTS),
    ),
    "convolutions see the piece behind": (
        "models.delta._Pieces.last_before", "flat[:-1]", "flat[1:]", named(STATES, ON_LINEAR),
    ),
    "second pieces have the states of other devices": (
        "models.delta._Pieces._in_order", "every[::-1, 1]", "every[:, 1]", named(STATES, ON_LINEAR),
    ),
    "a state is not passed on to the next segment": (
        f"{CHUNKS}delta_rule.step", 'checkpoint_name(state_BHKV, "attention_statistics")',
        "0 * state_BHKV + first_BHKV", named(STATES, ON_LINEAR | {"linear_chunk": 1}),
    ),
    "halves of the inverse come in the other order": (
        f"{CHUNKS}unit_inverse", "exactly(exactly(second, lower_CC[..., half:, :half]), first)",
        "exactly(exactly(first, lower_CC[..., half:, :half]), second)", named(STATES, ON_LINEAR),
    ),
    "a token's decay changes what it writes itself": (
        f"{CHUNKS}decayed_products", "row > column", "row >= column", named(STATES, ON_LINEAR),
    ),
    "what a chunk leaves has the decays of earlier tokens": (
        f"{CHUNKS}_behind", "decay_C[..., 1:, :]", "decay_C[..., :-1, :]", named(STATES, ON_LINEAR),
    ),
    "heads of values have another group's keys": (
        f"{CHUNKS}Tokens.prepared", f"jnp.repeat({NORMALIZED}, value.shape[1] // x.shape[1], 1)",
        f"jnp.tile({NORMALIZED}, (1, value.shape[1] // x.shape[1], 1, 1))", named(STATES, ON_TENSOR | LINEAR),
    ),
    "keys that devices share are convolved as the first head's": (
        "models.delta.DeltaAttention._convolved", "own(self.key_taps[...], 1)",
        "self.key_taps[...][:, : own(self.key_taps[...], 1).shape[1]]",
        named(STATES, {"mesh": (1, 1, 4)} | LINEAR),
    ),
    "a prompt's padding changes the state": (
        "models.delta.DeltaAttention.__call__", 'context.cache == "new" and real_BT is not None', "False", CACHED,
    ),
    "after a prompt convolutions see its padding": (
        "models.delta.DeltaAttention.__call__", "kept or real_BT is None", "True", CACHED,
    ),
    "the weight gradients of a chunk's periods wait in one place": (
        "pipeline.kinds.LayersOfKinds._summed_up.slot_of",
        "slot * self._periods + number - chunk * self._periods", "slot * self._periods + 0 * number",
        gradient("blocks/", ON_KINDS),
    ),
    "convolutions see the document before": (
        "models.delta._convolution", "position_RT >= back", "position_RT >= 0",
        tests("tests/core/models/test_delta.py -k order"),
    ),
    "decays have the dtype of activations": (
        "models.delta._decays", "at_least_fp32(raw_RTHG.dtype)", "raw_RTHG.dtype",
        tests("tests/core/models/test_delta.py -k decays"),
    ),
    "what is written lacks its factor": (
        "models.delta.DeltaAttention.__call__",
        "self.config.linear_write * _sigmoid(pieces.rows(write_BTH)[..., None])",
        "_sigmoid(pieces.rows(write_BTH)[..., None])", LIKE_PEERS,
    ),
    "the norm of heads has the epsilon of others": (
        "models.delta.DeltaAttention.__init__", "config.linear_norm_epsilon", "config.norm_epsilon", LIKE_PEERS,
    ),
    "the gate comes before the norm": (
        "models.delta.DeltaAttention.__call__", "_gated(self.norm(heads_BTHV), gate_BTHV, self.config.linear_gate)",
        "self.norm(_gated(heads_BTHV, gate_BTHV, self.config.linear_gate))", LIKE_PEERS,
    ),
}  # fmt: skip

# What is wrong: the function, its right expression and the wrong one in its place, how that is caught.
Row = tuple[str, tuple[str, str], Caught]
ROWS: dict[str, dict[str, Row]] = {
    "f or g missing, doubled or averaged": {
        "g is missing": ("core.parallel.collectives.g", ("lax.psum(x, axes)", "x"), types(VARYING, ON_TENSOR)),
        "g takes the mean": (
            "core.parallel.collectives.g",
            ("lax.psum(x, axes)", "lax.pmean(x, axes)"),
            named("input of layer 0, forward", ON_TENSOR),
        ),
        "f's gradient is a mean": (
            "core.parallel.collectives.f",
            (
                'lax.pcast(x, axes, to="varying")',
                '(lambda x, n: lax.pcast(x / n + lax.stop_gradient(x - x / n), axes, to="varying"))'
                "(x, lax.psum(1, axes))",
            ),
            named("final_norm of the head, backward", ON_TENSOR),
        ),
        "the gradient of what g gave is summed, too": (
            "core.parallel.layers.RowParallelLinear.__call__",
            ("self.boundary.leave", f"(lambda x: {DOUBLED}(self.boundary.leave(x), axis_size(TENSOR)))"),
            named("mlp_activation of layer 1, backward", ON_TENSOR),
        ),
        "every device of a tensor group adds the bias": (
            "core.parallel.layers.RowParallelLinear.__call__",
            ("self.bias[...]", "axis_size(TENSOR) * self.bias[...]"),
            named("attention_output of layer 0, forward", ON_TENSOR),
        ),
    },
    "The wrong axis": {
        "g sums over data, too": (
            "core.parallel.collectives.g",
            ("lax.psum(x, axes)", 'lax.psum(x, ("data", "tensor"))'),
            named("input of layer 0, forward", {"mesh": (2, 1, 2)}),
        ),
        "the vocabulary's range is counted on tensor alone": (
            "core.parallel.vocabulary._local_ids",
            ("axis_index(axes)", "axis_index(TENSOR)"),
            named("input of layer 0, forward", ON_BOTH_VOCABULARIES),
        ),
        "shards are numbered by the axes in another order": (
            "core.parallel.collectives.own_shard",
            ("axis_index(axes)", "axis_index(axes if isinstance(axes, str) else axes[::-1])"),
            named("what the skipped step changes: params/blocks/", ON_ROWS_AND_CONTEXT),
        ),
        "scores of rows come in another order of axes": (
            "core.program.scoring._answers",
            ("gather_shards", "(lambda x, dim, axes, **more: gather_shards(x, dim, axes[::-1], **more))"),
            named("no difference in the step: exact scores: ", ON_DROPLESS | {"mesh": (2, 1, 1)}),
        ),
    },
    "A sum left out, taken twice, or over parts": {
        "gradients of norms are partial sums where the sequence is split": (
            "core.parallel.collectives.complete",
            ("varying_axes(leaf) - axes", "varying_axes(leaf) - axes - {TENSOR}"),
            types(VARYING, ON_SEQUENCE),
        ),
        "a reduce-scatter of gradients does not sum": (
            "core.parallel.shards.Shards.scatter",
            ("scatter_sum", "jax.tree_util.Partial(gather_shards.__globals__['own_shard'])"),
            gradient(
                "blocks/attention/key/weight, layer 0, 1", ON_DATA, "reduce-scatter over data and expert and context"
            ),
        ),
        "the tied embedding's gradient is the larger one of two stages": (
            "core.parallel.collectives.sum_over",
            ("lax.psum(tree, axes)", "jax.tree.map(lambda x: lax.pmax(x, axes), tree)"),
            gradient("shared/final_norm/bias", ON_PIPE, "all-reduce over pipe"),
        ),
        "gradients of shared heads of keys are averaged": (
            "core.parallel.collectives.sum_over",
            ("lax.psum(tree, axes)", MEAN_OVER_TENSOR),
            gradient("blocks/attention/key/weight, layer 0, 1", ON_SHARED_KEYS, "all-reduce over tensor"),
        ),
        "gradients are clipped before they are reduced": (
            "core.program.reduction.GradientReduction.everywhere",
            (
                "shards.scatter(gradients)",
                "shards.scatter(jax.tree.map(lambda grad: grad / jnp.sqrt(1 + jnp.sum(jnp.square(grad))), gradients))",
            ),
            gradient("blocks/attention/key/weight, layer 0, 1", ON_DATA),
        ),
        "gradients of norms of heads are partial sums": (  # Megatron-LM #7452, finding 11
            "core.parallel.collectives.complete",
            ("varying_axes(leaf) - axes", "varying_axes(leaf) - axes - {TENSOR}"),
            types(VARYING, ON_SHARED_KEYS),
        ),
        "gradients of norms are averaged where the sequence is split": (  # gpt-neox #1259
            "core.parallel.collectives.sum_over",
            ("lax.psum(tree, axes)", MEAN_OVER_TENSOR),
            gradient("blocks/attention/output/bias, layer 0, 1", ON_SEQUENCE, "all-reduce over tensor"),
        ),
        "the last stage's shards of gradients go to another device": (  # Megatron-LM #844
            "core.parallel.shards.Shards.scatter",
            (
                "scatter_sum",
                "jax.tree_util.Partial(lambda x, dim, axes: (lambda y: jnp.where(lax.axis_index('pipe') == 0, y, "
                "lax.ppermute(y, 'data', [(0, 1), (1, 0)])))(scatter_sum(x, dim, axes)))",
            ),
            gradient(
                "blocks/attention/key/weight, layer 1",
                ON_STAGES_AND_DATA,
                "reduce-scatter over data and expert and context",
            ),
        ),
        "of the shared weights' gradients the last use's stays": (  # DeepSpeed #8224
            "core.pipeline.ends.EmbeddingAndHead._add",
            (
                'sums.add(self.storage.some(terms, "shared").scatter(terms))',
                'sums._replace(gradients=self.storage.some(terms, "shared").scatter(terms))',
            ),
            gradient("shared/", ON_DATA),
        ),
    },
    "The wrong scale of a mean": {
        "losses are divided by a device's own targets": (
            "core.program.bind.count_targets",
            ("complete(counts, dict.fromkeys(counts, PartitionSpec()))", "counts"),
            named("the sum of the losses: step 1", ON_DATA),
        ),
        "losses grow with the number of microbatches": (
            "core.pipeline.ends.EmbeddingAndHead._head",
            (
                "self.model.head(weights | trained, y, *inputs)",
                "jax.tree.map(lambda x: x * len(self.microbatches[1]), self.model.head(weights | trained, y, *inputs))",
            ),
            named("the sum of the losses: step 1", ON_DATA),
        ),
        "a reduce-scatter takes the mean": (
            "core.parallel.collectives.scatter_sum",
            ("lax.psum_scatter", "(lambda *given, **more: lax.psum_scatter(*given, **more) / 2)"),
            gradient(
                "blocks/attention/key/weight, layer 0, 1",
                ON_ZERO3,
                "reduce-scatter over data and expert and context",
            ),
        ),
        "gradients keep the loss scale": (
            "core.program.train_step._losses_and_gradients",
            ("grad.astype(dtype) / loss_scale.astype(dtype)", "grad.astype(dtype)"),
            tests("tests/test_parity.py -k half"),
        ),
        "a device skips a step for its own gradients": (
            "core.program.train_step._train_step_with_gradients",
            (
                "jnp.isfinite(norm) & jnp.isfinite(loss)",
                "jnp.stack([jnp.isfinite(grad).all() for grad in jax.tree.leaves(grads)]).all()",
            ),
            types(VARYING, ON_DATA),
        ),
        "a skipped step counts": (
            "core.program.train_step._train_step_with_gradients",
            ("state.step + taken.astype(jnp.int32)", "state.step + 1"),
            tests("tests/core/program/test_skipped_steps.py"),
        ),
        "every microbatch's mean counts alike": (  # transformers #34191
            "core.pipeline.ends.EmbeddingAndHead._head",
            (
                "self.model.head(weights | trained, y, *inputs)",
                "(lambda losses, figures: ({name: x * (self.model.counts[name] / (jnp.maximum((inputs.batch['targets'] "
                ">= 0).sum(), 1) * len(self.microbatches[1]) * lax.axis_size('data'))).astype(x.dtype) for name, x in "
                "losses.items()}, figures))(*self.model.head(weights | trained, y, *inputs))",
            ),
            named("the sum of the losses: step 1", ON_DATA),
        ),
        "every microbatch doubles the gradients before it": (  # Megatron-LM #6660, torchtitan #1732
            "core.pipeline.sums.Sums.add",
            ("before[path].at[layer].add(grad)", "before[path].at[layer].set(2 * before[path][layer] + grad)"),
            gradient("blocks/attention/key/weight, layer 0, 1", ON_DATA),
        ),
        "all losses are divided by the first one's targets": (  # Megatron-LM #3159
            "core.program.bind.BoundModel.head",
            ("jnp.maximum(self.counts[name], 1)", "jnp.maximum(next(iter(self.counts.values())), 1)"),
            tests("tests/core/models/test_forward.py -k losses"),
        ),
        "an evaluation takes the mean of samples' means": (  # torchtitan #4167
            "evaluation.scoring.Perplexity.of",
            (
                "math.fsum(float(sample.loss.sum()) for sample in scores)",
                "math.fsum(float(sample.loss.mean()) for sample in scores if len(sample.loss)) / len(scores) "
                "* sum(len(sample.loss) for sample in scores)",
            ),
            tests("tests/evaluation/test_scoring.py"),
        ),
        "a norm over all heads is a mean over a device's": (
            "core.models.norms.mean_squares",
            ("x_BTHK.shape[2] * x_BTHK.shape[3] * devices", "x_BTHK.shape[2] * x_BTHK.shape[3]"),
            named("query_norm of layer 0, forward", ON_TENSOR | FEW_KEYS | {"query_key_norm_over": "width"}),
        ),
    },
    "A microbatch dropped or taken twice": {
        "the first microbatch is taken twice, and the last never": (
            "core.pipeline.ends.EmbeddingAndHead.take",
            ("microbatch", "jnp.maximum(microbatch - 1, 0)"),
            named("input of layer 0, forward: rows never computed", ON_DATA),
        ),
        "of the layers' gradients the last microbatch's stays": (
            "core.pipeline.sums.Sums.add",
            ("before[path].at[layer].add(grad)", "before[path].at[layer].set(grad)"),
            gradient("blocks/attention/key/weight, layer 0, 1", ON_DATA),
        ),
        "what is reduced during the last backward pass lacks it": (
            "core.pipeline.stages._reduced",
            ("Sums(sums).add(grads).gradients", "sums"),
            gradient("blocks/attention/key/weight, layer 0, 1", ON_OVERLAPPED),
        ),
        "what is reduced during the last backward pass is only its own": (
            "core.pipeline.stages._reduced",
            ("Sums(sums).add(grads).gradients", "sums | grads"),
            gradient("blocks/attention/key/weight, layer 0, 1", ON_OVERLAPPED),
        ),
        "the output product's gradient replaces the table's sum": (
            "core.pipeline.ends.EmbeddingAndHead._head",
            (
                "self._add(totals.sums, grads)",
                "self._add(Sums(totals.sums.gradients | {('shared', 'table'): "
                "jnp.zeros_like(totals.sums.gradients['shared', 'table'])}), grads)",
            ),
            gradient("shared/table", ON_DATA),
        ),
        "of a token that occurs twice one gradient stays": (
            "core.pipeline.ends.EmbeddingAndHead._embed_backward",
            (
                "jax.linear_transpose(embed, jax.eval_shape(self.weights))(x_grad)",
                "jax.linear_transpose(embed, jax.eval_shape(self.weights))((lambda id_N: jnp.where((jnp.argmax(id_N "
                "[None] == id_N[:, None], axis=1) == jnp.arange(id_N.size)).reshape(*x_grad.shape[:2], 1), x_grad, "
                "jnp.zeros_like(x_grad)))(inputs.batch['tokens'].reshape(-1)))",
            ),
            gradient("shared/", ON_DATA),
        ),
        "a layer has the reduced gradients of the layer after it": (
            "core.pipeline.stages._shifted",
            ("reduced[:-1]", "reduced[1:]"),
            gradient("blocks/attention/key/weight, layer 1", ON_OVERLAPPED),
        ),
        "what is reduced for the head lacks its last gradient": (
            "core.pipeline.executor.Pipeline.last_tick",
            ("Last(of_head, reduction)", "Last(self.ends.split_head(carry.totals)[1], reduction)"),
            gradient("shared/final_norm/bias", ON_OVERLAPPED),
        ),
        "of the losses the last microbatch's stays": (
            "core.pipeline.ends.EmbeddingAndHead._head",
            ("sum_ + self.summation.loss(losses[name])", "self.summation.loss(losses[name])"),
            named("the sum of the losses: step 1", ON_DATA),
        ),
    },
    "Pipeline: a wrong neighbour, a stale slot": {
        "activations go to the stage before": (
            "core.parallel.collectives.send",
            (
                "[(place, (place + step) % p) for place in range(p) if ring or 0 <= place + step < p]",
                "[(place, (place - step) % p) for place in range(p) if ring or 0 <= place - step < p]",
            ),
            named("input of layer 1, forward", ON_PIPE),
        ),
        "a stale slot of the ring buffer": (
            "core.pipeline.executor.Pipeline._pull_back",
            ("row.backward.slot", "0 * row.backward.slot"),
            named("output of layer 0, backward", ON_PIPE),
        ),
        "what arrived is used, not what is needed": (
            "core.pipeline.executor._receive",
            ("taken(inbox, work.source)", "taken(inbox, work.arrival)"),
            named("input of layer 2, forward", ON_INBOX),
        ),
        "the head gets the slot that the forward writes": (
            "core.pipeline.executor.Pipeline._head",
            ("row.backward.slot", "row.forward.slot"),
            named("last_output of the head, forward", ON_PIPE | {"schedule": "gpipe"}),
        ),
        "every stage runs the first one's table": (
            "core.pipeline.rows._column",
            ("at_place(column, stage, 1)", "at_place(column, 0 * stage, 1)"),
            named("input of layer 1, forward", ON_PIPE),
        ),
        "something is sent before it was computed": (
            "core.pipeline.schedule.arrange.direction",
            ("np.roll(by_virtual, -upstream, axis=1)", "np.roll(by_virtual, upstream, axis=1)"),
            types("used before it was sent", {"mesh": (1, 3, 1), "num_layers": 3}),
        ),
        "a slot is free in the tick in which it is last read": (
            "core.pipeline.schedule._slots",
            ("occupied[0][0] < first[item]", "occupied[0][0] <= first[item]"),
            types("AssertionError", ON_PIPE),
        ),
    },
    "Layers on the wrong stage": {
        "the layers of every stage are numbered from 0": (
            "core.pipeline.placement._numbered",
            ("first[..., None] + number", "0 * first[..., None] + number"),
            named("input of layer 1, forward: rows never computed", ON_PIPE),
        ),
        "all chunks have the first one's weights": (
            "core.pipeline.rows._work",
            ("np.maximum(table.chunk, 0)", "np.maximum(table.chunk, 0) * 0"),
            named("input of layer 2, forward: rows never computed", ON_RING),
        ),
        "chunks are placed on the stages before their time": (
            "core.pipeline.placement.Placement.to_stages",
            (
                "canonical.reshape(*index.shape, *canonical.shape[1:])",
                "canonical.reshape(self.num_stages, self.num_chunks, -1, *canonical.shape[1:]).swapaxes(0, 1)",
            ),
            named("attention_norm of layer 1, forward", ON_RING),
        ),
        "backwards run with the forward's chunk of weights": (
            "core.pipeline.executor.Pipeline._pull_back",
            ("row.backward.chunk", "row.forward.chunk"),
            named("mlp_activation of layer 2, backward", ON_RING),
        ),
        "the first layer is skipped as padding": (
            "core.pipeline.stages.Layers._in_slot",
            ("index >= 0", "index > 0"),
            named("input of layer 0, forward: rows never computed", {"mesh": (1, 2, 1), "num_layers": 3}),
        ),
        "layers are numbered stage by stage, not chunk by chunk": (
            "core.pipeline.placement.Placement.layer_index",
            ("np.cumsum(self.counts)", "np.cumsum(self.counts.T).reshape(self.counts.shape[::-1]).T"),
            named("input of layer 1, forward", ON_RING),
        ),
        "of several chunks the first one's sums are reduced for all": (
            "core.pipeline.executor.Pipeline._completed",
            ("x[slots(path) :]", "x[: -slots(path)]"),
            gradient("blocks/attention/key/weight, layer 2, 3", ON_RING | ON_OVERLAPPED | {"mesh": (2, 2, 1)}),
        ),
        "a stage freezes the layers that the first one does": (
            "core.program.state.StateLayout._with_frozen",
            ("axis_index(PIPE)", "0 * axis_index(PIPE)"),
            gradient("blocks/attention/key/weight, layer 1", ON_PIPE | {"freeze": ("layers.0",)}),
        ),
    },
    "Deferred weight gradients": {
        "a weight gradient from the factors beside its own": (
            "core.pipeline.executor.Pipeline._weight_gradients",
            ("number % deferral.num_slots", "(number + 1) % deferral.num_slots"),
            gradient("blocks/attention/key/weight, layer 0, 1, 2, 3", ON_DEFERRED),
        ),
        "there is a slot too few for factors": (
            "core.pipeline.schedule.with_deferral",
            (
                "int(most_kept(backward.active, early, late).max())",
                "max(1, int(most_kept(backward.active, early, late).max()) - 1)",
            ),
            types("overwritten", ON_DEFERRED),
        ),
        "the gradient of shared heads of keys is the first head's": (
            "core.parallel.layers.ColumnParallelLinear.of_all_parts",
            ("self.first_part", "None if self.first_part is None else 0 * self.first_part"),
            gradient(
                "blocks/attention/key/weight, layer 0, 1",
                {"mesh": (1, 2, 4), "weight_gradients": "deferred", **FEW_KEYS},
            ),
        ),
        "gradients deferred beyond the last backward are left out": (  # Megatron-LM #1012
            "core.pipeline.executor.Pipeline.tick",
            ("self.weight_gradients(schedule, row.late, sums)", "sums"),
            gradient("blocks/attention/key/weight, layer 0, 1, 2, 3", ON_DEFERRED),
        ),
        "a weight gradient goes to the chunk of the one before it": (
            "core.pipeline.executor.Pipeline._weight_gradients",
            ("jnp.asarray(deferral.chunk)[:, self.stage]", "jnp.roll(jnp.asarray(deferral.chunk)[:, self.stage], 1)"),
            gradient("blocks/attention/key/weight, layer ", ON_RING | {"weight_gradients": "deferred"}),
        ),
    },
    "The sharded vocabulary": {
        "a device has one row too many": (
            "core.parallel.vocabulary._local_ids",
            ("ids_BT < local_size", "ids_BT <= local_size"),
            named("input of layer 0, forward", ON_TENSOR),
        ),
        "padded columns are looked for in each device's first ones": (
            "core.parallel.vocabulary.output_logits",
            ("axis_index(boundary.vocabulary)", "0"),
            named("logits of the head, forward", ON_TENSOR),
        ),
        "the exponentials lie below each device's own maximum": (
            "core.parallel.vocabulary._forward",
            ("max_BT[..., None]", "jnp.max(logits_BTV, axis=-1, keepdims=True).astype(dtype)"),
            named("losses of the head, forward", ON_TENSOR),
        ),
        "the gradient has a hit on every device": (
            "core.parallel.vocabulary._backward",
            ("inside_BT[..., None]", "(ids_BT >= 0)[..., None]"),
            named("logits of the head, backward", ON_TENSOR),
        ),
        "padded columns have probability": (
            "core.parallel.vocabulary.output_logits",
            ("column_V < vocab_size", "column_V >= 0"),
            tests("tests/core/parallel/test_vocabulary.py"),
        ),
        "a device's own exponentials are the sum": (  # Megatron-LM #737
            "core.parallel.vocabulary._forward",
            ("g((sum_BT, picked_BT), axes)", "(sum_BT, g(picked_BT, axes))"),
            types(VARYING, ON_TENSOR),
        ),
        "the exponentials count on every device": (  # Megatron-LM #7452, finding 2
            "core.parallel.vocabulary._forward",
            ("jnp.log(sum_BT)", "jnp.log(sum_BT * lax.axis_size(axes))"),
            named("losses of the head, forward", ON_TENSOR),
        ),
        "logits without the target get no gradient": (  # ms-swift #9947
            "core.parallel.vocabulary._backward",
            (
                "probability_BTV - hit_BTV.astype(probability_BTV.dtype)",
                "jnp.where(inside_BT[..., None], probability_BTV - hit_BTV.astype(probability_BTV.dtype), 0)",
            ),
            named("logits of the head, backward", ON_TENSOR),
        ),
    },
    "Positions and tokens of a split sequence": {
        "learned positions are those of the first tokens": (
            "core.models.decoder.model.TransformerDecoder.embedding",
            (
                'self.boundary.own_tokens(self.positions[...][: batch["tokens"].shape[1]], 0)',
                "self.positions[...][: x_BTD.shape[1]]",
            ),
            named("input of layer 0, forward", ON_SEQUENCE),
        ),
        "gathered tokens stand in another order": (
            "core.parallel.boundary.RegionBoundary.enter",
            (
                "gather_shards(x_BTD, TOKENS, TENSOR)",
                "jnp.roll(gather_shards(x_BTD, TOKENS, TENSOR), x_BTD.shape[TOKENS], TOKENS)",
            ),
            named("query of layer 0, forward", ON_SEQUENCE),
        ),
        "a split sequence is not gathered for a product": (
            "core.parallel.layers._entered",
            ("boundary.enter(input_BTD)", "input_BTD"),
            types("shapes", ON_SEQUENCE),
        ),
        "masked tokens are looked for among each device's first ones": (
            "core.parallel.tokens.TokenShares._own_places",
            ("axis_index(TENSOR)", "0"),
            named("logits of the head, forward", ON_SEQUENCE | BERT),
        ),
        "every device's first token counts as the sequence's": (
            "core.parallel.tokens.TokenShares.of_first_token",
            ("axis_index(TENSOR) == 0", "axis_index(TENSOR) >= 0"),
            named("the sum of the losses: step 1, loss/sentence_order", ON_SEQUENCE | BERT),
        ),
        "a document sees the last token of the one before it": (
            "core.models.attention_mask.AttentionMask.in_documents",
            ("place_T[None, :] - position_BT", "jnp.maximum(place_T[None, :] - position_BT - 1, 0)"),
            tests("tests/core/models/test_forward.py -k document"),
        ),
    },
    "Coordinates of dropout": {
        "rows are numbered from each device's first one": (
            "core.program.bind._pipeline",
            ("axis_index(ROW_AXES)", "0"),
            named("input of layer 0, forward: rows never computed", ON_DATA),
        ),
        "heads are numbered from each device's first one": (
            "core.models.attention_setting.Setting._heads",
            ("axis_index(self.head_axes) * num_heads", "0"),
            named("attention_heads of layer 0, forward", ON_TENSOR),
        ),
        "tokens are numbered from each device's first one": (
            "core.parallel.tokens.TokenShares.token_index",
            ("axis_index(TENSOR) * size if self.sequence_parallel else 0", "0"),
            named("input of layer 0, forward", ON_SEQUENCE),
        ),
        "every device of a tensor group has masks of its own": (
            "core.parallel.random.Dropout.at",
            ("RandomBits.from_seed(seed)", 'RandomBits.from_seed(seed).fold(lax.axis_index("tensor"))'),
            types(VARYING, ON_TENSOR),
        ),
        "two sites of a layer share a mask": (
            "core.models.layer.Block.__call__.branch",
            ("DROPOUT_SITES[site]", "1"),
            tests("tests/core/models/test_forward.py"),
        ),
        "all layers share their masks": (
            "core.models.context.Context.in_layer",
            ("self.dropout.fold(layer)", "self.dropout.fold(0)"),
            tests("tests/core/models/test_forward.py"),
        ),
        "masks do not depend on the step": (
            "core.parallel.random.Dropout.at",
            ("RandomBits.from_seed(seed).fold(step)", "RandomBits.from_seed(seed)"),
            tests("tests/core/models/test_forward.py"),
        ),
    },
    "Tokens of a context group": {
        "queries that see none of a device's keys give NaN": (  # Megatron-LM #1764
            "core.models.blocked_attention._blocks",
            ("jnp.maximum(highest_NR1, jnp.finfo(highest_NR1.dtype).min)", "highest_NR1"),
            compiled("fp64 losses", ON_DOCUMENTS),
        ),
        "gradients of keys are summed twice": (  # Megatron-LM #1464
            "core.models.context_attention._scattered",
            (
                "by_device.reshape(x_BSHK.shape)",
                "vary_as(lax.psum(by_device.reshape(x_BSHK.shape), CONTEXT), by_device)",
            ),
            named("value of layer 1, backward", ON_CONTEXT),
        ),
        "documents are those of the first device": (  # TransformerEngine #1930
            "core.models.context_attention.attend_to_others",
            ("boundary.context_tokens", "lambda x_BT: x_BT[:, : q_BTHK.shape[1]]"),
            named("attention_heads of layer 0, forward", ON_DOCUMENTS),
        ),
        "the mask counts from each device's first token": (
            "core.models.context_attention.attend_to_others",
            ("jnp.asarray(start, jnp.int32)", "jnp.asarray(0 * start, jnp.int32)"),
            named("attention_heads of layer 0, forward", ON_CONTEXT),
        ),
        "rotary positions count from each device's first token": (
            "core.models.decoder.model.TransformerDecoder.context",
            (
                "self.boundary.context_tokens(position_BT)",
                "position_BT[:, : self.boundary.context_tokens(position_BT).shape[1]]",
            ),
            named("rotated_query of layer 0, forward", ON_CONTEXT | FEW_KEYS),
        ),
        "losses are divided by a device's own targets of a sequence": (
            "core.program.bind.BoundModel.head",
            ("jnp.maximum(self.counts[name], 1)", 'jnp.maximum(self.counts[name] // lax.axis_size("context"), 1)'),
            named("the sum of the losses: step 1", ON_CONTEXT),
        ),
        "keys get gradients from their own device's queries alone": (  # NeMo Speech #15679
            "core.models.context_attention._scattered",
            ("scatter_sum", "scatter_sum.__globals__['own_shard']"),
            named("value of layer 1, backward", ON_CONTEXT),
        ),
        "a window is ignored on context ranks": (  # prime-rl #2828
            "core.models.context_attention.attend_to_others",
            ("setting.visible", "dataclasses.replace(setting.visible, window=None)"),
            named("attention_heads of layer 0, forward", ON_CONTEXT | {"sliding_window": 6}),
        ),
        "a stage finds its layers' windows by another stage's numbers": (
            "core.models.context.Context.in_layer",
            ("jnp.asarray(windowed)[layer]", "jnp.asarray(windowed)[layer - jax.lax.axis_index('pipe')]"),
            named("attention_heads of layer 1, forward", ON_PIPE | FEW_KEYS | {"window_layers": "1,1"}),
        ),
        "gradients of exchanged heads grow with the group": (  # DeepSpeed #5248
            "core.models.context_attention._by_heads",
            (
                "exchange(heads_BSHK, TOKENS, HEADS, CONTEXT)",
                f"{DOUBLED}(exchange(heads_BSHK, TOKENS, HEADS, CONTEXT), axis_size(CONTEXT))",
            ),
            named("value of layer 1, backward", ON_HEADS),
        ),
        "sinks count once for each device of the group": (
            "core.models.sinks.with_sinks",
            ("jnp.exp(sink - most)", "__import__('jax').lax.axis_size('context') * jnp.exp(sink - most)"),
            named("attention_heads of layer 0, forward", ON_CONTEXT | WITH_SINKS),
        ),
        "exchanged heads have the sinks of the first ones": (
            "core.models.context_attention._by_heads",
            ("own_shard(setting.sink_H, 0, CONTEXT)", "setting.sink_H[: q_BSHK.shape[HEADS]]"),
            named("attention_heads of layer 0, forward", ON_HEADS | WITH_SINKS),
        ),
        "of a key's gradient the last block of queries' stays": (
            "core.models.blocked_attention._added",
            ("total_NKS.at[:, :, keys].add(block)", "total_NKS.at[:, :, keys].set(block)"),
            named("value of layer 1, backward", ON_CONTEXT),
        ),
        "keys of the device before are a token further on": (
            "core.models.context_attention._by_window",
            ("start_P - before", "start_P - before + 1"),
            named("attention_heads of layer 0, forward", {"mesh": (1, 1, 2, 1), "sliding_window": 3}),
        ),
        "a piece from the back begins with a tile too late": (
            "core.models.context_attention._over_tiles",
            ("turn >= axis_index(CONTEXT)", "turn > axis_index(CONTEXT)"),
            named("attention_heads of layer 0, forward", ON_CONTEXT),
        ),
    },
    "Shards of ZeRO": {
        "a device updates another one's shard": (
            "core.parallel.collectives.own_shard",
            ("axis_index(axes) * size", "(axis_size(axes) - 1 - axis_index(axes)) * size"),
            named("what the skipped step changes: params/blocks/", ON_DATA),
        ),
        "gathered weights stand in another order": (
            "core.parallel.shards.Shards.gather",
            (
                "gather_shards(shard, dim, axes, invariant=invariant)",
                "jax.numpy.roll(gather_shards(shard, dim, axes, invariant=invariant), shard.shape[dim], dim)",
            ),
            named("input of layer 0, forward", ON_ZERO3),
        ),
        "a device takes the shard after its own where a dim is padded": (
            "core.parallel.shards.Shards._map",
            (
                "function(sharding.padded(x), sharding.dim, sharding.axes)",
                "function(jnp.roll(sharding.padded(x), -sharding.padding, sharding.dim), sharding.dim, sharding.axes)",
            ),
            named("blocks/", ON_ODD),
        ),
        "a norm counts padding": (
            "core.parallel.shards.Sharding.padded",
            ("jnp.pad(x, widths)", 'jnp.pad(x, widths, mode="edge")'),
            named("the norm of the gradients: grad_norm", ON_ODD),
        ),
        "padding takes the place of numbers": (
            "core.parallel.shards.Sharding.without_padding",
            (
                "lax.slice_in_dim(x, 0, x.shape[self.dim] - self.padding, axis=self.dim)",
                "lax.slice_in_dim(x, self.padding, x.shape[self.dim], axis=self.dim)",
            ),
            named("forward", ON_ODD | {"zero": 3}),
        ),
        "a layer has the gathered weights of the layer before it": (
            "core.program.reduction.gathered_in_turn",
            ("one_layer(own, place)", "one_layer(own, max(0, place - 1))"),
            named("of layer 1, forward", ON_GATHERED),
        ),
        "gradients are not summed over replicas": (
            "core.parallel.collectives.complete",
            ("varying_axes(leaf) - axes", "varying_axes(leaf) - axes - {REPLICA}"),
            types(VARYING, ON_REPLICAS | {"zero": 3}),
        ),
        "the first replica's gradients count for all": (
            "core.program.reduction.GradientReduction.everywhere",
            (
                "shards.scatter(gradients)",
                "jax.tree.map(lambda x: jnp.where(Shards.scatter.__globals__['axis_index']('replica') == 0, x, 0 * x), "
                "shards.scatter(gradients))",
            ),
            gradient("blocks/attention/key/weight, layer 0, 1", ON_REPLICAS),
        ),
        "new weights are not gathered": (
            "core.program.train_step._train_step_with_gradients",
            ("layout.at_end.gather(layout.computed(main), invariant=True)", "layout.computed(main)"),
            types(VARYING, ON_DATA),
        ),
    },
    "Muon": {
        "a matrix is orthogonalised per shard": (
            "core.optim.muon._Deal._owners",
            ("axis_size(self.row_axes) * axis_size(self.column_axes)", "1"),
            named(
                "the update of the weights: blocks/attention/key/weight, layer 0, 1 … the collective that is wrong: "
                "0 instead of 2 all-to-all over data x expert x context x tensor of [4, 8, 32]",
                ON_MUON,
            ),
        ),
        "a skipped step moves the momentum": (
            "core.optim.muon.scale_by_muon.advance",
            ("choose", "(lambda taken, new, old: new)"),
            named("what the skipped step changes: optimizer/0/momentum/blocks/attention/", ON_MUON),
        ),
        "shards come back to other matrices": (
            "core.optim.muon._Deal.shards",
            ("x.reshape(-1, rows, columns)", "jnp.roll(x.reshape(-1, rows, columns), 1, 0)"),
            named("the update of the weights: blocks/attention/key/weight, layer 0, 1", ON_MUON),
        ),
        "a matrix is as large as its padded shards": (
            "core.optim.muon.orthogonal_updates",
            ("_scale(matrix.num_rows, matrix.num_columns, config)", "_scale(rows, columns, config)"),
            named("the update of the weights: blocks/", ON_ODD | {"optimizer": {"name": "muon"}}),
        ),
    },
    "LoRA": {
        "gradients of adapters are averaged": (
            "core.parallel.collectives.sum_over",
            ("lax.psum(tree, axes)", MEAN_OVER_TENSOR),
            gradient(
                "blocks/attention/key/a, layer 0, 1",
                ON_TENSOR | {"lora": LoraConfig(rank=2)},
                "all-reduce over tensor",
            ),
        ),
        "what A gives is summed over the tensor group before B": (
            "core.parallel.layers.ProductLayer.completed",
            (
                "products(self.rule(self.contracted), x, [self.a[...]], *beside)",
                'lax.psum(products(self.rule(self.contracted), x, [self.a[...]], *beside), "tensor")',
            ),
            named("query of layer 0, forward", ON_TENSOR | {"lora": LoraConfig(rank=2)}),
        ),
        "adapters of shared heads of keys are the first head's": (
            "core.parallel.layers.ProductLayer.completed",
            ("self.own(self.b[...], 1)", "self.b[...] if self.first_part is None else self.b[...][:, :1]"),
            named("key of layer 0, forward", ON_SHARED_KEYS | {"lora": LoraConfig(rank=2)}),
        ),
        "experts have the adapters of others": (
            "core.parallel.layers.ProductLayer.completed",
            ("self.a[...]", 'jnp.roll(self.a[...], self.stacked * (lax.axis_size("expert") - 1), 0)'),
            named("experts_output of layer 0, forward", ON_ADAPTED_EXPERTS),
        ),
        "merged adapters lack their scale": (
            "core.models.lora.Adapters.added",
            ("self._scale * added", "added"),
            named(
                "no difference in the step: exact generation with a cache: ", ON_TENSOR | {"lora": LoraConfig(rank=2)}
            ),
        ),
    },
    "The norm of the gradients": {
        "the norm is that of a device's shards": (
            "core.optim.adam.global_norm",
            ("sum_over(square, sorted(axes))", "square"),
            types(VARYING, ON_TENSOR),
        ),
        "the norm counts what devices share several times": (
            "core.optim.adam.global_norm",
            ("varying_axes(grad)", 'varying_axes(grad) | {"tensor"}'),
            named("the norm of the gradients: grad_norm, step 1", ON_TENSOR),
        ),
        "the norm counts every replica": (
            "core.program.train_step._train_step_with_gradients",
            (
                "global_norm(grads)",
                "global_norm(jax.tree.map(lambda x: jnp.concatenate([x] * program.config.mesh.replica), grads))",
            ),
            named("the norm of the gradients: grad_norm, step 1", ON_REPLICAS),
        ),
        "the norm counts the tied embedding on every stage": (
            "core.optim.adam.global_norm",
            ("varying_axes(grad)", 'varying_axes(grad) | {"pipe"}'),
            named("the norm of the gradients: grad_norm, step 1", ON_PIPE),
        ),
        "the norm leaves sharded weights out": (
            "core.optim.adam.global_norm",
            ("sums.items()", '[each for each in sums.items() if "tensor" not in each[0]]'),
            tests("tests/core/optim/test_adam.py"),
        ),
        "every stage clips by its own norm": (  # torchtitan #596
            "core.optim.adam.global_norm",
            ("sum_over(square, sorted(axes))", 'sum_over(square, sorted(axes - {"pipe"}))'),
            types(VARYING, ON_PIPE),
        ),
        "the norm is a mean of devices' norms": (  # DeepSpeed #8478
            "core.optim.adam.global_norm",
            (
                "sum_over(square, sorted(axes))",
                "(jnp.square(lax.pmean(jnp.sqrt(square), tuple(sorted(axes)))) if axes else square)",
            ),
            named("no activation or gradient of step 1: the norm of the gradients: grad_norm", ON_EXPERTS),
        ),
    },
    "Mixtures of experts": {
        "the norm leaves out experts that are sharded": (
            "core.optim.adam.global_norm",
            ("sums.items()", "[x for x in sums.items() if 'expert' not in x[0] or lax.axis_size('expert') == 1]"),
            named("no activation or gradient of step 1: the norm of the gradients: grad_norm", ON_EXPERTS),
        ),
        "gradients of experts are doubled on two devices": (
            "core.parallel.layers.multiply",
            (
                "linear.own(linear.weight[...], 1)",
                "(lambda x, n: n * x - (n - 1) * lax.stop_gradient(x))"
                '(linear.own(linear.weight[...], 1), lax.axis_size("expert") if linear.stacked else 1)',
            ),
            gradient("blocks/mlp/", ON_DROPLESS),
        ),
        "every device of a tensor group adds the biases of experts": (
            "core.models.experts.ExpertLinear.completed",
            ("axis_index(TENSOR) == 0", "axis_index(TENSOR) >= 0"),
            named("experts_output of layer 0, forward", ON_DROPLESS | GPT_OSS | {"mesh": (1, 1, 2), "expert": 1}),
        ),
        "a capacity is of a device's own tokens": (
            "core.models.experts.Mixture._by_capacity",
            ("boundary.length_of(routing.chosen_BTK)", "routing.chosen_BTK.shape[1]"),
            named("experts_output of layer 0, forward", ON_SHARED_SEQUENCES),
        ),
        "places are counted over a microbatch": (
            "core.models.experts.Mixture._by_capacity",
            (
                "_places(boundary.of_all_tokens(routing.chosen_BTK), experts)",
                "(lambda x: _places(x.reshape(1, -1, x.shape[-1]), experts).reshape(x.shape))"
                "(boundary.of_all_tokens(routing.chosen_BTK))",
            ),
            named("experts_output of layer 0, forward", ON_EXPERTS),
        ),
        "the permutation of the first all-to-all is not undone": (
            "core.models.experts.DispatchByCapacity.combine",
            (
                "exchange(out.swapaxes(0, 1), 0, 0, EXPERT)",
                "jnp.roll(exchange(out.swapaxes(0, 1), 0, 0, EXPERT), out.shape[1] // axis_size(EXPERT), axis=0)",
            ),
            named("experts_output of layer 0, forward", ON_EXPERTS),
        ),
        "shares are not renormalised": (
            "core.models.router.Router.__call__",
            ("share_BTK / jnp.where(real_BT1, total_BT1, jnp.ones((), dtype))", "share_BTK"),
            tests("tests/core/models/test_mixture.py -k by_hand"),
        ),
        "shares are renormalised on one device alone": (
            "core.models.router.Router.__call__",
            (
                "share_BTK / jnp.where(real_BT1, total_BT1, jnp.ones((), dtype))",
                "share_BTK / (jnp.where(real_BT1, total_BT1, jnp.ones((), dtype)) "
                "if lax.axis_size('expert') == 1 else 1)",
            ),
            named("experts_output of layer 0, forward", ON_EXPERTS),
        ),
        "a skipped step moves the biases": (
            "core.program.train_step._with_moved_biases",
            ("jnp.where(taken, new, bias)", "new"),
            named("what the skipped step changes: params/blocks/mlp/router/bias", ON_BIASES),
        ),
        "of an expert's gradient the last block's stays": (
            "core.models.grouped.grouped_weight_gradient.add",
            (
                "total_EIO.at[group_G].add(product_GIO, indices_are_sorted=True, unique_indices=False)",
                "total_EIO.at[group_G].set(product_GIO)",
            ),
            gradient("blocks/mlp/", ON_DROPLESS),
        ),
        "the balancing loss takes squares of loads": (
            "core.models.router.Router._imbalance",
            ("often_BE * jnp.sum(share_BTE, axis=1)", "often_BE * often_BE"),
            tests("tests/core/models/test_mixture.py -k by_hand"),
        ),
        "the balancing loss is not a mean over the batch": (
            "core.program.bind.training_pipeline",
            ("scale / jnp.maximum(sequences, 1).astype(scale.dtype)", "scale"),
            tests("tests/core/models/test_mixture.py -k balancing"),
        ),
        "the loss of large logits is not of squares": (
            "core.models.router.Router.__call__",
            ("jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1))", "jax.nn.logsumexp(logits_BTE, axis=-1)"),
            tests("tests/core/models/test_mixture.py -k by_hand"),
        ),
        "an evaluation drops tokens": (
            "core.models.config.ModelConfig.forward_only",
            ("replace(self, expert_capacity=0.0, prediction_coefficient=0.0)", "self"),
            tests("tests/core/models/test_mixture.py -k evaluation"),
        ),
        "biases follow the loads of a device": (
            "core.program.train_step._losses_and_gradients",
            (
                "complete(sums, dict.fromkeys(sums, SCALAR))",
                "sums if LOAD in sums else complete(sums, dict.fromkeys(sums, SCALAR))",
            ),
            types(VARYING, ON_BIASES),
        ),
        "gradients of the router grow with the group": (  # transformers #48687
            "core.models.experts.DroplessDispatch.combine",
            (
                "gather_shards(share_BTK, 0, EXPERT)",
                f'{DOUBLED}(gather_shards(share_BTK, 0, EXPERT), lax.axis_size("expert"))',
            ),
            named("router_logits of layer 1, backward", ON_DROPLESS),
        ),
        "the balancing loss is divided by the context group": (  # Megatron-LM #3959
            "core.program.bind.training_pipeline",
            (
                "scale / jnp.maximum(sequences, 1).astype(scale.dtype)",
                "scale / (jnp.maximum(sequences, 1).astype(scale.dtype) * lax.axis_size('context'))",
            ),
            named("router_logits of layer 1, backward", ON_SHARED_BALANCE),
        ),
        "every microbatch adds a whole balancing loss": (  # NeMo Automodel #3359, Megatron-LM #7213
            "core.program.bind.training_pipeline",
            (
                "scale / jnp.maximum(sequences, 1).astype(scale.dtype)",
                "scale * program.num_microbatches / jnp.maximum(sequences, 1).astype(scale.dtype)",
            ),
            named("router_logits of layer 1, backward", ON_SHARED_BALANCE),
        ),
        "the balancing loss has no gradient": (  # NeMo Automodel #1408
            "core.models.experts.Mixture.__call__",
            ("attached(y_BTD, routing.loss_B, context.loss_weight)", "y_BTD"),
            tests("tests/core/models/test_mixture.py -k balancing"),
        ),
        "each device has another order of groups": (
            "core.models.router.Router._in_best_groups",
            (
                "lax.top_k(group_BTG, config.chosen_groups)[1]",
                "(lax.top_k(group_BTG, config.chosen_groups)[1] + lax.axis_index('expert')) % config.expert_groups",
            ),
            named("experts_output of layer 0, forward", ON_GROUPS),
        ),
        "loads are rounded to bf16": (  # Megatron-LM #7081
            "core.models.router.Router.__call__",
            (
                "jnp.sum(count_BE, axis=0, dtype=jnp.int32)",
                "jnp.sum(count_BE, axis=0, dtype=jnp.int32).astype(jnp.bfloat16).astype(jnp.int32)",
            ),
            tests("tests/core/models/test_mixture.py -k by_hand"),
        ),
        "a router's own losses are means over a device's tokens": (
            "core.models.router.Router.__call__",
            ("jnp.sum(context.real_BT, axis=1)", "jnp.sum(real_BT1[..., 0], axis=1)"),
            named("router_logits of layer 1, backward", ON_SHARED_SEQUENCES | {"router_z_loss": 0.3}),
        ),
        "groups are ranked by all of their scores": (
            "core.models.router.Router._in_best_groups",
            ('lax.top_k(share_BTGE, 2 if config.router_scores == "sigmoid" else 1)[0]', "share_BTGE"),
            tests("tests/core/models/test_mixture.py -k by_hand"),
        ),
        "biases of routers follow the loads of the first stage": (
            "core.program.train_step._with_moved_biases",
            ("axis_index(PIPE)", "0 * axis_index(PIPE)"),
            named("the update of the weights: blocks/mlp/router/bias", ON_BIASES | {"mesh": (1, 2, 1), "expert": 1}),
        ),
    },
    "Latent attention": {
        "gradients of latents grow with the group": (
            "core.models.latent.LatentAttention._latents",
            (
                "self.boundary.enter(jnp.concatenate(parts, axis=-1))",
                f"{DOUBLED}(self.boundary.enter(jnp.concatenate(parts, axis=-1)), lax.axis_size('tensor'))",
            ),
            named("query_latent of layer 1, backward", ON_LATENTS),
        ),
        "the gradient of the latent's norm is that of a device's heads": (
            "core.models.latent.LatentAttention._latents",
            (
                "self.key_value_norm(latent_BTL[..., :size])",
                "self.key_value_norm(lax.pcast(latent_BTL[..., :size], 'tensor', to='varying'))",
            ),
            types(VARYING, ON_LATENTS),
        ),
        "each device has another shared key": (
            "core.models.latent.LatentAttention._keys_and_values",
            (
                "jnp.broadcast_to(key_BSP[:, :, None], (*k_BSHN.shape[:3], key_BSP.shape[-1]))",
                "jnp.broadcast_to((1 + lax.axis_index('tensor')).astype(key_BSP.dtype) * key_BSP[:, :, None], "
                "(*k_BSHN.shape[:3], key_BSP.shape[-1]))",
            ),
            named("expanded_key of layer 0, forward", ON_LATENTS),
        ),
        "gathered latents are in the order of devices": (
            "core.models.latent.LatentAttention._keys_and_values",
            ("gathered(latent_BTL)", "lax.all_gather(latent_BTL, CONTEXT, axis=1, tiled=True, to='varying')"),
            named("expanded_key of layer 0, forward", ON_CONTEXT | LATENT),
        ),
    },
    "Modules for further tokens": {
        "tokens are shifted on each device of a context group": (
            "core.models.prediction._shifted",
            (
                "jnp.pad(x_BT[:, number:], ((0, 0), (0, number)))",
                "jnp.concatenate([jnp.pad(part[:, number:], ((0, 0), (0, number))) "
                "for part in jnp.split(x_BT, lax.axis_size('context'), axis=1)], axis=1)",
            ),
            named("input of layer 2, forward", ON_CONTEXT | {"prediction_modules": 1}),
        ),
        "each stage that shares the head counts a module's loads": (
            "core.pipeline.ends.EmbeddingAndHead._head",
            ("jnp.where(here, x, jnp.zeros_like(x))", "x"),
            named("expert_load", ON_EXPERTS | {"mesh": (1, 2, 1), "vocabulary": "split", "prediction_modules": 1}),
        ),
    },
    "Products in 8 bits": {
        "a scale is that of a device's share of a row": (
            "core.parallel.float8.scales",
            ("[*max_over(jnp.stack(bits), tuple(over))]", "bits"),
            tests("tests/test_golden_communication.py -k fp8"),
        ),
        "devices that share a head each add all of its product": (
            "core.parallel.float8._once",
            ("jnp.where(first, product, jnp.zeros((), product.dtype))", "product"),
            named("attention_norm of layer 1, backward", ON_SHARED_KEYS | {"precision": "fp8"}),
        ),
        "a scale leaves numbers beyond the maximum": (
            "core.parallel.float8._powers",
            ("jnp.minimum(bits, _INFINITE - 1) + _TO_NEXT", "jnp.minimum(bits, _INFINITE - 1)"),
            tests("tests/core/parallel/test_float8.py"),
        ),
        "an infinity is clipped": (
            "core.parallel.float8._powers",
            ("jnp.where(bits < _INFINITE, power, jnp.nan)", "power"),
            tests("tests/core/parallel/test_float8.py"),
        ),
        "layers in bf16 are counted from each stage's first one": (
            "core.program.float8.LayerCopies.added",
            ("layer_index < self._first", "jnp.arange(len(layer_index)) < self._first"),
            tests("tests/core/program/test_float8_step.py -k under_a_pipe"),
        ),
        "only the layers in bf16 are in 8 bits": (
            "core.parallel.float8._either",
            ("is_wide > 0", "is_wide == 0"),
            tests("tests/core/parallel/test_float8.py -k wide"),
        ),
    },
    "State beside the weights": {
        "the average is taken before the biases move": (
            "core.program.train_step._train_step_with_gradients",
            (
                "averaged(state.average, main, config.train.ema, taken)",
                "averaged(state.average, updated(layout, clipped, state.optimizer, "
                "layout.per_step.take(layout.trained(state.params)), taken)[0], config.train.ema, taken)",
            ),
            named("moving average, by its definition: blocks/mlp/router/bias", ON_AVERAGED_BIASES),
        ),
        "a skipped step moves the average": (
            "core.optim.adam.averaged",
            ("choose(taken, moved, average)", "moved"),
            named("what the skipped step changes: average/blocks/", ON_DATA | {"ema": 0.5}),
        ),
        "the average keeps what it should forget": (
            "core.optim.adam.averaged",
            ("1.0 - decay", "decay"),
            named("moving average, by its definition: ", ON_DATA | {"ema": 0.75}),
        ),
        "a resumed run begins with the first loss scale": (
            "core.optim.loss_scale.LossScale.resumed",
            ("self.scale > 0", "self.scale > LARGEST"),
            tests("tests/runs/test_checkpoint.py -k scale"),
        ),
    },
    "The dtype of sums": {
        "gradients are summed in the dtype of the weights": (
            "core.program.bind.summation_of",
            ("program.gradient_dtype", "program.layout.compute_dtype"),
            compiled("bf16 dtype of sums of gradients: blocks/", ON_DATA | {"precision": "bf16"}),
        ),
        "gradients are rounded to bf16 as they are summed": (
            "core.pipeline.sums.Sums.add",
            (
                "before[path].at[layer].add(grad)",
                "before[path].at[layer].add(grad).astype('bfloat16').astype(before[path].dtype)",
            ),
            tests("tests/core/pipeline/test_sums.py"),
        ),
    },
    "Only the communication is wrong": {
        "gradients of shared heads of keys are summed in every layer": (
            "core.mesh.needs_tensor_sum",
            ("in_region(logical)", "False"),
            tests("tests/test_golden_communication.py -k heads"),
        ),
    },
    "Checkpoints between meshes": {
        "padding is written to a checkpoint": (
            "core.program.state.StateLayout._from_stages",
            (
                "weight.zero.without_padding(leaf)",
                "weight.zero.without_padding(jnp.roll(leaf, weight.zero.padding, weight.zero.dim))",
            ),
            named("blocks/", ON_ODD),
        ),
        "padding is read from a checkpoint": (
            "core.program.transfer.Transfer.from_canonical",
            (
                "Shards(padded).take(x)",
                "Shards(padded).take(jnp.roll(x, padded.padding, padded.dim) if padded.padding else x)",
            ),
            named("transfer of checkpoints: params/blocks/", ON_ODD | {"zero": 3}),
        ),
        "an all-to-all joins along the dim that it divides": (
            "core.parallel.collectives.exchange",
            (
                "lax.all_to_all(x, axes, split_axis=divided, concat_axis=joined, tiled=True)",
                "lax.all_to_all(x, axes, split_axis=joined, concat_axis=divided, tiled=True)",
            ),
            named("transfer of checkpoints: params/blocks/", ON_RING),
        ),
        "layers are written stage by stage where stages have several chunks": (
            "core.program.transfer.Transfer._spread",
            ("stack.num_chunks == 1 and not stack.padded", "not stack.padded"),
            named("transfer of checkpoints: params/blocks/", ON_CHUNKS),
        ),
        "a checkpoint's digest is not compared": (
            "runs.stored.read",
            ("manifest.arrays.get(name) != actual[name]", "name not in manifest.arrays"),
            tests("tests/runs/test_checkpoint.py"),
        ),
    },
    "The order of data": {
        "all devices get the first rows": (
            "core.program.program.Program.put_batch",
            ("range(*index[0].indices(shape[0]))", "range(len(range(*index[0].indices(shape[0]))))"),
            compiled("batch rows per data rank", ON_DATA),
        ),
        "a process loads the first rows, not its own": (
            "data.samples.loader.growing_batches.load",
            ("samples[first + row]", "samples[first + row % len(wanted)]"),
            tests("tests/data/samples/test_loader.py"),
        ),
        "a resumed run skips a batch": (
            "training.loop.Trainer.batches",
            (
                f"{GROWING}, start_step=self.first)",
                f"{GROWING}, start_step=self.first + (self.first > 0))",
            ),
            tests("tests/commands/test_resume.py"),
        ),
        "samples that a start no longer leaves out are left out": (
            "runs.order.Order.__init__",
            (
                "_after(drawn - self._drawn - 1, self._number, last.skip) + 1",
                "_after(drawn - self._drawn, self._number, last.skip)",
            ),
            tests("tests/runs/test_order.py"),
        ),
    },
    "Generation from a cache": {
        "tokens after a short prompt have the positions of their slots": (
            "core.models.cache.slot_positions",
            ("length_B1 + slot_1S - first_slot", "slot_1S + 0 * length_B1"),
            named("no difference in the step: exact generation with a cache: ", ON_DATA),
        ),
        "the first token follows the padding of a prompt": (
            "generation.programs.DecodingPrograms.prefill",
            ("(length_B - 1)[:, None, None]", "(0 * length_B + tokens_BT.shape[1] - 1)[:, None, None]"),
            named("no difference in the step: exact generation with a cache: ", ON_DATA),
        ),
    },
    "Formats of others": {
        "rotary features in pairs are taken apart as halves are joined": (
            "convert.weights.TensorPlace._reordered",
            ("sides", "sides[::-1]"),
            tests("tests/convert/test_settings.py -k rotary_features"),
        ),
    },
    "Linear attention": {
        name: (f"core.{where}", (right, wrong), how) for name, (where, right, wrong, how) in OF_LINEAR.items()
    },
}
CLASSES = {
    title: [Fault(name, where, *change, caught) for name, (where, change, caught) in rows.items()]
    for title, rows in ROWS.items()
}
FAULTS = [fault for faults in CLASSES.values() for fault in faults]

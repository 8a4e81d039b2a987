"""Bind a model, its weights and a batch to the pipeline loop. Inside the region: arrays are this device's shards."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax import Array
from jax.sharding import PartitionSpec

from megajax.core.axes import BATCH_AXES, ROW_AXES, SEQUENCE_AXES
from megajax.core.models.context import Context
from megajax.core.models.freeze import is_head, untrained_layers
from megajax.core.models.lora import layer_weights
from megajax.core.models.prediction import prediction_counts, prediction_losses
from megajax.core.models.remat import POLICIES
from megajax.core.models.staged import StagedModel, of_kind
from megajax.core.optim.adam import initial_norms
from megajax.core.parallel import sites
from megajax.core.parallel.collectives import PIPE, TENSOR, axis_index, complete, vary, vary_as
from megajax.core.parallel.integer_sums import bound_exponent, digit_bits
from megajax.core.parallel.products import Factors
from megajax.core.parallel.random import Dropout
from megajax.core.parallel.shards import Shards
from megajax.core.pipeline.ends import EmbeddingAndHead
from megajax.core.pipeline.executor import Pipeline
from megajax.core.pipeline.kinds import LayersOfKinds
from megajax.core.pipeline.model import LoopModel, Products
from megajax.core.pipeline.placement import Placement
from megajax.core.pipeline.pullback import LayerFunction
from megajax.core.pipeline.stages import Layers, rematerialized
from megajax.core.pipeline.sums import Floats, Integers, Summation
from megajax.core.program.float8 import LayerCopies
from megajax.core.program.in_parts import ModelInParts, ShardsInParts, form_of
from megajax.core.program.overlap import scans_layers
from megajax.core.program.program import BATCH, Batch, Program
from megajax.core.program.weight import Weight
from megajax.core.trees import Tree

Found = TypeVar("Found")
UNSCALED = np.float32(1.0)
SEQUENCES = "sequences"
_PLAIN = Floats(jnp.float32)


def count_targets(program: Program, batch: Batch) -> dict[str, Array]:
    """How many targets every loss and measure has in the global batch; with experts, also how many of its `SEQUENCES`
    are not only padding."""
    counts = program.form.counts(batch) | prediction_counts(program.config.model, batch)
    if program.config.model.num_experts:
        real_BT = program.model.context(batch, Dropout.off()).real_BT
        assert real_BT is not None
        counts[SEQUENCES] = jnp.any(real_BT, axis=1).sum()
    return complete(counts, dict.fromkeys(counts, PartitionSpec()))


@dataclass(frozen=True)
class BoundModel:
    """A staged model in one step: what the pipeline's loop calls (`pipeline/model.py`)."""

    staged: StagedModel
    dropout: float
    seed: int
    step: Array
    # How many targets every loss and measure has in the global batch, and how many `SEQUENCES`, in models with experts.
    counts: dict[str, Array]
    loss_weight: Array | None  # see `Context`
    length: int  # tokens in a sequence, of which a context rank may have some
    summation: Summation  # of layers' figures
    kind: str = ""  # of the layers

    def context(self, batch: Batch, row_B: Array) -> Context:
        """The rows' context, with this step's dropout."""
        found = self.staged.context(batch, Dropout.at(self.dropout, self.seed, self.step, row_B))
        return dataclasses.replace(found, row_B=row_B, loss_weight=self.loss_weight)

    @jax.named_scope("embedding")
    def embed(self, shared: Tree, batch: Batch, context: Context) -> Array:
        """The input of the first layer that stages divide."""
        return self.staged.ends(shared).embed(batch, context)

    def layer(
        self, weights: Tree, factors: Factors, layer: Array, x_BTD: Array, context: Context
    ) -> tuple[Array, dict[str, Array]]:
        """A layer's output and figures."""
        with sites.at(layer, context.row_B, self._tokens()):
            block = self.staged.layers[self.kind].block(weights)
            y_BTD, figures = block(x_BTD, dataclasses.replace(context, factors=factors), layer)
        return y_BTD, vary_as(self.summation.figures(figures), x_BTD)

    @jax.named_scope("head")
    def head(
        self, shared: Tree, x_BTD: Array, batch: Batch, context: Context
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Losses and measures, divided by their targets in the global batch, and the figures of modules' layers."""
        with sites.at(sites.HEAD, context.row_B, self._tokens()):
            x_BTD = sites.named(x_BTD, "last_output", self.staged.boundary.split)
            totals = self.staged.ends(shared).losses(x_BTD, batch, context)
            further, figures = self.staged.predictions(shared, x_BTD, batch, context)
        totals |= further
        means = {name: total / jnp.maximum(self.counts[name], 1).astype(total.dtype) for name, total in totals.items()}
        return means, vary_as(figures, x_BTD)

    def with_ends(self, function: Callable, shared: Tree, *args: Any, columns: bool = False) -> Tree:
        """See `LoopModel`."""
        return function(self.staged.ends(shared), *args)

    def _tokens(self) -> Array | None:
        """Positions of this context rank's tokens; None if it has all."""
        boundary, every_T = self.staged.boundary, jnp.arange(self.length, dtype=jnp.int32)
        return None if boundary.context == "none" else boundary.context_tokens(every_T, 0)


def summation_of(program: Program, recent_norms: Array, loss_scale: Array | np.float32 = UNSCALED) -> Floats | Integers:
    """How a step sums gradients and losses, given the gradient norms of the steps before it."""
    config, rows = program.config, program.config.train.global_batch
    if not config.bitwise:
        return Floats(program.gradient_dtype)
    exponent = bound_exponent(recent_norms, jnp.asarray(loss_scale), rows)
    return Integers(exponent, digit_bits(rows * config.bitwise))


def training_pipeline(
    program: Program,
    params: Tree,
    batch: Batch,
    step: Array,
    loss_scale: Array | np.float32 = UNSCALED,
    copies: Tree = None,
    summation: Summation | None = None,
    rank: Array | None = None,
) -> Pipeline:
    """The loop of a train step. Float8 copies of frozen weights that are not among `copies` are made here. The rows are
    those of a `rank` among `ROW_AXES`, by default this device's."""
    summation = summation or summation_of(program, initial_norms(), loss_scale)
    config, counts, length = program.config, count_targets(program, batch), batch["tokens"].shape[-1]
    scale, sequences = jnp.asarray(loss_scale), counts.get(SEQUENCES)
    weight = None if sequences is None else scale / jnp.maximum(sequences, 1).astype(scale.dtype)
    model = BoundModel(program.model, config.model.dropout, config.seed, step, counts, weight, length, summation)
    return _pipeline(program, model, params, batch, scale, copies, summation, rank)


def forward_pipeline(program: Program, staged: StagedModel, params: Tree, batch: Batch) -> Pipeline:
    """The loop of a forward-only program, for one of the program's forward models, without dropout."""
    nothing, one = jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32)
    counts = dict.fromkeys(program.form.targets | program.form.measures, one)
    model = BoundModel(staged, 0.0, program.config.seed, nothing, counts, None, batch["tokens"].shape[-1], _PLAIN)
    return _pipeline(program, model, params, batch, jnp.asarray(UNSCALED), None)


def _pipeline(
    program: Program,
    model: BoundModel,
    params: Tree,
    batch: Batch,
    loss_scale: Array,
    made: Tree,
    summation: Summation | None = None,
    rank: Array | None = None,
) -> Pipeline:
    """The loop; without a `summation` forward only."""
    config, layout, staged = program.config, program.layout, model.staged
    num_rows, num_microbatches = next(iter(batch.values())).shape[0], program.num_microbatches
    row_B = (axis_index(ROW_AXES) if rank is None else rank) * num_rows + jnp.arange(num_rows, dtype=jnp.int32)
    shared, blocks = _declared_varying(program, staged, params)
    frozen, unroll = layout.adapters is not None, not scans_layers(config, program.backend)
    deferred = config.mesh.pipe > 1 and config.pipeline.weight_gradients == "deferred"
    of_ends, of_layers = layout.per_use["shared"], layer_weights(layout.per_use.shardings)
    loop_model: LoopModel = model
    linear, size = staged.linear_embedding, (config.bitwise, config.bitwise // config.mesh.tensor)
    if config.bitwise > 1:
        forms = jax.tree.map(form_of, {"shared": layout.weights["shared"], "blocks": layer_weights(layout.weights)})
        of_ends = ShardsInParts(of_ends.shardings, forms["shared"], *size)
        loop_model = ModelInParts(model, staged, size[1], forms)
        linear = False
    ends = EmbeddingAndHead(
        model=loop_model,
        linear_embedding=linear,
        coefficients=_coefficients(program),
        loss_scale=loss_scale,
        shared=shared,
        storage=of_ends,
        frozen=frozen,
        of_head=frozenset(name for name in shared if is_head(("shared", name), config.model)),
        microbatches=jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), (batch, row_B)),
        vocabulary_split=config.splits_vocabulary,
        summation=summation or _PLAIN,
    )

    def layers_of(kind: str, stack: Placement) -> Layers:
        slots, numbers = stack.layer_index, np.asarray(config.model.kinds[kind], np.int32)
        layer_index = jnp.asarray(np.where(slots < 0, -1, numbers[slots]))[:, axis_index(PIPE)]
        layer_index = layer_index.reshape(-1, stack.run) if kind else layer_index
        records = of_kind(layout.weights["blocks"], kind)
        copies = LayerCopies(config.model, records, program.operand_dtype, both=summation is not None)
        given = jax.tree.map(lambda copy: copy.reshape(-1, *copy.shape[3:]), made)
        storage: Shards = Shards(copies.shardings(of_kind(of_layers, kind)))
        products: Products = staged.layers[kind]
        of_layer = dataclasses.replace(model, kind=kind)
        function: LayerFunction = of_layer.layer
        if isinstance(loop_model, ModelInParts):
            forms = loop_model.forms | {"blocks": of_kind(loop_model.forms["blocks"], kind)}
            products = dataclasses.replace(loop_model, model=of_layer, forms=forms, kind=kind)
            storage, function = ShardsInParts(storage.shardings, forms["blocks"], *size), products.layer
        function = rematerialized(function, POLICIES.get(config.train.remat), prevent_cse=unroll)
        return Layers(
            function=jax.jit(function, inline=True),  # traced once, though used in several places of the loop
            weights=copies.added(of_kind(blocks, kind), layer_index.reshape(-1), given),
            layer_index=layer_index,
            unroll=unroll,
            padded=stack.padded,
            storage=storage,
            recompute_stage=config.train.remat == "stage",
            summation=summation or _PLAIN,
            deferred=products if deferred else None,
            first_trained=untrained_layers(layout.frozen, staged.shapes, config.model),
            frozen=copies.paths | (flatten_dict(of_kind(params["blocks"], kind)).keys() if frozen else set()),
        )

    kinds = {kind: layers_of(kind, stack) for kind, stack in layout.stacks.items()}
    layers = LayersOfKinds(kinds, layout.placement.num_chunks) if len(kinds) > 1 else kinds[""]
    return Pipeline(ends, layers, num_microbatches)


def _coefficients(program: Program) -> dict[str, float]:
    """Of losses and measures, in what a step minimizes."""
    form, model = program.form, program.config.model
    own, modules = dict.fromkeys(form.targets, 1.0), prediction_losses(model)
    share = model.prediction_coefficient / max(1, len(modules))
    return dict.fromkeys(form.targets | form.measures, 0.0) | own | dict.fromkeys(modules, share)


def _declared_varying(program: Program, staged: StagedModel, params: Tree) -> tuple[Tree, Tree]:
    """The weights of the ends, and of the layers [v · n, …]. They are declared varying once, here: gradients then stay
    local sums until they are reduced, once per step."""
    shared_over = SEQUENCE_AXES if staged.boundary.sequence_parallel else ()
    records = program.layout.weights

    def varying(x: Array, weight: Weight) -> Array:
        if weight.needs_tensor_sum:
            return vary(x, (*BATCH_AXES, TENSOR))
        complete = program.config.bitwise > 1 and weight.is_vector
        return vary(x, BATCH_AXES if complete else (*BATCH_AXES, *shared_over))

    def by_chunk(x: Array, weight: Weight) -> Array:
        return varying(x, weight).reshape(-1, *x.shape[3:])

    shared = jax.tree.map(varying, params["shared"], records["shared"])
    shared = shared if program.config.splits_vocabulary else vary(shared, (PIPE,))
    return shared, jax.tree.map(by_chunk, layer_weights(params), layer_weights(records))


def trace_pipeline(program: Program, look: Callable[[Pipeline], Found]) -> Found:
    """The result of `look` on the loop of a train step, evaluated while tracing; nothing is computed."""
    results: list[Found] = []

    def region(params: Tree, batch: Batch) -> Array:
        step = jnp.zeros((), jnp.int32)
        results.append(look(training_pipeline(program, params, batch, step)))
        return step

    layout = program.layout
    region_of = program.region(region, (layout.computed_specs, BATCH), PartitionSpec())
    jax.eval_shape(region_of, layout.computed_shapes, program.batch_types)
    return results[-1]

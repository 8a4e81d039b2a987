"""The compiled programs of a run: the train step, scores of targets and next-token logits, each one `jit` of one
`shard_map`.

All mesh axes are manual and their types are checked. Letters: B batch, T tokens, V vocabulary.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megajax.backend import backend_of
from megajax.config import Config
from megajax.mesh import BATCH_SPEC
from megajax.models.gpt import GPTFunctions
from megajax.models.transformer import keep_dear
from megajax.optim.adam import clip_by_norm, global_norm, make_optimizer, update
from megajax.optim.guard import is_spike, remember
from megajax.optim.learning_rate import learning_rate
from megajax.parallel.collectives import DATA, PIPE, TENSOR, axis_index, complete, gather_shards, sum_over, vary
from megajax.parallel.random import Dropout
from megajax.parallel.split import Split
from megajax.parallel.vocabulary import IGNORED
from megajax.pipeline.ends import StageFunctions
from megajax.pipeline.executor import Pipeline
from megajax.pipeline.measuring import Part, repeat_part
from megajax.pipeline.schedule import Schedule, forward_only, make_schedule
from megajax.pipeline.stages import Layers, rematerialized
from megajax.precision import COMPUTE_DTYPE
from megajax.program.forms import batch_names, scan_layers, training_split, vocabulary_axes
from megajax.program.state import StateLayout, TrainState

Tree = Any
UNSCALED = np.float32(1.0)
Batch = dict[str, Array]  # "tokens", "targets", perhaps "positions" (`blocked_attention`), int32 [rows of the batch, T]


class Program:
    """A configuration on a mesh: where its state lives, and the compiled functions over it."""

    def __init__(self, config: Config, mesh: Mesh):
        self.config, self.mesh = config, mesh
        self.backend = backend_of(mesh)
        self.model = GPTFunctions(config.model, training_split(config), self.backend)
        self.layout = StateLayout(config, mesh, self.model)
        self.optimizer = make_optimizer(config.optimizer)
        self.batch_sharding = NamedSharding(mesh, BATCH_SPEC)
        summed_in = config.optimizer.gradient_dtype
        self.gradient_dtype = self.layout.main_dtype if summed_in == "fp32" else COMPUTE_DTYPE[summed_in]

    @cached_property
    def train_step(self):
        """(state, batch) -> (state, metrics): one optimizer step. The state is donated."""
        return self._compile(
            self._train_step, (self.layout.specs, BATCH_SPEC), (self.layout.specs, PartitionSpec()), donate_argnums=0
        )

    @cached_property
    def loss_and_gradients(self):
        """(params, batch, step) -> (loss, gradients): what the train step differentiates, gradients reduced."""
        in_specs = (self.layout.specs.params, BATCH_SPEC, PartitionSpec())
        return self._compile(self._loss_and_gradients, in_specs, (PartitionSpec(), self.layout.owned_specs))

    @cached_property
    def train_step_with_gradients(self):
        """(state, batch) -> (state, metrics, gradients): `train_step` that also shows the gradients before clipping."""
        state_specs = self.layout.specs
        out_specs = (state_specs, PartitionSpec(), self.layout.owned_specs)
        return self._compile(self._train_step_with_gradients, (state_specs, BATCH_SPEC), out_specs, donate_argnums=0)

    @cached_property
    def scores(self):
        """(params, batch) -> loss of every target and whether it is the arg-max (see `GPT.scores`), each [B, T], whole
        on every device; dropout off. Sequences may have any length that the model has positions for."""
        return self._compile(self._scores, (self.layout.specs.params, BATCH_SPEC), PartitionSpec())

    @cached_property
    def next_logits(self):
        """(params, batch, position) -> logits [B, V] of the token after `position`, padded columns included; dropout
        off."""
        specs = (self.layout.specs.params, BATCH_SPEC, PartitionSpec())
        return self._compile(self._next_logits, specs, PartitionSpec(DATA, vocabulary_axes(self.config)))

    def one_part(self, part: Part):
        """(params, batch, virtual stage, repeats) -> a number: see `pipeline/measuring.py`."""
        specs = (self.layout.specs.params, BATCH_SPEC, PartitionSpec(), PartitionSpec())
        return self._compile(partial(self._one_part, part), specs, PartitionSpec())

    def _compile(self, function, in_specs, out_specs, **options):
        region = jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)
        return jax.jit(region, **options)

    def put_batch(self, batch: dict[str, np.ndarray], rows: list[int]) -> Batch:
        """The global batch as arrays over the mesh, from the rows that this process holds, in the order of `rows`."""
        position = {row: index for index, row in enumerate(rows)}

        def put(local: np.ndarray) -> Array:
            shape = (self.config.train.global_batch, *local.shape[1:])

            def shard(index: Any) -> np.ndarray:
                return local[[position[row] for row in range(*index[0].indices(shape[0]))]]

            return jax.make_array_from_callback(shape, self.batch_sharding, shard)

        return {name: put(array) for name, array in batch.items()}

    @cached_property
    def local_rows(self) -> list[int]:
        """Rows of the global batch that this process's devices need."""
        size = self.config.train.global_batch
        index = self.batch_sharding.addressable_devices_indices_map((size,))
        slices = [index[0] for index in index.values() if index is not None]
        return sorted({row for rows in slices for row in range(*rows.indices(size))})

    @property
    def num_microbatches(self) -> int:
        """How many microbatches a device's rows are cut in; fewer rows than one are one."""
        train = self.config.train
        return max(1, train.global_batch // (self.config.mesh.data * train.microbatch))

    @cached_property
    def schedule(self) -> Schedule:
        """The table of a training step."""
        pipeline, pipe = self.config.pipeline, self.config.mesh.pipe
        return make_schedule(pipeline.schedule, pipe, self.num_microbatches, pipeline.chunks)

    @cached_property
    def _forward_schedule(self) -> Schedule:
        return forward_only(self.config.mesh.pipe, self.num_microbatches, self.config.pipeline.chunks)

    @cached_property
    def kept_bytes(self) -> int:
        """Bytes a device keeps of a microbatch's way through a chunk until it comes back; nothing is computed."""
        return self._bytes(Pipeline.kept_types)

    @cached_property
    def sum_bytes(self) -> int:
        """Bytes of a device's sums of gradients, and of its loss; nothing is computed."""
        return self._bytes(lambda pipeline: pipeline.sums(self.gradient_dtype))

    def _bytes(self, part: Callable[[Pipeline], Tree]) -> int:
        found: list[jax.ShapeDtypeStruct] = []

        def look(params: Tree, batch: Batch) -> Array:
            count = jnp.ones((), jnp.int32)
            found.extend(jax.tree.leaves(part(self._pipeline(params, batch, self.config.model.dropout, count, count))))
            return count

        shape = self.config.train.global_batch, self.config.model.sequence_length
        batch = dict.fromkeys(batch_names(self.config), jax.ShapeDtypeStruct(shape, jnp.int32))
        specs = (self.layout.specs.params, BATCH_SPEC)
        jax.eval_shape(self._compile(look, specs, PartitionSpec()), self.layout.shapes.params, batch)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in found)

    # Inside the region from here on: arrays are this device's shards.

    def _train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        return self._train_step_with_gradients(state, batch)[:2]

    def _train_step_with_gradients(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array], Tree]:
        config, layout = self.config, self.layout
        scale = state.loss_scale.scale
        loss, grads = self._loss_and_gradients(state.params, batch, state.step, scale)
        norm = global_norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        taken = finite & ~is_spike(norm, state.recent_norms, config.optimizer.skip_above)
        clipped = clip_by_norm(grads, norm, config.optimizer.clip_norm)
        main = layout.per_step.take(state.params) if state.main is None else state.main
        main, optimizer = update(self.optimizer, clipped, state.optimizer, main, taken)
        new_state = TrainState(
            step=state.step + taken.astype(jnp.int32),
            params=layout.per_step.gather(layout.computed(main), same=True),
            main=None if state.main is None else main,
            optimizer=optimizer,
            loss_scale=state.loss_scale.after(finite, layout.loss_scale),
            recent_norms=jnp.where(taken, remember(norm, state.recent_norms, state.step), state.recent_norms),
        )
        metrics = {"loss": loss, "grad_norm": norm, "learning_rate": learning_rate(state.step, config.optimizer)}
        return new_state, metrics | {"loss_scale": scale, "skipped": ~taken}, grads

    def _loss_and_gradients(
        self, params: Tree, batch: Batch, step: Array, loss_scale: Array | np.float32 = UNSCALED
    ) -> tuple[Array, Tree]:
        """The loss, and the gradients where `layout.owned_specs` have them, in the main dtype and without the scale."""
        targets = _count_targets(batch)
        pipeline = self._pipeline(
            params, batch, self.config.model.dropout, step, jnp.maximum(targets, 1), loss_scale=loss_scale
        )
        loss, grads = pipeline.loss_and_gradients(self.schedule, self.gradient_dtype)
        grads["blocks"] = jax.tree.map(
            lambda grad, weight: grad.reshape(weight.shape), grads["blocks"], params["blocks"]
        )
        grads = complete(self.layout.per_step.scatter(grads, self.gradient_dtype), self.layout.owned_specs)
        dtype = self.layout.main_dtype
        grads = jax.tree.map(lambda grad: grad.astype(dtype) / loss_scale.astype(dtype), grads)
        return complete(loss, PartitionSpec()), grads

    def _scores(self, params: Tree, batch: Batch) -> tuple[Array, Array]:
        pipeline = self._forward_pipeline(params, batch)

        def finish(x_BTD: Array, microbatch: Batch) -> tuple[Array, Array]:
            return self._whole_sequences.scores(pipeline.ends.weights(), x_BTD, microbatch["targets"])

        scores = pipeline.forward(self._forward_schedule, finish)
        scores = complete(scores, (PartitionSpec(None, DATA), PartitionSpec(None, DATA)))
        return jax.tree.map(lambda x: gather_shards(x.reshape(-1, x.shape[-1]), 0, DATA, same=True), scores)

    def _next_logits(self, params: Tree, batch: Batch, position: Array) -> Array:
        pipeline = self._forward_pipeline(params, batch)

        def finish(x_BTD: Array, _: Batch) -> Array:
            last_BTD = lax.dynamic_slice_in_dim(x_BTD, position, 1, axis=1)
            return self._whole_sequences.logits(pipeline.ends.weights(), last_BTD)[:, 0]

        local_spec = PartitionSpec(None, DATA, vocabulary_axes(self.config))
        logits = complete(pipeline.forward(self._forward_schedule, finish), local_spec)
        return logits.reshape(-1, logits.shape[-1])

    def _one_part(self, part: Part, params: Tree, batch: Batch, k: Array, repeats: Array) -> Array:
        step = jnp.zeros((), jnp.int32)
        pipeline = self._pipeline(params, batch, self.config.model.dropout, step, jnp.maximum(_count_targets(batch), 1))
        result = repeat_part(pipeline, part, k, repeats, self.gradient_dtype)
        return complete(result, PartitionSpec())

    @cached_property
    def _whole_sequences(self) -> GPTFunctions:
        """The model for what runs forward only, where activations are not kept: of any length, no sequence is split."""
        return GPTFunctions(self.config.model, Split(vocabulary_axes(self.config)), self.backend)

    def _forward_pipeline(self, params: Tree, batch: Batch) -> Pipeline:
        nothing, one = jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32)
        return self._pipeline(params, batch, 0.0, nothing, one, model=self._whole_sequences)

    def _pipeline(
        self,
        params: Tree,
        batch: Batch,
        dropout: float,
        step: Array,
        num_targets: Array,
        *,
        model: GPTFunctions | None = None,
        loss_scale: Array | np.float32 = UNSCALED,
    ) -> Pipeline:
        """The model's functions for one batch, its rows numbered globally."""
        config, model = self.config, model or self.model
        rows = batch["tokens"].shape[0]
        sample_B = axis_index(DATA) * rows + jnp.arange(rows, dtype=jnp.int32)
        together = config.splits_vocabulary
        # Declared varying once, here, gradients stay local sums until they are reduced once per step.
        axes = (DATA, TENSOR) if model.split.sequence else (DATA,)
        shared = vary(params["shared"], axes if together else (*axes, PIPE))
        blocks = jax.tree.map(lambda weight: weight.reshape(-1, *weight.shape[3:]), vary(params["blocks"], axes))

        def context(microbatch: Batch) -> tuple[Dropout, Array | None]:
            return Dropout.at(dropout, config.seed, step, microbatch["sample"]), microbatch.get("positions")

        def block(weights: Tree, layer: Array, x_BTD: Array, context: tuple[Dropout, Array | None]) -> Array:
            return model.block(weights, layer, x_BTD, *context)

        def loss(shared: Tree, x_BTD: Array, microbatch: Batch) -> Array:
            total = model.loss(shared, x_BTD, microbatch["targets"])
            return total / num_targets.astype(total.dtype)

        unroll = not scan_layers(config, self.backend)
        placement = self.layout.placement
        functions = StageFunctions(
            embed=lambda shared, microbatch: model.embed(shared, microbatch["tokens"], *context(microbatch)),
            layers=Layers(
                rematerialized(block, config.train.remat, keep_dear, prevent_cse=unroll),
                jnp.asarray(placement.layer_index)[:, axis_index(PIPE)],
                unroll,
                placement.padded,
                self.layout.per_use["blocks"],
                recompute_stage=config.train.remat == "stage",
            ),
            context=context,
            loss=loss,
            storage=self.layout.per_use["shared"],
            loss_scale=jnp.asarray(loss_scale),
        )
        weights = {"shared": shared, "blocks": blocks}
        return Pipeline(functions, weights, batch | {"sample": sample_B}, self.num_microbatches, together)


def _count_targets(batch: Batch) -> Array:
    """Number of predicted tokens in the global batch."""
    return sum_over(jnp.sum(batch["targets"] != IGNORED), (DATA,))

"""The compiled programs of a run: the train step, evaluation and next-token logits, each one `jit` of one `shard_map`.

All mesh axes are manual and their types are checked. Letters: B batch, T tokens, V vocabulary.
"""

from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megajax.config import Config
from megajax.mesh import BATCH_SPEC
from megajax.models.gpt import GPTFunctions
from megajax.optim.adam import clip_by_norm, global_norm, make_optimizer, update
from megajax.optim.learning_rate import learning_rate
from megajax.parallel.collectives import DATA, PIPE, TENSOR, axis_index, sum_over, vary
from megajax.parallel.random import Dropout
from megajax.parallel.vocabulary import IGNORED
from megajax.pipeline.executor import Pipeline, StageFunctions
from megajax.pipeline.schedule import make_schedule
from megajax.pipeline.stages import Layers
from megajax.precision import COMPUTE_DTYPE, MAIN_DTYPE
from megajax.training.state import StateLayout, TrainState

Tree = Any
Batch = dict[str, Array]  # "tokens" and "targets", int32 [rows of the global batch, T]


class Program:
    """A configuration on a mesh: where its state lives, and the compiled functions over it."""

    def __init__(self, config: Config, mesh: Mesh):
        self.config, self.mesh = config, mesh
        self.model = GPTFunctions(config.model)
        self.layout = StateLayout(config, mesh, self.model)
        self.optimizer = make_optimizer(config.optimizer)
        self.batch_sharding = NamedSharding(mesh, BATCH_SPEC)

    @cached_property
    def train_step(self):
        """(state, batch) -> (state, metrics): one optimizer step. The state is donated."""
        return self._compile(
            self._train_step, (self.layout.specs, BATCH_SPEC), (self.layout.specs, PartitionSpec()), donate_argnums=0
        )

    @cached_property
    def loss_and_gradients(self):
        """(params, batch, step) -> (loss, gradients): what the train step differentiates, gradients reduced."""
        specs = self.layout.specs.params
        return self._compile(self._loss_and_gradients, (specs, BATCH_SPEC, PartitionSpec()), (PartitionSpec(), specs))

    @cached_property
    def train_step_with_gradients(self):
        """(state, batch) -> (state, metrics, gradients): `train_step` that also shows the gradients before clipping."""
        state_specs = self.layout.specs
        out_specs = (state_specs, PartitionSpec(), state_specs.params)
        return self._compile(self._train_step_with_gradients, (state_specs, BATCH_SPEC), out_specs, donate_argnums=0)

    @cached_property
    def evaluate(self):
        """(params, batch) -> sum of the loss over the batch's targets, and their number; dropout off."""
        return self._compile(self._evaluate, (self.layout.specs.params, BATCH_SPEC), PartitionSpec())

    @cached_property
    def next_logits(self):
        """(params, batch, position) -> logits [B, V] of the token after `position`, padded columns included; dropout
        off."""
        specs = (self.layout.specs.params, BATCH_SPEC, PartitionSpec())
        return self._compile(self._next_logits, specs, PartitionSpec(DATA, TENSOR))

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

    # Inside the region from here on: arrays are this device's shards.

    def _train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        return self._train_step_with_gradients(state, batch)[:2]

    def _train_step_with_gradients(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array], Tree]:
        config = self.config.optimizer
        loss, grads = self._loss_and_gradients(state.params, batch, state.step)
        norm = global_norm(grads)
        clipped = clip_by_norm(grads, norm, config.clip_norm)
        params, optimizer = update(self.optimizer, clipped, state.optimizer, state.params)
        metrics = {"loss": loss, "grad_norm": norm, "learning_rate": learning_rate(state.step, config)}
        return TrainState(state.step + 1, params, optimizer), metrics, grads

    def _loss_and_gradients(self, params: Tree, batch: Batch, step: Array) -> tuple[Array, Tree]:
        targets = _count_targets(batch)
        pipeline = self._pipeline(params, batch, self.config.model.dropout, step, jnp.maximum(targets, 1))
        schedule = make_schedule(self.config.pipeline.schedule, pipeline.num_stages, pipeline.num_microbatches)
        loss, grads = pipeline.loss_and_gradients(schedule, MAIN_DTYPE[self.config.precision])
        blocks = jax.tree.map(lambda grad: grad[None, None], sum_over(grads["blocks"], (DATA,)))
        return sum_over(loss, (DATA, PIPE)), {"shared": sum_over(grads["shared"], (DATA, PIPE)), "blocks": blocks}

    def _evaluate(self, params: Tree, batch: Batch) -> tuple[Array, Array]:
        pipeline = self._pipeline(params, batch, 0.0, jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32))
        losses = pipeline.forward(partial(pipeline.functions.loss, pipeline.weights["shared"]))
        return sum_over(jnp.sum(losses), (DATA, PIPE)), _count_targets(batch)

    def _next_logits(self, params: Tree, batch: Batch, position: Array) -> Array:
        pipeline = self._pipeline(params, batch, 0.0, jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32))

        def finish(x_BTD: Array, _: Batch) -> Array:
            last_BTD = lax.dynamic_slice_in_dim(x_BTD, position, 1, axis=1)
            return self.model.logits(pipeline.weights["shared"], last_BTD)[:, 0]

        logits = sum_over(pipeline.forward(finish), (PIPE,))
        return logits.reshape(-1, logits.shape[-1])

    def _pipeline(self, params: Tree, batch: Batch, dropout: float, step: Array, num_targets: Array) -> Pipeline:
        """The model's functions for one batch, its weights in the compute dtype, its rows numbered globally."""
        config, model = self.config, self.model
        rows = batch["tokens"].shape[0]
        sample_B = axis_index(DATA) * rows + jnp.arange(rows, dtype=jnp.int32)
        dtype = COMPUTE_DTYPE[config.precision]
        # Declared varying once, here, gradients stay local sums until they are reduced once per step.
        weights = jax.tree.map(lambda weight: weight.astype(dtype), vary(params, (DATA, PIPE)))
        weights["blocks"] = jax.tree.map(lambda weight: weight[0, 0], weights["blocks"])

        def context(microbatch: Batch) -> Dropout:
            return Dropout.at(dropout, config.seed, step, microbatch["sample"])

        def block(weights: Tree, layer: Array, x_BTD: Array, context: Dropout) -> Array:
            return model.block(weights, layer, x_BTD, context)

        unroll = not scan_layers(config)
        if config.train.remat == "layer":
            block = jax.checkpoint(block, prevent_cse=unroll)

        def loss(shared: Tree, x_BTD: Array, microbatch: Batch) -> Array:
            total = model.loss(shared, x_BTD, microbatch["targets"])
            return total / num_targets.astype(total.dtype)

        functions = StageFunctions(
            embed=lambda shared, microbatch: model.embed(shared, microbatch["tokens"], context(microbatch)),
            layers=Layers(block, unroll, self.layout.placement.padded),
            context=context,
            loss=loss,
        )
        batch = vary(batch | {"sample": sample_B}, (DATA, PIPE))
        num_microbatches = max(1, rows // config.train.microbatch)
        return Pipeline(functions, weights, batch, num_microbatches, self.layout.placement.layer_index[0])


def scan_layers(config: Config) -> bool:
    """Whether the layers run as one scan (compile time flat in their number) or unrolled.

    `auto`: on CPU scanned (unrolled was 0-6% faster per step in paired runs, docs/benchmarks/cpu.md, and compiles for
    longer than it gains); on GPU unrolled (compiled ahead of time it moves far fewer bytes; not timed yet).
    """
    if config.model.scan_layers == "auto":
        return jax.default_backend() == "cpu"
    return config.model.scan_layers == "true"


def _count_targets(batch: Batch) -> Array:
    """Number of predicted tokens in the global batch."""
    return sum_over(jnp.sum(batch["targets"] != IGNORED), (DATA,))

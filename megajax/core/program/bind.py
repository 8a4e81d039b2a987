"""Bind a model, its weights and a batch to the pipeline loop. Inside the region: arrays are this device's shards."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax import Array
from jax.sharding import PartitionSpec

from megajax.core.axes import BATCH_AXES, ROW_AXES, SEQUENCE_AXES
from megajax.core.models.context import Context
from megajax.core.models.family import StagedModel
from megajax.core.models.freeze import untrained_layers
from megajax.core.models.lora import layer_weights
from megajax.core.models.remat import POLICIES
from megajax.core.parallel import sites
from megajax.core.parallel.collectives import PIPE, TENSOR, axis_index, complete, vary, varying_axes
from megajax.core.parallel.random import Dropout
from megajax.core.parallel.shards import Shards
from megajax.core.pipeline.ends import EmbeddingAndHead
from megajax.core.pipeline.executor import Pipeline
from megajax.core.pipeline.stages import Layers, Products, rematerialized
from megajax.core.program.float8 import LayerCopies
from megajax.core.program.program import BATCH, Batch, Program, scans_layers

Tree = Any
Found = TypeVar("Found")
UNSCALED = np.float32(1.0)
SEQUENCES = "sequences"


def count_targets(program: Program, batch: Batch) -> dict[str, Array]:
    """How many targets every loss and measure has in the global batch; with experts, also how many of its `SEQUENCES`
    are not only padding."""
    counts = program.form.counts(batch)
    if program.config.model.num_experts:
        real_BT = program.model.context(batch, Dropout.off()).real_BT
        assert real_BT is not None
        counts[SEQUENCES] = jnp.any(real_BT, axis=1).sum()
    return complete(counts, dict.fromkeys(counts, PartitionSpec()))


def training_pipeline(
    program: Program,
    params: Tree,
    batch: Batch,
    step: Array,
    loss_scale: Array | np.float32 = UNSCALED,
    copies: Tree = None,
) -> Pipeline:
    """The loop of a train step; losses are divided by the number of their targets in the global batch. Float8 copies of
    frozen weights that are not among `copies` are made here."""
    dropout, counts, scale = program.config.model.dropout, count_targets(program, batch), jnp.asarray(loss_scale)
    return _bind(program, program.model, params, batch, dropout, step, counts, scale, copies, backward=True)


def trace_pipeline(program: Program, look: Callable[[Pipeline], Found]) -> Found:
    """The result of `look` on the loop of a train step, evaluated while tracing; nothing is computed."""
    found: list[Found] = []

    def region(params: Tree, batch: Batch) -> Array:
        step = jnp.zeros((), jnp.int32)
        found.append(look(training_pipeline(program, params, batch, step)))
        return step

    specs = (program.layout.specs.params, BATCH)
    jax.eval_shape(program.region(region, specs, PartitionSpec()), program.layout.shapes.params, program.batch_types)
    return found[-1]


def forward_pipeline(program: Program, model: StagedModel, params: Tree, batch: Batch) -> Pipeline:
    """The loop of a forward-only program, for one of the program's forward models, without dropout."""
    nothing, one = jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32)
    counts = dict.fromkeys(program.form.targets | program.form.measures, one)
    return _bind(program, model, params, batch, 0.0, nothing, counts, jnp.asarray(UNSCALED), None, backward=False)


def _bind(
    program: Program,
    model: StagedModel,
    params: Tree,
    batch: Batch,
    dropout: float,
    step: Array,
    counts: dict[str, Array],
    loss_scale: Array,
    made: Tree,
    *,
    backward: bool,
) -> Pipeline:
    config, layout = program.config, program.layout
    num_rows = next(iter(batch.values())).shape[0]
    row_B = axis_index(ROW_AXES) * num_rows + jnp.arange(num_rows, dtype=jnp.int32)
    # Declared varying once, here: gradients then stay local sums until they are reduced, once per step.
    axes = (*BATCH_AXES, *SEQUENCE_AXES) if model.boundary.sequence_parallel else BATCH_AXES

    def varying(weight: Array, needs_tensor_sum: bool) -> Array:
        return vary(weight, (*BATCH_AXES, TENSOR) if needs_tensor_sum else axes)

    def of_chunks(weight: Array, needs_tensor_sum: bool) -> Array:
        return varying(weight, needs_tensor_sum).reshape(-1, *weight.shape[3:])

    shared = jax.tree.map(varying, params["shared"], layout.needs_tensor_sum["shared"])
    shared = shared if config.splits_vocabulary else vary(shared, (PIPE,))
    blocks = jax.tree.map(of_chunks, layer_weights(params), layer_weights(layout.needs_tensor_sum))
    layer_index = jnp.asarray(layout.placement.layer_index)[:, axis_index(PIPE)]
    copies = LayerCopies(config.model, model, program.operand_dtype, both=backward)
    specs = flatten_dict(layer_weights(layout.specs.params))
    made = jax.tree.map(lambda copy: copy.reshape(-1, *copy.shape[3:]), made)
    blocks = copies.added(blocks, specs, layer_index.reshape(-1), made)
    storage = copies.shardings(layer_weights(layout.per_use.shardings), specs)

    loss_weight = (
        loss_scale / jnp.maximum(counts[SEQUENCES], 1).astype(loss_scale.dtype) if SEQUENCES in counts else None
    )

    def context(batch: Batch, row_B: Array) -> Context:
        found = model.context(batch, Dropout.at(dropout, config.seed, step, row_B))
        return dataclasses.replace(found, row_B=row_B, loss_weight=loss_weight)

    def tokens(context: Context) -> Array | None:
        """Positions of this context rank's tokens; None if it has all."""
        every_T = jnp.arange(batch["tokens"].shape[-1], dtype=jnp.int32)
        return None if model.boundary.context == "none" else model.boundary.context_tokens(every_T, 0)

    @jax.named_scope("embedding")
    def embed(shared: Tree, batch: Batch, context: Context) -> Array:
        return model.ends(shared).embed(batch, context)

    def block(
        weights: Tree, factors: Tree, layer: Array, x_BTD: Array, context: Context
    ) -> tuple[Array, dict[str, Array]]:
        with sites.at(layer, context.row_B, tokens(context)):
            y_BTD, figures = model.block(weights)(x_BTD, dataclasses.replace(context, factors=factors), layer)
        return y_BTD, vary(figures, sorted(varying_axes(x_BTD)))

    @jax.named_scope("head")
    def losses(shared: Tree, x_BTD: Array, batch: Batch, context: Context) -> dict[str, Array]:
        with sites.at(sites.HEAD, context.row_B, tokens(context)):
            x_BTD = sites.named(x_BTD, "last_output", model.boundary.split)
            totals = model.ends(shared).losses(x_BTD, batch, context)
        return {name: total / jnp.maximum(counts[name], 1).astype(total.dtype) for name, total in totals.items()}

    frozen = layout.adapters is not None
    unroll = not scans_layers(config, program.backend)
    deferred = config.mesh.pipe > 1 and config.pipeline.weight_gradients == "deferred"
    layer = rematerialized(block, POLICIES.get(config.train.remat), prevent_cse=unroll)
    num_microbatches = program.num_microbatches
    ends = EmbeddingAndHead(
        embed=embed,
        linear_embedding=model.linear_embedding,
        losses=losses,
        counts=counts,
        trained={name: name in program.form.targets for name in program.form.targets | program.form.measures},
        loss_scale=loss_scale,
        shared=shared,
        storage=layout.per_use["shared"],
        frozen=frozen,
        microbatches=jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), (batch, row_B)),
        context=context,
        vocabulary_split=config.splits_vocabulary,
    )
    layers = Layers(
        function=jax.jit(layer, inline=True),  # traced once, though used in several places of the loop
        weights=blocks,
        layer_index=layer_index,
        unroll=unroll,
        padded=layout.placement.padded,
        storage=Shards(storage),
        recompute_stage=config.train.remat == "stage",
        products=Products(model.products, model.factors, model.weight_gradients) if deferred else None,
        first_trained=untrained_layers(layout.frozen, model.shapes, config.model),
        frozen=copies.paths | (flatten_dict(params["blocks"]).keys() if frozen else set()),
    )
    return Pipeline(ends, layers, num_microbatches)

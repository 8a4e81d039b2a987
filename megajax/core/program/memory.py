"""What a device holds in training besides activations: weights, optimizer state and gradients, in bytes.

Per parameter, with d the size of `data` (Megatron-LM's figures, docs/memory.md): 18 bytes in fp16 or bf16 with fp32
gradients, or 6 + 12/d with ZeRO-1; 20 and 4 + 16/d with gradients in half precision; 16 and 8 + 8/d in fp32.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from megajax.core.parallel.shards import NOT_SHARDED
from megajax.core.program.bind import trace_pipeline
from megajax.core.program.program import Program
from megajax.core.program.state import StateLayout
from megajax.core.trees import Tree


def state_bytes(program: Program) -> dict[str, int]:
    """Bytes on one device by part: those of `kept_bytes`, plus those of `gathered_bytes` and `gradients`, which exist
    during a step: their sums, and, if these are in half precision, the fp32 copy for the optimizer. As in the published
    figures, fp32 shards of fp32 sums are not counted twice. Nothing is computed."""
    layout = program.layout
    others = program.config.bitwise or jnp.dtype(program.gradient_dtype) != jnp.dtype(layout.main_dtype)
    gradients = trace_pipeline(program, lambda pipeline: _bytes((*pipeline.totals()[:2], pipeline.sums(0))))
    trained = sum(weight.size(weight.owned) for weight in jax.tree.leaves(layout.trained(layout.weights)))
    gradients += trained * jnp.dtype(layout.main_dtype).itemsize if others else 0
    return kept_bytes(layout) | gathered_bytes(layout) | {"gradients": gradients}


def residual_bytes(program: Program) -> int:
    """Bytes of residuals that a device saves for one microbatch and chunk until its backward."""
    return trace_pipeline(program, lambda pipeline: _bytes(pipeline.residual_types()))


def factor_bytes(program: Program) -> int:
    """Bytes of factors that a device saves for one chunk until its weight gradients are computed."""
    return trace_pipeline(program, lambda pipeline: _bytes(pipeline.factor_types()))


def _bytes(tree: Tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def kept_bytes(layout: StateLayout) -> dict[str, int]:
    """Bytes on one device of everything that lasts from step to step, by part: `weights`, `main weights`, `moments`,
    with `train.ema` the `average`, and the `float8 copies` of frozen weights if there are any."""
    state, specs = layout.shapes, layout.specs
    others = {"average": (state.average, specs.average), "float8 copies": (state.copies, specs.copies)}
    return {
        "weights": _local_bytes(layout, state.params, specs.params),
        "main weights": _local_bytes(layout, state.main, specs.main),
        "moments": _local_bytes(layout, state.optimizer, specs.optimizer),
    } | {name: _local_bytes(layout, *each) for name, each in others.items() if each[0]}


def computed_bytes(layout: StateLayout) -> int:
    """Bytes on one device of the weights that forward-only programs are given."""
    return _local_bytes(layout, layout.computed_shapes, layout.computed_specs)


def gathered_bytes(layout: StateLayout) -> dict[str, int]:
    """Bytes on one device of the layers' `gathered weights` during a step, if a step leaves them sharded."""
    late = jax.tree.map(lambda weight: weight.late, layout.weights)
    shapes = jax.tree.map(lambda shape, late: shape if late else None, layout.computed_shapes, late)
    specs = jax.tree.map(lambda spec, late: spec if late else None, layout.computed_specs, late)
    return {"gathered weights": _local_bytes(layout, shapes, specs)} if layout.gathers_late else {}


def whole_bytes(layout: StateLayout) -> dict[str, int]:
    """Bytes on one device of the whole gradients, weights and updates during a step, if the optimizer needs these."""
    whole = 3 * _bytes(layout.trained(layout.canonical_shapes.params))
    return {"whole gradients, weights and updates": whole} if layout.mixing else {}


def left_by_zero(layout: StateLayout) -> tuple[list[str], int, int]:
    """What ZeRO cannot save: the weights without a dim that it can shard, by name; bytes on one device of their main
    copies, moments and averages; and bytes of the zeros that pad those of other weights."""
    names, whole, padding = dict[str, None](), 0, 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(dataclasses.replace(layout.shapes, params=None, copies=None)):
        weight = layout.weight_at(path)
        if weight is None or not weight.zero_stage:
            continue
        size = math.prod(weight.stage_shape(weight.owned)) * leaf.dtype.itemsize
        if weight.zero == NOT_SHARDED:
            whole, names["/".join(weight.path)] = whole + size, None
        elif weight.zero.padding:
            padding += size * weight.zero.padding // weight.padded[weight.zero.dim]
    return [*names], whole, padding


def _local_bytes(layout: StateLayout, shapes: Tree, specs: Tree) -> int:
    def size(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec) -> int:
        return math.prod(NamedSharding(layout.mesh, spec).shard_shape(leaf.shape)) * leaf.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(size, shapes, specs)))

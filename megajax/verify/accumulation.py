"""In which dtype a step sums gradients over microbatches, read from its jaxpr: half precision has limits too wide to
tell fp32 from bf16."""

import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr

from megajax.core.program.communication import equations
from megajax.core.program.program import Program

Carried = Counter[tuple[tuple[int, ...], object]]  # how often a loop carries an array of a shape and dtype


def sums_in_other_dtypes(program: Program, traced: ClosedJaxpr) -> list[str]:
    """The weights for whose gradients no loop of the step carries a sum in the program's `gradient_dtype`."""
    layout, wanted = program.layout, {}
    weights, specs = (layout.trained(tree) for tree in (layout.computed_shapes, layout.computed_specs))

    def note(path: tuple, weight: jax.ShapeDtypeStruct, spec: PartitionSpec) -> None:
        here = NamedSharding(program.mesh, spec).shard_shape(weight.shape)  # [chunks, 1, n, …] of stacked layers
        shape = (math.prod(here[:3]), *here[3:]) if layout.is_stacked(path) else here
        wanted[keystr(path, simple=True, separator="/")] = shape, jnp.dtype(program.gradient_dtype)

    jax.tree_util.tree_map_with_path(note, weights, specs)
    loops = [_carried(eqn) for eqn, _ in equations(traced.jaxpr) if eqn.primitive.name == "scan"]
    return min((_missing(wanted, loop) for loop in loops), key=len)


def _carried(scan: Any) -> Carried:
    """What a scan carries: its results that have no dim more than inside."""
    pairs = zip(scan.outvars, scan.params["jaxpr"].jaxpr.outvars, strict=True)
    return Counter((x.aval.shape, x.aval.dtype) for x, y in pairs if x.aval.ndim == y.aval.ndim)


def _missing(wanted: dict[str, tuple], loop: Carried) -> list[str]:
    left, missing = Counter(loop), []
    for name, kind in wanted.items():
        missing += [] if left[kind] > 0 else [name]
        left[kind] -= 1
    return missing

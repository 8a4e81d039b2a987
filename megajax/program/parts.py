"""The parts of a train step one by one: how long each takes, and what it holds."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jax.stages import Wrapped

from megajax.parallel.collectives import complete
from megajax.pipeline.executor import Pipeline
from megajax.pipeline.measuring import Part, repeat_part
from megajax.program.bind import training_pipeline
from megajax.program.program import BATCH, Batch, Program

Tree = Any


def one_part(program: Program, part: Part) -> Wrapped:
    """(params, batch, virtual stage, repeats) -> a number: see `pipeline/measuring.py`."""
    specs = (program.layout.specs.params, BATCH, PartitionSpec(), PartitionSpec())
    return program.compiled(_one_part, specs, PartitionSpec(), part)


def _one_part(program: Program, part: Part, params: Tree, batch: Batch, k: Array, repeats: Array) -> Array:
    pipeline = training_pipeline(program, params, batch, jnp.zeros((), jnp.int32))
    table, dtype = program.schedule, program.gradient_dtype
    number = repeat_part(pipeline, part, k, repeats, dtype, table.num_slots, table.num_factor_slots)
    return complete(number, PartitionSpec())


def residual_bytes(program: Program) -> int:
    """Bytes a device keeps of a microbatch's way through a chunk until it comes back; nothing is computed."""
    return _bytes(program, Pipeline.residual_types)


def factor_bytes(program: Program) -> int:
    """Bytes a device keeps of a chunk until its weight gradients are computed; nothing is computed."""
    return _bytes(program, Pipeline.factor_types)


def sum_bytes(program: Program) -> int:
    """Bytes of a device's sums of gradients, and of its losses; nothing is computed."""
    return _bytes(program, lambda pipeline: pipeline.sums(program.gradient_dtype))


def _bytes(program: Program, part: Callable[[Pipeline], Tree]) -> int:
    found: list[jax.ShapeDtypeStruct] = []

    def look(params: Tree, batch: Batch) -> Array:
        zero = jnp.zeros((), jnp.int32)
        found.extend(jax.tree.leaves(part(training_pipeline(program, params, batch, zero))))
        return zero

    specs = (program.layout.specs.params, BATCH)
    jax.eval_shape(program.region(look, specs, PartitionSpec()), program.layout.shapes.params, program.batch_types)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in found)

"""The sums of gradients that a step's loop carries, and their dtype."""

import jax
import jax.numpy as jnp
from tiny import LLAMA, tiny_config, tiny_program

from megajax.core.program.train_step import train_step_with_gradients
from megajax.verify.accumulation import sums_in_other_dtypes


def test_sums_in_another_dtype_are_named() -> None:
    """Of ZeRO-3's shards, of layers in chunks some of which are padded, with deferred weight gradients."""
    pipeline = {"schedule": "interleaved", "chunks": 2, "weight_gradients": "deferred", "num_layers": 5}
    program = tiny_program(tiny_config((2, 2, 2), precision="bf16", zero=3, **pipeline | LLAMA))
    traced = train_step_with_gradients(program).trace(program.layout.shapes, program.batch_types)
    assert program.gradient_dtype == jnp.float32 and not sums_in_other_dtypes(program, traced.jaxpr)
    program.gradient_dtype = jnp.bfloat16
    assert len(sums_in_other_dtypes(program, traced.jaxpr)) == len(jax.tree.leaves(program.layout.shapes.params))

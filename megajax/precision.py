"""Number formats of computation, stored weights, and statistics."""

import jax.numpy as jnp
from jax.typing import DTypeLike

COMPUTE_DTYPE = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16, "fp64": jnp.float64}
MAIN_DTYPE = {"fp32": jnp.float32, "bf16": jnp.float32, "fp16": jnp.float32, "fp64": jnp.float64}  # weights, moments


def at_least_fp32(dtype: DTypeLike) -> DTypeLike:
    """The dtype for sums, norms and softmax over values of `dtype`."""
    return dtype if jnp.dtype(dtype).itemsize >= 4 else jnp.float32

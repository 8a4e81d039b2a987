"""Number formats of computation, stored weights, and statistics."""

import jax.numpy as jnp
from jax.typing import DTypeLike

COMPUTE_DTYPE = {
    "fp32": jnp.float32,
    "bf16": jnp.bfloat16,
    "fp16": jnp.float16,
    "fp64": jnp.float64,
    "fp8": jnp.bfloat16,  # except for the operands of some products
}
MAIN_DTYPE = {name: jnp.float64 if name == "fp64" else jnp.float32 for name in COMPUTE_DTYPE}  # weights, moments
E4M3 = jnp.float8_e4m3fn
BESIDE = {"fp8": "bf16"}  # the precision of everything else than the operands of some products
OPERAND_DTYPE = {"fp8": E4M3}  # of the layers' products with weights, if it is not the compute dtype


def at_least_fp32(dtype: DTypeLike) -> DTypeLike:
    """The dtype for sums, norms and softmax over values of `dtype`."""
    return dtype if jnp.dtype(dtype).itemsize >= 4 else jnp.float32

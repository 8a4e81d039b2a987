"""Normalization: of the residual stream, which is duplicated on the devices of a tensor group (paper §3) or sharded
along the sequence, and of heads of queries and keys. Letters: B batch, T tokens, D model.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from megajax.models.config import ModelConfig
from megajax.parallel.layers import param
from megajax.precision import at_least_fp32

# What costs little to compute is computed again in the backward pass instead of being kept: only its inputs are saved.
recomputed = partial(jax.checkpoint, prevent_cse=False)


def norm_of(config: ModelConfig) -> nnx.Module:
    """The normalization of a layer's input."""
    if config.norm == "rmsnorm":
        return RMSNorm(config.hidden_size, config.norm_epsilon)
    return LayerNorm(config.hidden_size, config.norm_epsilon, bias=config.bias == "all")


class LayerNorm(nnx.Module):
    """Layer normalisation over D with statistics in at least fp32."""

    def __init__(self, size: int, epsilon: float, *, bias: bool = True):
        self.epsilon = epsilon
        self.scale = param((size,), ("embed",), jnp.ones)
        self.bias = param((size,), ("embed",), jnp.zeros) if bias else None

    @jax.named_scope("norm")
    def __call__(self, x_BTD: Array) -> Array:
        bias_D = None if self.bias is None else self.bias[...]
        return _layer_norm(x_BTD, self.scale[...], bias_D, self.epsilon)


class RMSNorm(nnx.Module):
    """Division by the root of the mean square (Zhang and Sennrich, arXiv 1910.07467), taken over the last dim in at
    least fp32."""

    def __init__(self, size: int, epsilon: float, dim: str = "embed"):
        self.epsilon = epsilon
        self.scale = param((size,), (dim,), jnp.ones)

    @jax.named_scope("norm")
    def __call__(self, x: Array) -> Array:
        return _rms_norm(x, self.scale[...], self.epsilon)


@partial(recomputed, static_argnums=2)
def _rms_norm(x: Array, scale_D: Array, epsilon: float) -> Array:
    dtype = at_least_fp32(x.dtype)
    wide = x.astype(dtype)
    mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normal = (wide * lax.rsqrt(mean + jnp.asarray(epsilon, dtype))).astype(x.dtype)
    return normal * jnp.expand_dims(scale_D, range(x.ndim - 1))


@partial(recomputed, static_argnums=3)
def _layer_norm(x_BTD: Array, scale_D: Array, bias_D: Array | None, epsilon: float) -> Array:
    dtype = at_least_fp32(x_BTD.dtype)
    wide_BTD = x_BTD.astype(dtype)
    centered_BTD = wide_BTD - jnp.mean(wide_BTD, axis=-1, keepdims=True)
    variance_BT1 = jnp.mean(jnp.square(centered_BTD), axis=-1, keepdims=True)
    normal_BTD = (centered_BTD * lax.rsqrt(variance_BT1 + jnp.asarray(epsilon, dtype))).astype(x_BTD.dtype)
    scaled_BTD = normal_BTD * scale_D[None, None, :]
    return scaled_BTD if bias_D is None else scaled_BTD + bias_D[None, None, :]

"""Normalization of the residual stream, which is replicated over a tensor group (paper §3) or sharded along the
sequence, and of queries and keys. Letters: B batch, T tokens, D model, H heads, K head size, N arrays.
"""

from collections.abc import Callable
from functools import cache, partial, wraps

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from megajax.core.models.config import ModelConfig
from megajax.core.models.registry import NORMS
from megajax.core.models.remat import SQUARES
from megajax.core.parallel.collectives import TENSOR, axis_size, f, g
from megajax.core.parallel.layers import param
from megajax.core.parallel.products import ranks_in_parts, spread
from megajax.core.precision import at_least_fp32


def recomputed(function: Callable[..., Array], static_argnums: int | tuple[int, ...] = ()) -> Callable[..., Array]:
    """Saves only the inputs: results that are cheap to compute are computed again in the backward pass."""

    @cache  # `jax.checkpoint` keeps the trace of a function, which in parts would be that of one without
    def with_ranks(ranks: int) -> Callable[..., Array]:
        own = wraps(function)(lambda *given: function(*given))
        return jax.checkpoint(own, prevent_cse=False, static_argnums=static_argnums)

    return wraps(function)(lambda *given: with_ranks(ranks_in_parts())(*given))


def norm_of(config: ModelConfig) -> nnx.Module:
    """The normalization for a layer's input, whose weights say that they are a norm's."""
    norm = NORMS[config.norm](config)
    for _, node in nnx.iter_graph(norm):
        if isinstance(node, nnx.Param):
            node.set_metadata(of_norm=True)
    return norm


class LayerNorm(nnx.Module):
    """Layer normalization over D, with statistics in at least fp32."""

    def __init__(self, size: int, epsilon: float, *, bias: bool = True):
        self.epsilon = epsilon
        self.scale = param((size,), ("embed",), jnp.ones)
        self.bias = param((size,), ("embed",), jnp.zeros) if bias else None

    @jax.named_scope("norm")
    def __call__(self, x_BTD: Array) -> Array:
        bias_D = None if self.bias is None else self.bias[...]
        return _layer_norm(x_BTD, self.scale[...], bias_D, self.epsilon)


class RMSNorm(nnx.Module):
    """Division by the root mean square (Zhang and Sennrich, arXiv 1910.07467) over the last dim, computed in at least
    fp32. With `one_plus` it scales by 1 plus the weight, in at least fp32 too, as Gemma does."""

    def __init__(self, size: int, epsilon: float, dim: str = "embed", *, one_plus: bool = False):
        self.epsilon, self.one_plus = epsilon, one_plus
        self.scale = param((size,), (dim,), jnp.zeros if one_plus else jnp.ones)

    @jax.named_scope("norm")
    def __call__(self, x: Array) -> Array:
        return _rms_norm(x, self.scale[...], None, self.epsilon, self.one_plus)


class HeadsNorm(nnx.Module):
    """RMSNorm over all heads together, [B, T, H, K], with a separate scale for each head."""

    def __init__(self, heads: int, size: int, epsilon: float, dim: str):
        self.epsilon = epsilon
        self.scale = param((heads, size), (dim, "head_size"), jnp.ones)

    @jax.named_scope("norm")
    def __call__(self, x_BTHK: Array, scale_HK: Array, square_BT: Array) -> Array:
        """Normalize this device's heads; `scale` is theirs, `square` is the mean square over all heads."""
        return _rms_norm(x_BTHK, scale_HK, square_BT[..., None, None], self.epsilon, False)


@jax.named_scope("norm")
def mean_squares(*heads_BTHK: Array) -> list[Array]:
    """Mean squares over all heads of arrays whose heads are spread evenly over a tensor group, [B, T] each, in at least
    fp32. One collective forward and one backward. Heads held by several devices count once per device."""
    total_BTN = checkpoint_name(g(_sums_of_squares(heads_BTHK)), SQUARES)
    total_BTN, devices = f(total_BTN), axis_size(TENSOR)
    counts = (x_BTHK.shape[2] * x_BTHK.shape[3] * devices for x_BTHK in heads_BTHK)
    return [total_BTN[..., n] / jnp.asarray(count, total_BTN.dtype) for n, count in enumerate(counts)]


@recomputed
def _sums_of_squares(heads_BTHK: tuple[Array, ...]) -> Array:
    wide = (x_BTHK.astype(at_least_fp32(x_BTHK.dtype)) for x_BTHK in heads_BTHK)
    return jnp.stack([jnp.sum(jnp.square(x_BTHK), axis=(2, 3)) for x_BTHK in wide], axis=-1)


@partial(recomputed, static_argnums=(3, 4))
def _rms_norm(x: Array, scale: Array, mean: Array | None, epsilon: float, one_plus: bool) -> Array:
    """`mean`: mean square; None: that of the last dim."""
    dtype = at_least_fp32(x.dtype)
    wide = x.astype(dtype)
    if mean is None:
        mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normal = wide * lax.rsqrt(mean + jnp.asarray(epsilon, dtype))
    if one_plus:
        scale = scale.astype(dtype)
        return (normal + normal * spread(scale, normal)).astype(x.dtype)
    normal = normal.astype(x.dtype)
    return normal * spread(scale, normal)


@partial(recomputed, static_argnums=3)
def _layer_norm(x_BTD: Array, scale_D: Array, bias_D: Array | None, epsilon: float) -> Array:
    dtype = at_least_fp32(x_BTD.dtype)
    wide_BTD = x_BTD.astype(dtype)
    centered_BTD = wide_BTD - jnp.mean(wide_BTD, axis=-1, keepdims=True)
    variance_BT1 = jnp.mean(jnp.square(centered_BTD), axis=-1, keepdims=True)
    normal_BTD = (centered_BTD * lax.rsqrt(variance_BT1 + jnp.asarray(epsilon, dtype))).astype(x_BTD.dtype)
    scaled_BTD = normal_BTD * spread(scale_D, normal_BTD)
    return scaled_BTD if bias_D is None else scaled_BTD + spread(bias_D, normal_BTD)


NORMS["layernorm"] = lambda config: LayerNorm(config.hidden_size, config.norm_epsilon, bias=config.bias == "all")
NORMS["rmsnorm"] = lambda config: RMSNorm(config.hidden_size, config.norm_epsilon)
NORMS["rmsnorm-1p"] = lambda config: RMSNorm(config.hidden_size, config.norm_epsilon, one_plus=True)

"""The parts of a transformer layer beside attention, and what selective recomputation keeps of one.

LayerNorm, dropout and the residual path are duplicated on the devices of a tensor group (paper §3), or, with sequence
parallelism, sharded along the sequence. Letters: B batch, T tokens, D model, F feed-forward.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from megajax.backend import Backend
from megajax.models.attention import FUSED_FORWARD
from megajax.models.config import ModelConfig
from megajax.parallel.borders import Borders
from megajax.parallel.layers import ColumnParallelLinear, RowParallelLinear, normal, ones_param, zeros_param
from megajax.parallel.random import NamedKey
from megajax.precision import at_least_fp32

# What costs little to compute is computed again in the backward pass instead of being kept: only its inputs are saved.
recomputed = partial(jax.checkpoint, prevent_cse=False)

# Names of what is expensive to compute again (a matrix product, attention, an all-reduce). The MLP's second product is
# not among them, since nothing in the backward pass needs its result.
EXPENSIVE = ("attention_qkv", "attention_heads", "attention_statistics", "attention_output", "mlp_up")


def save_expensive(primitive: Any, *arguments: Any, **parameters: Any) -> bool:
    """The policy of selective recomputation, for `jax.checkpoint`."""
    named = jax.checkpoint_policies.save_only_these_names(*EXPENSIVE)
    return primitive.name.startswith(FUSED_FORWARD) or named(primitive, *arguments, **parameters)


class LayerNorm(nnx.Module):
    """Layer normalisation over D with statistics in at least fp32."""

    def __init__(self, size: int, epsilon: float):
        self.epsilon = epsilon
        self.scale = ones_param((size,), ("embed",))
        self.bias = zeros_param((size,), ("embed",))

    def __call__(self, x_BTD: Array) -> Array:
        return _layer_norm(x_BTD, self.scale[...], self.bias[...], self.epsilon)


@partial(recomputed, static_argnums=3)
def _layer_norm(x_BTD: Array, scale_D: Array, bias_D: Array, epsilon: float) -> Array:
    dtype = at_least_fp32(x_BTD.dtype)
    wide_BTD = x_BTD.astype(dtype)
    centered_BTD = wide_BTD - jnp.mean(wide_BTD, axis=-1, keepdims=True)
    variance_BT1 = jnp.mean(jnp.square(centered_BTD), axis=-1, keepdims=True)
    normal_BTD = (centered_BTD * lax.rsqrt(variance_BT1 + jnp.asarray(epsilon, dtype))).astype(x_BTD.dtype)
    return normal_BTD * scale_D[None, None, :] + bias_D[None, None, :]


class MLP(nnx.Module):
    """`Z = g(GeLU(f(X) A) B)`: A by columns, B by rows, the activation in between without synchronisation."""

    def __init__(
        self,
        config: ModelConfig,
        activation: Callable[[Array], Array],
        key: NamedKey,
        borders: Borders,
        backend: Backend,
    ):
        self.activation = activation
        hidden, width = config.hidden_size, config.mlp_size
        first, second = normal(key / "up", config.init_std), normal(key / "down", config.residual_init_std)
        self.up = ColumnParallelLinear(first, borders, hidden, (width,), ("mlp",), backend)
        self.down = RowParallelLinear(second, borders, (width,), ("mlp",), hidden, backend)

    def __call__(self, x_BTD: Array) -> Array:
        return self.down(self.activation(checkpoint_name(self.up(x_BTD), "mlp_up")))


@jax.checkpoint
def gelu_tanh(x_BTF: Array) -> Array:
    """GeLU in GPT-2's form, by a tanh."""
    wide_BTF = x_BTF.astype(at_least_fp32(x_BTF.dtype))  # its cube overflows fp16
    return jax.nn.gelu(wide_BTF, approximate=True).astype(x_BTF.dtype)


@jax.custom_vjp
def gelu(x_BTF: Array) -> Array:
    """GeLU as it is defined, `x Φ(x)` with the normal distribution Φ; BERT's."""
    wide_BTF = x_BTF.astype(at_least_fp32(x_BTF.dtype))
    return (wide_BTF * _normal_distribution(wide_BTF)).astype(x_BTF.dtype)


def _gelu_forward(x_BTF: Array) -> tuple[Array, Array]:
    return gelu(x_BTF), x_BTF


def _gelu_backward(x_BTF: Array, grad_BTF: Array) -> tuple[Array]:
    """Written out: JAX 0.12's derivative of erf fails where `shard_map` checks types, and its GeLU takes erfc, which
    costs more on CPUs."""
    wide_BTF = x_BTF.astype(at_least_fp32(x_BTF.dtype))
    half, scale = (jnp.asarray(value, wide_BTF.dtype) for value in (-0.5, (2 * math.pi) ** -0.5))
    density_BTF = scale * jnp.exp(half * jnp.square(wide_BTF))
    slope_BTF = _normal_distribution(wide_BTF) + wide_BTF * density_BTF
    return ((grad_BTF.astype(wide_BTF.dtype) * slope_BTF).astype(x_BTF.dtype),)


gelu.defvjp(_gelu_forward, _gelu_backward)


def _normal_distribution(x_BTF: Array) -> Array:
    half, root = (jnp.asarray(value, x_BTF.dtype) for value in (0.5, 0.5**0.5))
    return half + half * lax.erf(x_BTF * root)

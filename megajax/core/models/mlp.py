"""The MLP of a transformer layer, and its activations.

Letters: B batch, T tokens, D model, F feed-forward.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from megajax.core.backend import Backend
from megajax.core.models.config import ModelConfig
from megajax.core.models.context import Context
from megajax.core.models.registry import ACTIVATIONS
from megajax.core.parallel.boundary import RegionBoundary
from megajax.core.parallel.layers import ColumnParallelLinear, RowParallelLinear, column_parallel, normal
from megajax.core.parallel.random import NamedKey
from megajax.core.parallel.sites import named
from megajax.core.precision import at_least_fp32


class MLP(nnx.Module):
    """`Z = g(GeLU(f(X) A) B)`: A by columns, B by rows, with no communication at the activation between them. With a
    gate, `Z = g((SiLU(f(X) G) * f(X) A) B)`, or GeLU in place of SiLU (Shazeer, arXiv 2002.05202), or as GPT-OSS has it
    (`gated_in_limits`), G by columns like A."""

    def __init__(self, config: ModelConfig, key: NamedKey, boundary: RegionBoundary, backend: Backend, width: int = 0):
        hidden, width, bias = config.hidden_size, width or config.mlp_size, config.bias == "all"

        def by_columns(name: str) -> ColumnParallelLinear:
            initial = normal(key / name, config.init_std)
            return ColumnParallelLinear(initial, boundary, (hidden, width), ("embed", "mlp"), backend, bias=bias)

        self.gate = by_columns("gate") if config.gated else None
        self.up = by_columns("up")
        residual = normal(key / "down", config.residual_init_std)
        self.down = RowParallelLinear(residual, boundary, (width, hidden), ("mlp", "embed"), backend, bias=bias)
        self.boundary, self.config, self.backend = boundary, config, backend

    @property
    def products(self) -> dict[str, tuple]:
        """Its products with weights, by the names of their factors (`parallel/products.py`)."""
        return {"mlp_input": (self.up,) if self.gate is None else (self.gate, self.up), "mlp_output": (self.down,)}

    @jax.named_scope("mlp")
    def __call__(self, x_BTD: Array, context: Context, layer: Array | int) -> tuple[Array, dict[str, Any]]:
        names = ("mlp_up",) if self.gate is None else ("mlp_gate", "mlp_up")
        inner = column_parallel(x_BTD, *self.products["mlp_input"], name="mlp_input", factors=context.factors)
        inner = [named(y_BTF, name, split=2) for y_BTF, name in zip(inner, names, strict=True)]
        plain, scaled = self.up.is_plain, self.up.copies is not None
        inner_BTF = activated(inner, self.config, self.backend, in_product=plain, scaled=scaled)
        inner_BTF = named(inner_BTF, "mlp_activation", split=2)
        return named(self.down(inner_BTF, "mlp_output", context.factors), "mlp_output", self.boundary.split), {}


def activated(
    inner: Sequence[Array], config: ModelConfig, backend: Backend, *, in_product: bool = False, scaled: bool = False
) -> Array:
    """A model's activation of one product, or of that with the gate matrix and another. Only these are saved for its
    gradient. `in_product` says that the one is plain (`ColumnParallelLinear.is_plain`), `scaled` that they are in 8
    bits."""
    if backend.forms_of_gpus and config.activation == "gelu-tanh":
        return gelu_of_gpus(*inner, in_product)
    values = {name: getattr(config, option) for name, option in _OPTIONS.get(config.activation, {}).items()}
    function = partial(ACTIVATIONS[config.activation], **values)
    # With a barrier before the activation in the backward pass, XLA would write the products again with their scales.
    return jax.checkpoint(function, prevent_cse=not (scaled and backend.forms_of_gpus))(*inner)


def geglu_tanh(gate_BTF: Array, up_BTF: Array) -> Array:
    """`GeLU(gate) * up`, with GeLU as in `gelu_tanh`."""
    dtype = at_least_fp32(gate_BTF.dtype)
    return (jax.nn.gelu(gate_BTF.astype(dtype), approximate=True) * up_BTF.astype(dtype)).astype(gate_BTF.dtype)


def gated(gate_BTF: Array, up_BTF: Array) -> Array:
    """`SiLU(gate) * up`, where SiLU is `x sigmoid(x)`."""
    dtype = at_least_fp32(gate_BTF.dtype)
    return (jax.nn.silu(gate_BTF.astype(dtype)) * up_BTF.astype(dtype)).astype(gate_BTF.dtype)


def gated_in_limits(gate_BTF: Array, up_BTF: Array, alpha: float, limit: float) -> Array:
    """`gate sigmoid(alpha gate) * (up + 1)`, with `gate` clamped to at most `limit` first, and `up` to between -`limit`
    and `limit`, as in GPT-OSS."""
    dtype = at_least_fp32(gate_BTF.dtype)
    most, factor, one = (jnp.asarray(value, dtype) for value in (limit, alpha, 1))
    gate = jnp.minimum(gate_BTF.astype(dtype), most)
    up = jnp.clip(up_BTF.astype(dtype), -most, most)
    return (gate * jax.nn.sigmoid(factor * gate) * (up + one)).astype(gate_BTF.dtype)


def gelu_tanh(x_BTF: Array) -> Array:
    """GeLU as in GPT-2, approximated with tanh."""
    wide_BTF = x_BTF.astype(at_least_fp32(x_BTF.dtype))  # its cube overflows fp16
    return jax.nn.gelu(wide_BTF, approximate=True).astype(x_BTF.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def gelu_of_gpus(x_BTF: Array, in_product: bool) -> Array:
    """The same function as `x sigmoid(2 u)`, where tanh is that of u; or `in_product` in the form that XLA recognizes
    after a product in bf16 and computes as a part of it, in fp32. Anywhere else, and after a product of a single row,
    that form would be rounded after every operation."""
    if in_product and x_BTF.dtype == jnp.bfloat16 and any(size != 1 for size in x_BTF.shape[:-1]):
        return jax.nn.gelu(x_BTF, approximate=True)
    x = x_BTF.astype(at_least_fp32(x_BTF.dtype))
    return (x * jax.nn.sigmoid(x * (_SLOPE + _CUBIC * jnp.square(x)))).astype(x_BTF.dtype)


def _gelu_of_gpus_backward(in_product: bool, x_BTF: Array, grad_BTF: Array) -> tuple[Array]:
    """The derivative, written out: a quarter fewer instructions on a GPU than JAX's of tanh."""
    x, grad = (each.astype(at_least_fp32(each.dtype)) for each in (x_BTF, grad_BTF))
    square = jnp.square(x)
    share = jax.nn.sigmoid(x * (_SLOPE + _CUBIC * square))
    slope = share + x * (share - share * share) * (_SLOPE + 3 * _CUBIC * square)
    return ((grad * slope).astype(x_BTF.dtype),)


gelu_of_gpus.defvjp(lambda x_BTF, in_product: (gelu_of_gpus(x_BTF, in_product), x_BTF), _gelu_of_gpus_backward)
_SLOPE = 2 * (2 / math.pi) ** 0.5
_CUBIC = 0.044715 * _SLOPE


@jax.custom_vjp
def gelu(x_BTF: Array) -> Array:
    """Exact GeLU, as in BERT: `x Φ(x)` with the normal distribution Φ."""
    wide_BTF = x_BTF.astype(at_least_fp32(x_BTF.dtype))
    return (wide_BTF * _normal_distribution(wide_BTF)).astype(x_BTF.dtype)


def _gelu_backward(x_BTF: Array, grad_BTF: Array) -> tuple[Array]:
    """The derivative, written out: JAX 0.12's derivative of erf fails where `shard_map` checks types, and JAX's GeLU
    uses erfc, which costs more on CPUs."""
    wide_BTF = x_BTF.astype(at_least_fp32(x_BTF.dtype))
    half, scale = (jnp.asarray(value, wide_BTF.dtype) for value in (-0.5, (2 * math.pi) ** -0.5))
    density_BTF = scale * jnp.exp(half * jnp.square(wide_BTF))
    slope_BTF = _normal_distribution(wide_BTF) + wide_BTF * density_BTF
    return ((grad_BTF.astype(wide_BTF.dtype) * slope_BTF).astype(x_BTF.dtype),)


gelu.defvjp(lambda x_BTF: (gelu(x_BTF), x_BTF), _gelu_backward)


def _normal_distribution(x_BTF: Array) -> Array:
    half, root = (jnp.asarray(value, x_BTF.dtype) for value in (0.5, 0.5**0.5))
    return half + half * lax.erf(x_BTF * root)


ACTIVATIONS.update({"gelu": gelu, "gelu-tanh": gelu_tanh, "swiglu": gated, "geglu-tanh": geglu_tanh})
ACTIVATIONS["swiglu-clamped"] = gated_in_limits
_OPTIONS = {"swiglu-clamped": {"alpha": "swiglu_alpha", "limit": "swiglu_limit"}}  # whose values it takes

"""Matrix products split over the `tensor` axis (paper §3): first by columns, then by rows, one `f` and one `g` around
them (or, with a split sequence, the pair that takes their place: `parallel/split.py`).

    Y = GeLU(f(X) A)    A = [A1, A2]   by columns: GeLU needs no synchronisation
    Z = g(Y B)          B = [B1; B2]   by rows

Modules compute on whatever shard of the weights they are given: sizes come from the arrays, not from the configuration.
Letters: B batch, T tokens, D model.
"""

import flax
import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from megajax.backend import CPU, Backend
from megajax.parallel.products import product
from megajax.parallel.random import NamedKey
from megajax.parallel.split import Split

# Modules are built and merged with local shards inside `shard_map`, where no mesh context for Flax exists.
flax.config.update("flax_always_shard_variable", False)


def normal_param(key: NamedKey, shape: tuple[int, ...], std: float, axes: tuple[str, ...]) -> nnx.Param:
    """A weight drawn from N(0, std²) in fp32, in any precision the same, its dims named by `axes`."""
    return nnx.Param(nnx.with_partitioning(nnx.initializers.normal(std, jnp.float32), axes)(key.key, shape))


def constant_param(value: float, shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
    """A weight that starts as a constant, its dims named by `axes`."""
    return nnx.Param(nnx.with_partitioning(nnx.initializers.constant(value), axes)(jax.random.key(0), shape))


class ColumnParallelLinear(nnx.Module):
    """`f(x) A + b`, A split by columns. The output dims may be several, e.g. (qkv, heads, head size)."""

    def __init__(
        self,
        key: NamedKey,
        split: Split,
        in_size: int,
        out_shape: tuple[int, ...],
        out_axes: tuple[str, ...],
        std: float,
        backend: Backend = CPU,
    ):
        self.split, self.backend = split, backend
        self.weight = normal_param(key, (in_size, *out_shape), std, ("embed", *out_axes))
        self.bias = constant_param(0.0, out_shape, out_axes)

    def __call__(self, x_BTD: Array) -> Array:
        def multiply(x_BTD: Array, weight: Array) -> Array:
            return product(self.split.enter(x_BTD), weight, 1, self.backend)

        if self.split.sequence and self.split.regather:
            multiply = jax.checkpoint(multiply)
        return multiply(x_BTD, self.weight[...]) + self.bias[...][None, None]


class RowParallelLinear(nnx.Module):
    """`g(y B) + b`, B split by rows; the bias is duplicated and added once, after the sum."""

    def __init__(
        self,
        key: NamedKey,
        split: Split,
        in_shape: tuple[int, ...],
        in_axes: tuple[str, ...],
        out_size: int,
        std: float,
        backend: Backend = CPU,
    ):
        self.split, self.backend = split, backend
        self.weight = normal_param(key, (*in_shape, out_size), std, (*in_axes, "embed"))
        self.bias = constant_param(0.0, (out_size,), ("embed",))

    def __call__(self, y: Array) -> Array:
        """`y` has shape [B, T, *in_shape]; returns [B, T, D], of a split sequence this device's tokens."""
        weight = self.weight[...]
        return self.split.leave(product(y, weight, weight.ndim - 1, self.backend)) + self.bias[...][None, None, :]

"""Matrix products sharded over the `tensor` axis (paper §3): first by columns, then by rows, one `f` and one `g` around
them (or, with sequence parallelism, the pair that takes their place: `parallel/boundary.py`).

    Y = GeLU(f(X) A)    A = [A1, A2]   by columns: GeLU needs no synchronisation
    Z = g(Y B)          B = [B1; B2]   by rows

Modules compute on whatever shard of the weights they are given: sizes come from the arrays, not from the configuration.
Letters: B batch, T tokens, D model.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from megajax.core.backend import Backend
from megajax.core.parallel.boundary import RegionBoundary
from megajax.core.parallel.collectives import TENSOR, axis_index, axis_size, vary_as
from megajax.core.parallel.float8 import Copies, Float8Rule, Scaled, multiplied
from megajax.core.parallel.products import (
    DenseRule,
    Factors,
    Pair,
    Rule,
    deferred,
    product,
    products,
    ranks_in_parts,
    spread,
)
from megajax.core.parallel.random import NamedKey

Initializer = Callable[[tuple[int, ...]], Array]  # shape -> initial values in fp32, in any precision the same


def normal(key: NamedKey, std: float) -> Initializer:
    """Draws from N(0, std²)."""
    return lambda shape: nnx.initializers.normal(std, jnp.float32)(key.key, shape)


def param(shape: tuple[int, ...], dims: tuple[str | None, ...], initial: Initializer) -> nnx.Param:
    """A weight whose dims are called `dims`; None: one that nothing but ZeRO shards."""
    # There is no mesh yet, and inside `shard_map` the arrays are local shards.
    return nnx.Param(initial(shape), out_sharding=dims, eager_sharding=False)


class Linear(nnx.Module):
    """`x A + b` on every device of a tensor group alike: no dim of A is sharded over `tensor`."""

    def __init__(self, initial: Initializer, in_size: int, out_size: int, backend: Backend):
        self.backend = backend
        self.weight = param((in_size, out_size), ("embed", "features"), initial)
        self.bias = param((out_size,), ("features",), jnp.zeros)

    def __call__(self, x_BTD: Array) -> Array:
        y_BTD = product(x_BTD, self.weight[...], 1, self.backend)
        return y_BTD + spread(self.bias[...], y_BTD)


class ProductLayer(nnx.Module):
    """A product with a weight. The weight may be frozen and have an adapter (LoRA, `models/lora.py`), and copies in 8
    bits to multiply with."""

    weight: nnx.Param
    stacked = 0  # dims of the weight before those of the product
    contracted_axes: tuple[str, ...] = ()  # mesh axes that shard the contracted dims
    output_axes: tuple[str, ...] = ()  # and those that shard the outputs
    multiply_scaled: Callable[..., Array] = staticmethod(multiplied)
    frozen: bool = False
    scale: float = 1.0  # of an adapter
    copies: Copies | None = None

    @property
    def contracted(self) -> int:
        """How many dims of the weight go into the product, the first ones after those that are `stacked`."""
        raise NotImplementedError

    def rule(self, contracted: int, *, together: bool = False) -> Rule:
        """Of a product in the compute dtype."""
        raise NotImplementedError

    @property
    def first_part(self) -> Array | None:
        """If there are fewer parts than devices, so that each device holds all of them, the part that this device
        computes with; None if it computes with all that it has."""
        return None

    @property
    def shared_parts(self) -> int:
        """The number of parts if there are fewer than devices; 0 if every device has its own."""
        return 0

    def freeze(self, scale: float, *adapter: Array) -> None:
        """Freeze the weight W; with an adapter (A and B), compute with `W + scale · A B`."""
        self.frozen, self.scale = True, scale
        if adapter:
            self.a, self.b = map(nnx.Param, adapter)

    def use_float8(self, copies: Copies) -> None:
        """Use float8 products with these copies of the weight."""
        self.copies = nnx.data(copies)

    def own(self, x: Array, dim: int) -> Array:
        """The part of a weight or bias, with parts along `dim`, that this device computes with."""
        part = self.first_part
        return x if part is None else lax.dynamic_slice_in_dim(x, part, 1, dim)

    @property
    def own_copies(self) -> Copies:
        """The copies of that part."""
        assert self.copies is not None
        forward, backward, wide = self.copies
        backward = backward and backward._replace(values=self.own(backward.values, 1))
        return Copies(Scaled(*(self.own(each, 0) for each in forward)), backward, wide)

    def completed(self, y: Array, x: Array, *beside: Any) -> Array:
        """The product `y` of `x` with what an adapter, if there is one, adds to it."""
        if not hasattr(self, "a"):
            return y
        (inner,) = products(self.rule(self.contracted), x, [self.a[...]], *beside)
        inner *= jnp.asarray(self.scale, x.dtype)
        return y + products(self.rule(1), inner, [self.own(self.b[...], 1)], *beside)[0]

    @staticmethod
    def weight_gradients(factors: Pair, linears: Sequence[Any]) -> list[Array]:
        """The weights' gradients from the factors of `multiply`."""
        (x, *beside), grads = factors
        return linears[0].rule(linears[0].contracted).weight_gradients(x, grads, *beside)


def multiply(linears: Sequence[ProductLayer], x: Array, *beside: Any, defers: bool) -> list[Array]:
    """The products of `x` with the weights of several layers, or with the part of each that this device computes with.
    They have no gradients if they are frozen, or if it `defers` these."""
    first, weights = linears[0], [linear.own(linear.weight[...], 1) for linear in linears]
    rule, trained = first.rule(first.contracted, together=defers), not (defers or first.frozen)
    if first.copies is None:
        outputs = products(rule, x, weights, *beside, trained=trained)
    else:
        parts, copies = tuple(linear.shared_parts for linear in linears), [linear.own_copies for linear in linears]
        rule = Float8Rule(rule, first.contracted_axes, first.output_axes, parts, first.multiply_scaled)
        outputs = products(rule, x, weights, copies, *beside, trained=trained)
    return [linear.completed(y, x, *beside) for linear, y in zip(linears, outputs, strict=True)]


class _DenseLayer(ProductLayer):
    """A product with a weight of this `shape` on all devices of a tensor group, and maybe a bias."""

    def __init__(
        self,
        initial: Initializer,
        boundary: RegionBoundary,
        shape: tuple[int, ...],
        dims: tuple[str, ...],
        backend: Backend,
        *,
        bias: bool = True,
    ):
        self.boundary, self.shape, self.backend = boundary, shape, backend
        self.weight = param(shape, dims, initial)
        self.bias = param(shape[self.contracted :], dims[self.contracted :], jnp.zeros) if bias else None

    @property
    def contracted(self) -> int:
        return len(self.shape) - 1

    def rule(self, contracted: int, *, together: bool = False) -> Rule:
        return DenseRule(contracted, self.backend)


class ReplicatedLinear(_DenseLayer):
    """`x A` between regions, with all of A on every device of a tensor group."""


class ColumnParallelLinear(_DenseLayer):
    """`f(x) A + b`, A sharded by columns. The output dims may be several, as (heads, head size), of which the first one
    has the parts that are dealt out."""

    contracted = 1
    output_axes = (TENSOR,)

    @property
    def first_part(self) -> Array | None:
        parts, devices = self.shape[1], axis_size(TENSOR)
        return axis_index(TENSOR) * parts // devices if self.weight.shape[1] > max(1, parts // devices) else None

    @property
    def shared_parts(self) -> int:
        parts = self.shape[1]
        return parts if parts < axis_size(TENSOR) else 0

    @property
    def is_plain(self) -> bool:
        """Whether its output is one product with a bias and nothing else, to which XLA for GPUs can join what
        follows."""
        return self.bias is not None and self.copies is None and not hasattr(self, "a") and not ranks_in_parts()

    def of_all_parts(self, gradient: Array) -> Array:
        """The gradient of the weight that this device has, from that of its `own`."""
        part = self.first_part
        if part is None:
            return gradient
        nothing = jnp.zeros_like(gradient, shape=self.weight.shape)
        return lax.dynamic_update_slice_in_dim(vary_as(nothing, gradient), gradient, part, 1)

    @staticmethod
    def weight_gradients(factors: Pair, linears: Sequence[Any]) -> list[Array]:
        (input_BTD,), grads = factors
        gradients = ProductLayer.weight_gradients(((_entered(input_BTD, linears[0].boundary),), grads), linears)
        return [linear.of_all_parts(gradient) for linear, gradient in zip(linears, gradients, strict=True)]


def _entered(input_BTD: Array, boundary: RegionBoundary) -> Array:
    """The input of products that gather it again in the backward pass; others get it gathered."""
    return boundary.enter(input_BTD) if boundary.regathers else input_BTD


def _enter_and_multiply(linears: Sequence[_DenseLayer], defers: bool, input_BTD: Array) -> list[Array]:
    return multiply(linears, _entered(input_BTD, linears[0].boundary), defers=defers)


def column_parallel(
    x_BTD: Array, *linears: ColumnParallelLinear | ReplicatedLinear, name: str = "", factors: Factors = None
) -> list[Array]:
    """The outputs of several layers of one input, which enters their region once. With `factors`, the backward pass
    stores the factors of their weight gradients there under `name`."""
    boundary, run = linears[0].boundary, partial(_enter_and_multiply, linears, factors is not None)
    # Neither what was gathered nor a part of a weight is kept.
    again = boundary.regathers or any(linear.first_part is not None for linear in linears)
    input_BTD = x_BTD if boundary.regathers else boundary.enter(x_BTD)
    outputs = (jax.checkpoint(run) if again else run)(input_BTD)
    outputs = deferred(name, (input_BTD,), outputs, factors)
    return [_biased(linear, y) for linear, y in zip(linears, outputs, strict=True)]


def _biased(linear: "ColumnParallelLinear | ReplicatedLinear", y: Array) -> Array:
    """In the form of a matrix, so that XLA for GPUs adds the bias in the product."""
    if linear.bias is None:
        return y
    bias = linear.own(linear.bias[...], 0)
    flat = y.reshape(*y.shape[: y.ndim - bias.ndim], -1)
    return (flat + spread(bias, flat, by_bits=linear.backend.forms_of_gpus)).reshape(y.shape)


class RowParallelLinear(_DenseLayer):
    """`g(y B) + b`, B sharded by rows; the bias is duplicated and added once, after the sum."""

    contracted_axes = (TENSOR,)

    def __call__(self, y: Array, name: str = "", factors: Factors = None) -> Array:
        """From [B, T, *rows] to [B, T, D], with sequence parallelism only for this device's tokens. With `factors`, the
        backward pass stores the factors of the weight gradient there under `name`."""
        (product_BTD,) = deferred(name, (y,), multiply([self], y, defers=factors is not None), factors)
        # As a matrix: XLA for GPUs then adds the bias and the residual in the product.
        y = self.boundary.leave(product_BTD if self.boundary.split else product_BTD.reshape(-1, product_BTD.shape[-1]))
        y = y if self.bias is None else y + spread(self.bias[...], y, by_bits=self.backend.forms_of_gpus)
        return y if self.boundary.split else y.reshape(product_BTD.shape)

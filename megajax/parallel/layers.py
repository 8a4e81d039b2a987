"""Matrix products sharded over the `tensor` axis (paper §3): first by columns, then by rows, one `f` and one `g` around
them (or, with sequence parallelism, the pair that takes their place: `parallel/boundary.py`).

    Y = GeLU(f(X) A)    A = [A1, A2]   by columns: GeLU needs no synchronisation
    Z = g(Y B)          B = [B1; B2]   by rows

Modules compute on whatever shard of the weights they are given: sizes come from the arrays, not from the configuration.
Letters: B batch, T tokens, D model.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from megajax.backend import Backend
from megajax.parallel.boundary import RegionBoundary
from megajax.parallel.collectives import TENSOR, axis_index, axis_size, vary, varying_axes
from megajax.parallel.products import NO_FACTORS, Factors, Pair, deferred, product, weight_gradient
from megajax.parallel.random import NamedKey

Initializer = Callable[[tuple[int, ...]], Array]  # shape -> initial values in fp32, in any precision the same


def normal(key: NamedKey, std: float) -> Initializer:
    """Draws from N(0, std²)."""
    return lambda shape: nnx.initializers.normal(std, jnp.float32)(key.key, shape)


def param(shape: tuple[int, ...], dims: tuple[str, ...], initial: Initializer) -> nnx.Param:
    """A weight whose dims are called `dims`."""
    # There is no mesh yet, and inside `shard_map` the arrays are local shards.
    return nnx.Param(initial(shape), out_sharding=dims, eager_sharding=False)


class Linear(nnx.Module):
    """`x A + b` on every device of a tensor group alike: no dim of A is sharded over `tensor`."""

    def __init__(self, initial: Initializer, in_size: int, out_size: int, backend: Backend):
        self.backend = backend
        self.weight = param((in_size, out_size), ("embed", "features"), initial)
        self.bias = param((out_size,), ("features",), jnp.zeros)

    def __call__(self, x_BTD: Array) -> Array:
        return product(x_BTD, self.weight[...], 1, self.backend) + self.bias[...][None, None]


class _Product(nnx.Module):
    """A product with a weight of this `shape` on all devices of a tensor group, and maybe a bias. The weight may be
    frozen and have an adapter (LoRA, `models/lora.py`)."""

    frozen: bool = False

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
        """How many dims of the weight go into the product, the first ones."""
        return len(self.shape) - 1

    def freeze(self, scale: float, *adapter: Array) -> None:
        """From now on the weight W has no gradient; with an adapter, A and B, it counts as `W + scale · A B`."""
        self.frozen, self.scale = True, scale
        if adapter:
            self.a, self.b = map(nnx.Param, adapter)

    @property
    def adapter(self) -> tuple[Array, ...]:
        """A and B, if there are."""
        return (self.a[...], self.b[...]) if hasattr(self, "a") else ()

    def multiply(self, x: Array, weight: Array, adapter: tuple[Array, ...]) -> Array:
        """The last dims of `x` with the first ones of the weight, or of what it counts as."""
        if not self.frozen:
            return product(x, weight, self.contracted, self.backend)
        y = jnp.tensordot(x, weight, self.contracted)
        if not adapter:
            return y
        a, b = adapter
        inner = product(x, a, self.contracted, self.backend) * jnp.asarray(self.scale, x.dtype)
        return y + product(inner, b, 1, self.backend)


class ColumnParallelLinear(_Product):
    """`f(x) A + b`, A sharded by columns. The output dims may be several, as (heads, head size), of which the first one
    has the parts that are dealt out."""

    @property
    def contracted(self) -> int:
        return 1

    @property
    def first_part(self) -> Array | None:
        """Of fewer parts than devices, which each device has all of, the one that this device computes with; None where
        it computes with all that it has."""
        parts, devices = self.shape[1], axis_size(TENSOR)
        return axis_index(TENSOR) * parts // devices if self.weight.shape[1] > max(1, parts // devices) else None

    def own(self, x: Array, dim: int) -> Array:
        """Of weight or bias, with the parts along `dim`, what this device computes with."""
        part = self.first_part
        return x if part is None else lax.dynamic_slice_in_dim(x, part, 1, dim)

    def of_all_parts(self, gradient: Array) -> Array:
        """The gradient of the weight that this device has, from that of its `own`."""
        part = self.first_part
        if part is None:
            return gradient
        nothing = jnp.zeros_like(gradient, shape=self.weight.shape)
        return lax.dynamic_update_slice_in_dim(vary(nothing, sorted(varying_axes(gradient))), gradient, part, 1)

    @staticmethod
    def weight_gradients(factors: Pair, linears: "Sequence[ColumnParallelLinear]") -> list[Array]:
        """The weights' gradients from the factors of `column_parallel`."""
        (x_BTD, grads), boundary, backend = factors, linears[0].boundary, linears[0].backend
        entered_BTD = boundary.enter(x_BTD) if boundary.regathers else x_BTD
        pairs = zip(linears, grads, strict=True)
        return [linear.of_all_parts(weight_gradient(entered_BTD, grad, 1, backend)) for linear, grad in pairs]


def column_parallel(
    x_BTD: Array, *linears: ColumnParallelLinear, name: str = "", factors: Factors = NO_FACTORS
) -> list[Array]:
    """The outputs of several layers of one input, which enters their region once. With `factors` the backward pass
    leaves those of their weight gradients there, under their `name`."""
    boundary = linears[0].boundary
    weights = [linear.weight[...] for linear in linears]
    input_BTD = x_BTD if boundary.regathers else boundary.enter(x_BTD)

    def entered(input_BTD: Array) -> Array:
        return boundary.enter(input_BTD) if boundary.regathers else input_BTD

    def linear_in_both(input_BTD: Array, weights: list[Array]) -> list[Array]:
        x_BTD = entered(input_BTD)
        return [jnp.tensordot(x_BTD, linear.own(weight, 1), 1) for linear, weight in zip(linears, weights, strict=True)]

    def multiply(input_BTD: Array, weights: list[Array], adapters: list[tuple[Array, ...]]) -> list[Array]:
        x_BTD, outputs = entered(input_BTD), []
        for linear, weight, adapter in zip(linears, weights, adapters, strict=True):
            own = adapter and (adapter[0], linear.own(adapter[1], 1))
            outputs.append(linear.multiply(x_BTD, linear.own(weight, 1), own))
        return outputs

    if factors:
        outputs = deferred(name, linear_in_both, input_BTD, weights, factors)
    else:
        # Neither what was gathered nor a part of a weight is kept.
        again = boundary.regathers or any(linear.first_part is not None for linear in linears)
        together = jax.checkpoint(multiply) if again else multiply
        outputs = together(input_BTD, weights, [linear.adapter for linear in linears])
    biases = (None if linear.bias is None else linear.own(linear.bias[...], 0) for linear in linears)
    return [y if bias is None else y + bias[None, None] for y, bias in zip(outputs, biases, strict=True)]


class RowParallelLinear(_Product):
    """`g(y B) + b`, B sharded by rows; the bias is duplicated and added once, after the sum."""

    def __call__(self, y: Array, name: str = "", factors: Factors = NO_FACTORS) -> Array:
        """From [B, T, *rows] to [B, T, D], with sequence parallelism of this device's tokens. With `factors` the
        backward pass leaves those of the weight gradient there, under its `name`."""
        weight = self.weight[...]
        if factors:
            multiply = lambda y, weights: [jnp.tensordot(y, weights[0], self.contracted)]  # noqa: E731
            (product_BTD,) = deferred(name, multiply, y, [weight], factors)
        else:
            product_BTD = self.multiply(y, weight, self.adapter)
        y_BTD = self.boundary.leave(product_BTD)
        return y_BTD if self.bias is None else y_BTD + self.bias[...][None, None, :]

    @staticmethod
    def weight_gradients(factors: Pair, linears: "Sequence[RowParallelLinear]") -> list[Array]:
        """The weight's gradient from the factors of the product."""
        (y, (grad_BTD,)), (linear,) = factors, linears
        return [weight_gradient(y, grad_BTD, linear.contracted, linear.backend)]

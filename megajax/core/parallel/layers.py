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

from megajax.core.backend import Backend
from megajax.core.parallel.boundary import RegionBoundary
from megajax.core.parallel.collectives import TENSOR, axis_index, axis_size, vary, varying_axes
from megajax.core.parallel.float8 import Copies, DenseProducts, Float8Weight, Scaled, products
from megajax.core.parallel.products import Factors, Pair, deferred, product, weight_gradient
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
        return product(x_BTD, self.weight[...], 1, self.backend) + self.bias[...][None, None]


class _Product(nnx.Module):
    """A product with a weight of this `shape` on all devices of a tensor group, and maybe a bias. The weight may be
    frozen and have an adapter (LoRA, `models/lora.py`), and copies in 8 bits to multiply with."""

    frozen: bool = False
    stacked = 0  # dims of the weight before those of the product
    copies: Copies | None = None
    contracted_axes: tuple[str, ...] = ()  # mesh axes that shard the contracted dim
    output_axes: tuple[str, ...] = ()  # and those that shard the outputs

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
        """Freeze the weight W; with an adapter (A and B), compute with `W + scale · A B`."""
        self.frozen, self.scale = True, scale
        if adapter:
            self.a, self.b = map(nnx.Param, adapter)

    @property
    def adapter(self) -> tuple[Array, ...]:
        """A and B, if there are."""
        return (self.a[...], self.b[...]) if hasattr(self, "a") else ()

    def use_float8(self, copies: Copies) -> None:
        """Use float8 products with these copies of the weight."""
        self.copies = nnx.data(copies)

    @property
    def operand(self) -> Float8Weight:
        """The weight with its copies."""
        return Float8Weight(self.weight[...], self.copies)

    @property
    def shared_parts(self) -> int:
        """The number of parts if there are fewer than devices; 0 if every device has its own."""
        return 0

    def added(self, y: Array, x: Array, adapter: tuple[Array, ...]) -> Array:
        """The product `y` with what an adapter, if there is one, adds to it."""
        if not adapter:
            return y
        a, b = adapter
        inner = product(x, a, self.contracted, self.backend) * jnp.asarray(self.scale, x.dtype)
        return y + product(inner, b, 1, self.backend)


def _multiply(x: Array, linears: Sequence[_Product], weights: Sequence[Float8Weight]) -> list[Array]:
    """The last dims of `x` with the first ones of the weights, or of each one's part."""
    if linears[0].copies is not None:
        return products(_in_float8(linears), x, weights)
    return [
        jnp.tensordot(x, weight.array, linear.contracted)
        if linear.frozen
        else product(x, weight.array, linear.contracted, linear.backend)
        for linear, weight in zip(linears, weights, strict=True)
    ]


def _in_float8(linears: Sequence[_Product]) -> DenseProducts:
    first, parts = linears[0], tuple(linear.shared_parts for linear in linears)
    return DenseProducts(
        first.contracted, first.contracted_axes, first.output_axes, parts, not first.frozen, first.backend
    )


class ColumnParallelLinear(_Product):
    """`f(x) A + b`, A sharded by columns. The output dims may be several, as (heads, head size), of which the first one
    has the parts that are dealt out."""

    output_axes: tuple[str, ...] = (TENSOR,)

    @property
    def contracted(self) -> int:
        return 1

    @property
    def first_part(self) -> Array | None:
        """If there are fewer parts than devices, so that each device holds all of them, the part that this device
        computes with; None if it computes with all that it has."""
        parts, devices = self.shape[1], axis_size(TENSOR)
        return axis_index(TENSOR) * parts // devices if self.weight.shape[1] > max(1, parts // devices) else None

    @property
    def shared_parts(self) -> int:
        parts = self.shape[1]
        return parts if parts < axis_size(TENSOR) else 0

    def own_weight(self, weight: Float8Weight) -> Float8Weight:
        """The part of a weight and its copies that this device computes with."""
        copies = weight.copies
        if copies is not None and self.first_part is not None:
            forward, backward = Scaled(*(self.own(each, 0) for each in copies.forward)), copies.backward
            backward = None if backward is None else backward._replace(values=self.own(backward.values, 1))
            copies = copies._replace(forward=forward, backward=backward)
        return Float8Weight(self.own(weight.array, 1), copies)

    def own(self, x: Array, dim: int) -> Array:
        """The part of a weight or bias, with parts along `dim`, that this device computes with."""
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


class ReplicatedLinear(ColumnParallelLinear):
    """`x A` between regions, with all of A on every device of a tensor group."""

    output_axes = ()

    @property
    def first_part(self) -> Array | None:
        return None

    @property
    def shared_parts(self) -> int:
        return 0


def column_parallel(
    x_BTD: Array, *linears: ColumnParallelLinear, name: str = "", factors: Factors = None
) -> list[Array]:
    """The outputs of several layers of one input, which enters their region once. With `factors`, the backward pass
    stores the factors of their weight gradients there under `name`."""
    boundary = linears[0].boundary
    weights = [linear.operand for linear in linears]
    input_BTD = x_BTD if boundary.regathers else boundary.enter(x_BTD)

    def entered(input_BTD: Array) -> Array:
        return boundary.enter(input_BTD) if boundary.regathers else input_BTD

    def own(weights: list[Float8Weight]) -> list[Float8Weight]:
        return [linear.own_weight(weight) for linear, weight in zip(linears, weights, strict=True)]

    def linear_in_both(input_BTD: Array, weights: list[Float8Weight]) -> list[Array]:
        x_BTD = entered(input_BTD)
        if linears[0].copies is not None:
            return _in_float8(linears).forward(x_BTD, own(weights))
        return [jnp.tensordot(x_BTD, weight.array, 1) for weight in own(weights)]

    def input_gradient(input_BTD: Array, grads: list[Array], weights: list[Float8Weight]) -> Array:
        dx_BTD = _in_float8(linears).input_gradient(grads, own(weights))
        return jax.linear_transpose(entered, input_BTD)(dx_BTD)[0]

    def multiply(input_BTD: Array, weights: list[Float8Weight], adapters: list[tuple[Array, ...]]) -> list[Array]:
        x_BTD = entered(input_BTD)
        outputs = _multiply(x_BTD, linears, own(weights))
        for place, (linear, adapter) in enumerate(zip(linears, adapters, strict=True)):
            outputs[place] = linear.added(outputs[place], x_BTD, adapter and (adapter[0], linear.own(adapter[1], 1)))
        return outputs

    if factors is not None:
        given = None if linears[0].copies is None else input_gradient
        outputs = deferred(name, linear_in_both, input_BTD, weights, factors, input_gradient=given)
    else:
        # Neither what was gathered nor a part of a weight is kept.
        again = boundary.regathers or any(linear.first_part is not None for linear in linears)
        together = jax.checkpoint(multiply) if again else multiply
        outputs = together(input_BTD, weights, [linear.adapter for linear in linears])
    biases = (None if linear.bias is None else linear.own(linear.bias[...], 0) for linear in linears)
    return [y if bias is None else y + bias[None, None] for y, bias in zip(outputs, biases, strict=True)]


class RowParallelLinear(_Product):
    """`g(y B) + b`, B sharded by rows; the bias is duplicated and added once, after the sum."""

    contracted_axes = (TENSOR,)

    def __call__(self, y: Array, name: str = "", factors: Factors = None) -> Array:
        """From [B, T, *rows] to [B, T, D], with sequence parallelism only for this device's tokens. With `factors`, the
        backward pass stores the factors of the weight gradient there under `name`."""
        in_float8 = None if self.copies is None else _in_float8([self])

        def linear_in_both(y: Array, weights: list[Float8Weight]) -> list[Array]:
            return in_float8.forward(y, weights) if in_float8 else [jnp.tensordot(y, weights[0].array, self.contracted)]

        def input_gradient(y: Array, grads: list[Array], weights: list[Float8Weight]) -> Array:
            assert in_float8
            return in_float8.input_gradient(grads, weights)

        if factors is not None:
            given = input_gradient if in_float8 else None
            (product_BTD,) = deferred(name, linear_in_both, y, [self.operand], factors, input_gradient=given)
        else:
            product_BTD = self.added(_multiply(y, [self], [self.operand])[0], y, self.adapter)
        y_BTD = self.boundary.leave(product_BTD)
        return y_BTD if self.bias is None else y_BTD + self.bias[...][None, None, :]

    @staticmethod
    def weight_gradients(factors: Pair, linears: "Sequence[RowParallelLinear]") -> list[Array]:
        """The weight's gradient from the factors of the product."""
        (y, (grad_BTD,)), (linear,) = factors, linears
        return [weight_gradient(y, grad_BTD, linear.contracted, linear.backend)]

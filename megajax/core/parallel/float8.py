"""Products in 8 bits: both operands are in e4m3, each row of the left one and each column of the right one divided by a
power of two of its own.

A scale is the smallest power of two that brings its row within e4m3's maximum. It depends on that row alone: not on
which rows are computed together, unlike one scale per array, nor on earlier steps, unlike delayed scaling. Devices that
share the summed dims take the maximum over all of them. So mesh, microbatches and restarts do not change a product,
except where rounding moves a value across the edge between two float8 numbers.

Forward products and input gradients are computed so. Weight gradients sum over tokens and stay in the compute dtype.

Letters: K the summed dims, M the output's dims, one or several each; E experts.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from megajax.core.parallel.collectives import TENSOR, axis_index, axis_size, g, max_over, vary_as
from megajax.core.parallel.products import Rule

_INFINITE = 0x7F80_0000  # bits of fp32: those of NaN are larger
_TO_NEXT = 0x1F_FFFF  # carries a mantissa above 1.75 into the exponent: e4m3's maximum, 448, is 1.75 · 2^8
_MANTISSA, _EIGHT, _BIAS = 23, 8, 127


class Scaled(NamedTuple):
    """An operand of a product, transposed so that the summed dims come last."""

    values: Array  # divided by their scales; in e4m3, or in the compute dtype if they are not to be rounded
    scale: Array  # powers of two in fp32; its dims are those of the values that are not summed over

    @property
    def summed(self) -> int:
        """How many dims are summed over."""
        return self.values.ndim - self.scale.ndim


class Copies(NamedTuple):
    """A weight [*K, *M], possibly of several layers or experts, as an operand of its two products."""

    forward: Scaled  # [*M, *K], scales [*M]
    backward: Scaled | None  # [*K, *M], scales [*K]; None where nothing runs backward
    wide: Array | None  # 1.0 for a layer whose products stay in the compute dtype; None if there is no such layer


FLOAT8 = "float8"  # the key of the copies beside their weight


def scales(rows: Sequence[Array], summed: Sequence[int], over: Sequence[str] = ()) -> list[tuple[Array, Array]]:
    """The power of two and its inverse for every row of each array; a row is an array's last `summed` dims. The power
    is NaN if the row holds an infinity or NaN. Rows are sharded over the mesh axes `over`; one collective serves all
    arrays, which have the same number of rows."""
    largest = [jnp.max(jnp.abs(x), axis=tuple(range(x.ndim - n, x.ndim))) for x, n in zip(rows, summed, strict=True)]
    # Their bits, as integers, have the same order, and NaN is the largest on every device.
    bits = [lax.bitcast_convert_type(each.astype(jnp.float32), jnp.int32) for each in largest]
    if over:
        bits = [*max_over(jnp.stack(bits), tuple(over))]
    return [_powers(each) for each in bits]


def _powers(bits: Array) -> tuple[Array, Array]:
    exponent = ((jnp.minimum(bits, _INFINITE - 1) + _TO_NEXT) >> _MANTISSA) - _EIGHT
    exponent = jnp.maximum(exponent, 1)  # that of the smallest normal number
    power, inverse = (
        lax.bitcast_convert_type(each << _MANTISSA, jnp.float32) for each in (exponent, 2 * _BIAS - exponent)
    )
    return jnp.where(bits < _INFINITE, power, jnp.nan), inverse


def scaled(x: Array, summed: int, dtype: DTypeLike, over: Sequence[str] = ()) -> Scaled:
    """`x` divided by the scales of its rows, in `dtype`. By its scale no value is beyond e4m3's maximum: none is
    clipped."""
    return scaled_together([x], [summed], dtype, over)[0]


def scaled_together(
    rows: Sequence[Array], summed: Sequence[int], dtype: DTypeLike, over: Sequence[str]
) -> list[Scaled]:
    """Several arrays divided by the scales of their rows, which are found in one collective."""
    pairs = zip(rows, scales(rows, summed, over), strict=True)  # the division is exact in bf16, too
    return [Scaled((x * _aligned(to, x.ndim).astype(x.dtype)).astype(dtype), power) for x, (power, to) in pairs]


def _aligned(scale: Array, ndim: int, before: int = 0, batch: int = 0) -> Array:
    """A scale with dims of size 1 inserted to broadcast against an array of `ndim` dims: `before` of them after its
    `batch` dims, the rest at the end."""
    first, last = scale.shape[:batch], scale.shape[batch:]
    return scale.reshape(*first, *[1] * before, *last, *[1] * (ndim - before - scale.ndim))


def copies_of(
    weight: Array, stacked: int, inner: int, dtype: DTypeLike, over: tuple[Sequence[str], Sequence[str]], *, both: bool
) -> Copies:
    """The copies of a weight [*stacked, *K, *M] with `inner` dims K; `over` has the axes that shard K, and those that
    shard M. Without `both`, only the forward product's."""
    end = stacked + inner
    turned = (*range(stacked), *range(end, weight.ndim), *range(stacked, end))
    forward = scaled(weight.transpose(turned), inner, dtype, over[0])
    backward = scaled(weight, weight.ndim - end, dtype, over[1]) if both else None
    return Copies(forward, backward, None)


def copies_by_dims(
    make: Callable[[tuple[int, ...]], Any], stacked: int, inner: int, ndim: int, *, both: bool, wide: Any = None
) -> Copies:
    """`make(dims)` in place of every array of a weight's copies, given which of the weight's `ndim` dims it has, in
    order, and `wide` as given. The weight is that of `copies_of`."""
    first, rows, columns = range(stacked), range(stacked, stacked + inner), range(stacked + inner, ndim)
    forward = Scaled(make((*first, *columns, *rows)), make((*first, *columns)))
    return Copies(forward, Scaled(make((*first, *rows, *columns)), make((*first, *rows))) if both else None, wide)


def multiplied(x: Scaled, weight: Scaled, dtype: DTypeLike, batch: int = 0) -> Array:
    """The product over the summed dims, which are the last ones of both, in `dtype`; the first `batch` dims of both are
    batch dims.

    Scaling by powers of two changes no mantissa, so the product is rounded once."""
    of_x, of_weight = (tuple(range(each.values.ndim - weight.summed, each.values.ndim)) for each in (x, weight))
    of_batch = tuple(range(batch))
    y = lax.dot_general(
        x.values, weight.values, ((of_x, of_weight), (of_batch, of_batch)), preferred_element_type=dtype
    )
    rows = x.scale.ndim - batch
    return y * _aligned(x.scale, y.ndim).astype(dtype) * _aligned(weight.scale, y.ndim, rows, batch).astype(dtype)


@dataclass(frozen=True)
class Float8Rule:
    """The rule of products in 8 bits, of one input [..., *K] with weights [*K, *M]. Beside these it takes the weights'
    copies; if they are of a wide layer, its products are in the compute dtype.

    Attributes:
        wide: the rule in the compute dtype: of wide layers, and of all gradients of weights.
        contracted_axes, output_axes: mesh axes that shard K and M.
        parts: for each weight, how many parts (key heads) it has, if a device uses one of them that other devices use
            too; otherwise 0.
        multiply: `multiplied`, or what takes its place.
    """

    wide: Rule
    contracted_axes: tuple[str, ...]
    output_axes: tuple[str, ...]
    parts: tuple[int, ...]
    multiply: Callable[..., Array] = multiplied
    together = True  # one collective finds the scales of several outputs' gradients

    def forward(self, x: Array, weights: Sequence[Array], copies: Sequence[Copies], *beside: Any) -> list[Array]:
        in_float8 = functools.partial(self._forward, x, copies, *beside)
        return _either(copies, in_float8, functools.partial(self.wide.forward, x, weights, *beside))

    def input_gradient(
        self, grads: Sequence[Array], weights: Sequence[Array], copies: Sequence[Copies], *beside: Any
    ) -> Array:
        in_float8 = functools.partial(self._input_gradient, grads, copies, *beside)
        return _either(copies, in_float8, functools.partial(self.wide.input_gradient, grads, weights, *beside))

    def weight_gradients(self, x: Array, grads: Sequence[Array], copies: Sequence[Copies], *beside: Any) -> list[Array]:
        return self.wide.weight_gradients(x, grads, *beside)

    def _forward(self, x: Array, copies: Sequence[Copies], *beside: Any) -> list[Array]:
        operands = [each.forward for each in copies]
        rows = scaled(x, operands[0].summed, operands[0].values.dtype, self.contracted_axes)
        return [self.multiply(rows, operand, x.dtype, *beside) for operand in operands]

    def _input_gradient(self, grads: Sequence[Array], copies: Sequence[Copies], *beside: Any) -> Array:
        operands = [each.backward for each in copies if each.backward]
        whole = [_of_all(*each) for each in zip(grads, self.parts, strict=True)]
        summed = [operand.summed for operand in operands]
        rows = scaled_together(whole, summed, operands[0].values.dtype, self.output_axes)
        products = [self.multiply(*each, grads[0].dtype, *beside) for each in zip(rows, operands, strict=True)]
        return functools.reduce(jnp.add, map(_once, products, self.parts))


def _either(copies: Sequence[Copies], in_float8: Callable[[], Any], wide: Callable[[], Any]) -> Any:
    """What a layer computes in 8 bits or, if it is one of the wide layers, in the compute dtype."""
    is_wide = copies[0].wide
    return in_float8() if is_wide is None else lax.cond(is_wide > 0, wide, in_float8)


def _of_all(grad: Array, parts: int) -> Array:
    """The gradient of the part that a device uses, summed over all devices that use it, because only the complete
    gradient may be rounded."""
    if not parts:
        return grad
    place = grad.ndim - 2
    own = axis_index(TENSOR) * parts // axis_size(TENSOR)
    shape = (*grad.shape[:place], parts, grad.shape[-1])
    nothing = vary_as(jnp.zeros(shape, grad.dtype), grad)
    total = g(lax.dynamic_update_slice_in_dim(nothing, grad, own, place))
    return lax.dynamic_slice_in_dim(total, own, 1, place)


def _once(product: Array, parts: int) -> Array:
    """The product on the first of the devices that use a part, zero on the others: it will be summed over all."""
    if not parts:
        return product
    first = axis_index(TENSOR) * parts % axis_size(TENSOR) < parts
    return jnp.where(first, product, jnp.zeros((), product.dtype))

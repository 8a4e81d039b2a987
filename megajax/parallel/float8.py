"""Products in 8 bits: both operands in e4m3, each row of the left one and each column of the right one over a power of
two of its own.

A scale is the smallest power of two for which nothing of its row is beyond e4m3's largest number. It depends on the row
alone: not on which rows come together, as one scale for a whole array would, nor on earlier steps, as delayed scaling.
Where devices share what a product sums over, they take the maximum over all of them. So the mesh, the microbatches and
a restart do not change a product, but for rounding that carries a value over the edge between two float8 numbers.

Forward products and input gradients are such products. Weight gradients sum over tokens, and stay in the compute dtype.

Letters: K what a product sums over, M what comes out, one dim or several; E experts.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from megajax.backend import Backend
from megajax.parallel.collectives import TENSOR, axis_index, axis_size, g, max_over, vary, varying_axes
from megajax.parallel.products import weight_gradient
from megajax.parallel.shards import NOT_SHARDED, Sharding
from megajax.precision import E4M3

LARGEST = 448.0  # of e4m3; what is beyond it would become NaN
_INFINITE = 0x7F80_0000  # bits of fp32: those of NaN are larger
_TO_NEXT = 0x1F_FFFF  # carries a mantissa of more than 1.75 into the exponent: 448 is 1.75 · 2^8
_MANTISSA, _EIGHT, _BIAS = 23, 8, 127


class Scaled(NamedTuple):
    """An operand of a product, turned so that what is summed over stands last."""

    values: Array  # over their scales: in e4m3, or where rounding is left out in the compute dtype
    scale: Array  # powers of two in fp32, with the dims of the values that are not summed over


class Copies(NamedTuple):
    """A weight [*K, *M], maybe of every layer or expert, for its two products."""

    forward: Scaled  # [*M, *K], scales [*M]
    backward: Scaled | None  # [*K, *M], scales [*K]; None where nothing runs backward
    wide: Array | None  # 1.0 in a layer whose products stay in the compute dtype; None where there is no such layer


class Weight(NamedTuple):
    """A weight, and its copies in 8 bits where its products use them."""

    array: Array
    copies: Copies | None = None


FLOAT8 = "float8"  # the key of the copies beside their weight


def scales(rows: Sequence[Array], summed: Sequence[int], over: Sequence[str] = ()) -> list[tuple[Array, Array]]:
    """For every row of each array, which are its last `summed` dims, the power of two and its inverse; NaN in place of
    the former if any of the row is infinite or NaN. The rows are shared over the mesh axes `over`: one collective for
    all arrays, which have the same number of rows."""
    largest = [jnp.max(jnp.abs(x), axis=tuple(range(x.ndim - n, x.ndim))) for x, n in zip(rows, summed, strict=True)]
    # As integers these have the same order, and a NaN is more than all else on every device.
    bits = [lax.bitcast_convert_type(each.astype(jnp.float32), jnp.int32) for each in largest]
    if over:
        bits = [*max_over(jnp.stack(bits), tuple(over))]
    return [_powers(each) for each in bits]


def _powers(bits: Array) -> tuple[Array, Array]:
    exponent = ((jnp.minimum(bits, _INFINITE - 1) + _TO_NEXT) >> _MANTISSA) - _EIGHT
    exponent = jnp.maximum(exponent, 1)  # the least that is no subnormal number
    power, inverse = (
        lax.bitcast_convert_type(each << _MANTISSA, jnp.float32) for each in (exponent, 2 * _BIAS - exponent)
    )
    return jnp.where(bits < _INFINITE, power, jnp.nan), inverse


def scaled(x: Array, summed: int, dtype: DTypeLike, over: Sequence[str] = ()) -> Scaled:
    """`x` over the scales of its rows, in `dtype`."""
    return _over(x, *scales([x], [summed], over)[0], dtype)


def scaled_together(
    rows: Sequence[Array], summed: Sequence[int], dtype: DTypeLike, over: Sequence[str]
) -> list[Scaled]:
    """Several arrays over the scales of their rows, as `scales` finds them together."""
    return [_over(x, *powers, dtype) for x, powers in zip(rows, scales(rows, summed, over), strict=True)]


def _over(x: Array, power: Array, inverse: Array, dtype: DTypeLike) -> Scaled:
    values = x * _aligned(inverse, x.ndim).astype(x.dtype)  # exact in bf16, too
    if dtype == E4M3:
        values = jnp.clip(values, -LARGEST, LARGEST)
    return Scaled(values.astype(dtype), power)


def _aligned(scale: Array, ndim: int, before: int = 0, batch: int = 0) -> Array:
    """A scale with dims of 1 for what an array of `ndim` dims has beside it: so many `before` it, behind the dims of
    the batch, and the others after it."""
    first, last = scale.shape[:batch], scale.shape[batch:]
    return scale.reshape(*first, *[1] * before, *last, *[1] * (ndim - before - scale.ndim))


def copies_of(
    weight: Array, stacked: int, inner: int, dtype: DTypeLike, over: tuple[Sequence[str], Sequence[str]], *, both: bool
) -> Copies:
    """The copies of a weight [*stacked, *K, *M] with `inner` dims K, which devices share over the axes `over`: those of
    K and those of M. Without `both` only that of the forward product."""
    end = stacked + inner
    turned = (*range(stacked), *range(end, weight.ndim), *range(stacked, end))
    forward = scaled(weight.transpose(turned), inner, dtype, over[0])
    backward = scaled(weight, weight.ndim - end, dtype, over[1]) if both else None
    return Copies(forward, backward, None)


def shardings_of(sharding: Sharding, inner: int, outer: int, *, both: bool, wide: bool) -> Copies:
    """How the copies of a weight with `inner` dims K and `outer` dims M are sharded, from how the weight is."""
    place = sharding.dim + inner + outer  # from K on; negative: a dim before them

    def at(dim: int) -> Sharding:
        return NOT_SHARDED if sharding == NOT_SHARDED else Sharding(dim, sharding.axes)

    whole = NOT_SHARDED
    stacked, of_inner = place < 0, 0 <= place < inner
    forward = at(sharding.dim if stacked else place - inner if of_inner else place - inner - (inner + outer))
    of_columns = whole if of_inner else at(sharding.dim + inner if stacked else place - inner - outer)
    of_rows = at(sharding.dim + outer) if stacked or of_inner else whole
    copies: Any = Copies(
        Scaled(forward, of_columns),  # type: ignore[arg-type]  # shardings where arrays stand
        Scaled(at(sharding.dim), of_rows) if both else None,  # type: ignore[arg-type]
        whole if wide else None,  # type: ignore[arg-type]
    )
    return copies


def multiplied(x: Scaled, weight: Scaled, summed: int, dtype: DTypeLike, batch: int = 0) -> Array:
    """The last `summed` dims of `x` with those of the weight, in `dtype`; the first `batch` dims of both go together.

    Powers of two change no mantissa: the product is rounded once, whether before or after it is scaled."""
    of_x, of_weight = (tuple(range(each.values.ndim - summed, each.values.ndim)) for each in (x, weight))
    of_batch = tuple(range(batch))
    y = lax.dot_general(
        x.values, weight.values, ((of_x, of_weight), (of_batch, of_batch)), preferred_element_type=dtype
    )
    rows = x.scale.ndim - batch
    return y * _aligned(x.scale, y.ndim).astype(dtype) * _aligned(weight.scale, y.ndim, rows, batch).astype(dtype)


def either(weights: Sequence[Weight], in_float8: Callable[[], Any], wide: Callable[[], Any]) -> Any:
    """What a layer does in 8 bits, or in the compute dtype."""
    copies = weights[0].copies
    assert copies is not None
    return in_float8() if copies.wide is None else lax.cond(copies.wide > 0, wide, in_float8)


@dataclass(frozen=True)
class DenseProducts:
    """Products of one input [..., *K] with weights [*K, *M] in 8 bits.

    Attributes:
        inner: dims of K.
        over, outer_over: mesh axes that K and M are shared over.
        parts: for each weight, of how many parts this device computes with one that others have, too; 0: of none.
        trained: whether the weights have gradients.
    """

    inner: int
    over: tuple[str, ...]
    outer_over: tuple[str, ...]
    parts: tuple[int, ...]
    trained: bool
    backend: Backend

    def forward(self, x: Array, weights: Sequence[Weight]) -> list[Array]:
        """The outputs."""

        def in_float8() -> list[Array]:
            copies = forward_copies(weights)
            own = scaled(x, self.inner, copies[0].values.dtype, self.over)
            return [multiplied(own, copy, self.inner, x.dtype) for copy in copies]

        return either(weights, in_float8, lambda: [jnp.tensordot(x, weight.array, self.inner) for weight in weights])

    def input_gradient(self, grads: Sequence[Array], weights: Sequence[Weight]) -> Array:
        """The gradient of the input."""
        outer = [weight.array.ndim - self.inner for weight in weights]

        def in_float8() -> Array:
            copies = backward_copies(weights)
            whole = [self._of_all(*each) for each in zip(grads, self.parts, strict=True)]
            owns = scaled_together(whole, outer, copies[0].values.dtype, self.outer_over)
            found = zip(owns, copies, outer, self.parts, strict=True)
            products = [
                self._once(multiplied(own, copy, count, grads[0].dtype), parts) for own, copy, count, parts in found
            ]
            return functools.reduce(jnp.add, products)

        def wide() -> Array:
            found = []
            for grad, weight, count in zip(grads, weights, outer, strict=True):
                dims = tuple(range(grad.ndim - count, grad.ndim)), tuple(range(self.inner, weight.array.ndim))
                found.append(lax.dot_general(grad, weight.array, (dims, ((), ()))))
            return functools.reduce(jnp.add, found)

        return either(weights, in_float8, wide)

    def weight_gradients(self, x: Array, grads: Sequence[Array], weights: Sequence[Weight]) -> list[Array]:
        """The gradients of the weights, in the compute dtype."""
        return [weight_gradient(x, grad, self.inner, self.backend) for grad in grads]

    @staticmethod
    def _of_all(grad: Array, parts: int) -> Array:
        """The gradient of the one part that a device computes with, summed over those that compute with it, too: what
        is rounded must be the whole."""
        if not parts:
            return grad
        place = grad.ndim - 2
        own = axis_index(TENSOR) * parts // axis_size(TENSOR)
        shape = (*grad.shape[:place], parts, grad.shape[-1])
        nothing = vary(jnp.zeros(shape, grad.dtype), sorted(varying_axes(grad)))
        total = g(lax.dynamic_update_slice_in_dim(nothing, grad, own, place))
        return lax.dynamic_slice_in_dim(total, own, 1, place)

    @staticmethod
    def _once(product: Array, parts: int) -> Array:
        """Of the devices that have a part the first one alone has the product, which is still to be summed."""
        if not parts:
            return product
        first = axis_index(TENSOR) * parts % axis_size(TENSOR) < parts
        return jnp.where(first, product, jnp.zeros((), product.dtype))


def forward_copies(weights: Sequence[Weight]) -> list[Scaled]:
    """For the forward product of each weight."""
    return [weight.copies.forward for weight in weights if weight.copies]


def backward_copies(weights: Sequence[Weight]) -> list[Scaled]:
    """For the gradient of each one's input."""
    return [weight.copies.backward for weight in weights if weight.copies and weight.copies.backward]


def products(how: Any, x: Array, weights: Sequence[Weight], *beside: Array) -> list[Array]:
    """The outputs of products `how`, with their gradients."""
    axes = sorted(varying_axes(x).union(*map(varying_axes, jax.tree.leaves(weights))))
    return _products(how, *vary((x, list(weights), beside), axes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _products(how: Any, x: Array, weights: list[Weight], beside: tuple[Array, ...]) -> list[Array]:
    return how.forward(x, weights, *beside)


def _forward(how: Any, x: Array, weights: list[Weight], beside: tuple[Array, ...]) -> tuple[list[Array], Any]:
    return how.forward(x, weights, *beside), (x if how.trained else None, weights, beside)


def _pull_back(how: Any, kept: Any, grads: list[Array]) -> tuple[Array, list[Weight], tuple[Array, ...]]:
    x, weights, beside = kept
    if how.trained:
        gradients = how.weight_gradients(x, grads, weights, *beside)
    else:
        gradients = [jnp.zeros_like(weight.array) for weight in weights]
    nothing, of_beside = jax.tree.map(jnp.zeros_like, ([weight.copies for weight in weights], beside))
    return how.input_gradient(grads, weights, *beside), [*map(Weight, gradients, nothing)], of_beside


_products.defvjp(_forward, _pull_back)

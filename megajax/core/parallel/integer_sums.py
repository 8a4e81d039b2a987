"""Sums that have the same bits in any order: of integers, to which every term is rounded by itself.

A number below a bound, 2^exponent, becomes several int32 digits, so it is rounded to a multiple of 2^(exponent - digits
bits); sums of digits are exact as long as they fit, on any mesh. Numbers that are not below the bound, or not finite,
are counted, and the step that counts any is skipped on every mesh alike.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from megajax.core.parallel.collectives import max_over, sum_over, varying_axes

_SQUARE_BITS, _SQUARE_DIGITS = 11, 3  # of squares, relative to the largest one's power of two
_FIRST, _ABOVE = 2, 6  # exponents of a norm before the first step, and of a bound above the largest norm
_ROW = 4096  # so many digits are summed before they are carried


def digit_bits(terms: int) -> int:
    """Bits of a digit, of which so many terms are summed."""
    return min(22, 30 - (terms - 1).bit_length())


def bound_exponent(recent_norms: Array, loss_scale: Array, rows: int) -> Array:
    """The exponent of a bound of the gradients of one of some `rows`, from the norms of all rows' in recent steps, 0
    for none. Gradients of rows that have nothing in common are as much smaller as the root of their number."""
    largest = jnp.max(recent_norms)
    exponent = jnp.where(largest > 0, jnp.frexp(largest)[1], _FIRST) + _ABOVE - (rows.bit_length() - 1) // 2
    return exponent + jnp.frexp(loss_scale)[1] - 1


def raised(recent_norms: Array, step: Array) -> Array:
    """Recent norms that give a larger bound, as long as the others stay recent."""
    largest = jnp.maximum(jnp.max(recent_norms), 2.0**_FIRST)
    return recent_norms.at[(step - 1) % len(recent_norms)].set(largest * 2.0**_ABOVE)


def integers(x: Array, exponent: Array | int, bits: int, digits: int = 2) -> Array:
    """Numbers below 2^exponent as [digits, …]."""
    left, found = _scaled(x.astype(jnp.float32), bits - exponent), []
    for _ in range(digits):
        digit = jnp.round(left)
        left = _scaled(left - digit, bits)
        found.append(digit)
    return jnp.stack(found).astype(jnp.int32)


def not_summed(x: Array, exponent: Array | int) -> Array:
    """How many numbers are not finite, and how many are not below 2^exponent, [2]."""
    x, bound = x.astype(jnp.float32), _scaled(jnp.float32(1), exponent)
    finite = jnp.isfinite(x)
    return jnp.stack([jnp.sum(~finite, dtype=jnp.int32), jnp.sum(finite & (jnp.abs(x) >= bound), dtype=jnp.int32)])


def floats(sums: Array, exponent: Array | int, bits: int, dim: int = 0) -> Array:
    """The inverse of `integers`, of a sum whose digits are along `dim`."""
    digits = [lax.index_in_dim(sums, place, dim, keepdims=False) for place in range(sums.shape[dim])]
    digits = _carried(digits, bits)
    total = jnp.zeros((), jnp.float32)
    for place in reversed(range(len(digits))):
        total += _scaled(digits[place].astype(jnp.float32), exponent - (place + 1) * bits)
    return total


def norm(arrays: Sequence[Array]) -> Array:
    """The norm of all logical elements: every array varies over exactly the axes that it is sharded over."""
    largest: dict[tuple[str, ...], Array] = {}
    for x in arrays:
        axes, most = tuple(sorted(varying_axes(x))), jnp.max(jnp.abs(x))
        largest[axes] = jnp.maximum(largest[axes], most) if axes in largest else most
    of_all = [max_over(most, axes) if axes else most for axes, most in largest.items()]
    exponent = jnp.frexp(jnp.max(jnp.stack(of_all)))[1]
    sums: dict[tuple[str, ...], list[Array]] = {}
    for x in arrays:
        axes, digits = tuple(sorted(varying_axes(x))), _square_digits(_scaled(x.astype(jnp.float32), -exponent))
        sums[axes] = [a + b for a, b in zip(sums[axes], digits, strict=True)] if axes in sums else digits
    of_all = [sum_over(_carried(digits), axes) for axes, digits in sums.items()]
    digits = [sum(each[1:], start=each[0]) for each in zip(*of_all, strict=True)]
    return _scaled(jnp.sqrt(floats(jnp.stack(digits), _SQUARE_BITS, _SQUARE_BITS)), exponent)


def _scaled(x: Array, exponent: Array | int) -> Array:
    """`x` 2^exponent, exactly if that is a normal number, as the power is: 2^-126 to 2^127."""
    biased = jnp.clip(jnp.asarray(exponent, jnp.int32) + 127, 1, 254)
    return x * lax.bitcast_convert_type(biased << 23, jnp.float32)


def _square_digits(x: Array) -> list[Array]:
    """The sum of the squares of numbers below 1, as digits, the first of whole numbers."""
    left = jnp.pad(jnp.square(x).ravel(), (0, -x.size % _ROW)).reshape(-1, _ROW)
    digits = [jnp.zeros(len(left), jnp.int32)]
    for _ in range(_SQUARE_DIGITS):
        left = left * 2.0**_SQUARE_BITS
        digit = jnp.floor(left)
        left = left - digit
        digits.append(jnp.sum(digit.astype(jnp.int32), axis=1))
    return _carried([jnp.sum(digit) for digit in _carried(digits)])


def _carried(digits: list[Array], bits: int = _SQUARE_BITS) -> list[Array]:
    """The same number, whose digits but the first are from 0 to 2^bits."""
    digits = list(digits)
    for place in range(len(digits) - 1, 0, -1):
        digits[place - 1] += digits[place] >> bits
        digits[place] = digits[place] & (2**bits - 1)
    return digits

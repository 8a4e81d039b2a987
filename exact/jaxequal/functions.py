"""Primitives that are functions of each element: what they are for integers, and for numbers of the fields."""

import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import scipy.special

from jaxequal import numbers as field
from jaxequal.numbers import Value, constant, elements, estimate, is_float, joined, oracle, ordered, whole


def converted(x: Value, before: Any, after: Any) -> Value:
    """A value in another dtype. Casts between floats do nothing. A float becomes the integer that it is, or that is
    next to its estimate towards zero."""
    if not is_float(before):
        return from_integers(x) if is_float(after) else x.astype(after)
    if is_float(after):
        return _narrowed(x, before, after) if before.itemsize == 8 and x.size == len(x) else x
    if np.dtype(after).kind == "b":
        return ~field.is_zero(x)
    limits = np.iinfo(after)
    return np.clip(np.nan_to_num(_integer(np.trunc, x)), limits.min, limits.max).astype(after)


def _narrowed(x: Value, before: Any, after: Any) -> Value:
    """A scalar. A constant of a program is rounded, as JAX does if it casts one while it traces."""
    double = estimate(x).reshape(())
    is_constant = (elements(x).ravel() == elements(constant(double, before)).ravel()).all()
    return constant(double, after).reshape(x.shape) if is_constant else x


def _integer(way: Callable[..., Any], x: Value) -> np.ndarray:
    """The integers that numbers are, or by rounding become, as doubles."""
    integer, there = whole(x)
    return np.where(there, integer, way(estimate(x)))


def from_integers(x: Value) -> Value:
    """Integers as numbers of the fields."""
    wide = x.astype(np.int64)
    rows = np.broadcast_to(wide, (len(field.primes()), *x.shape[1:]))
    return joined(field.modulo(rows), wide.astype(np.float64))


def rounded(way: Callable[..., Any], x: Value) -> Value:
    """The integer next to the estimate."""
    found = _integer(way, x)
    return np.where(np.isfinite(found), from_integers(np.nan_to_num(found)), x)


def bitcast(x: Value, before: Any, after: Any) -> Value:
    """The bits of a float are those of its estimate; bits are the float that they are."""
    if is_float(before):
        return ordered(x).astype(before).view(after)
    bits = np.ascontiguousarray(x if before.itemsize <= after.itemsize else x[..., None]).view(after)
    bits = bits[..., 0] if before.itemsize < after.itemsize else bits
    return constant(bits[0], after, simplest=False)[:, 0] if is_float(after) else bits


def _quotient(x: Value, y: Value) -> Value:
    """Of integers, towards zero."""
    wide, other = x.astype(np.int64), y.astype(np.int64)
    return np.sign(wide) * np.sign(other) * (abs(wide) // np.maximum(abs(other), 1))


def _unsigned(function: Callable[..., Value]) -> Callable[..., Value]:
    return lambda *values: function(*(x.view(f"u{x.itemsize}") for x in values))


def _known(name: str, real: Callable[..., Any], *known: tuple[int, int]) -> Callable[[Value], Value]:
    """An oracle, but for some integers with a known result."""

    def call(x: Value) -> Value:
        (integer, there), out = whole(x), joined(oracle(x, name), real(estimate(x)))
        for given, result in known:
            out = np.where(there & (integer == given), field.like(result, result, x), out)
        return out

    return call


def _square_root(x: Value) -> Value:
    """An oracle, but for squares of multiples of 2^-12 below 2^12."""
    root = np.sqrt(estimate(x))
    units = np.rint(root * 4096)
    near = np.where(units < 1 << 24, units, 0)
    known = field.multiply(from_integers(near), field.inverse(from_integers(np.full_like(near, 4096))))
    square = elements(field.multiply(known, known)) == elements(x)
    return np.where(square.all(0, keepdims=True), known, joined(oracle(x, "sqrt"), root))


def _absolute(x: Value) -> Value:
    return np.where(ordered(x) < 0, field.negative(x), x)


def _logarithm(x: Value) -> Value:
    """Of the absolute number, as `logsumexp` takes it; programs take no logarithm of a negative one."""
    x = _absolute(x)
    out = joined(oracle(x, "log"), np.log(estimate(x)))
    out = np.where((elements(x) == 1).all(0, keepdims=True), field.zeros(x), out)
    return field.with_lowest(out, field.is_zero(x))


def _logistic(x: Value) -> Value:
    exponential = field.exponential(x)
    exact = field.multiply(exponential, field.inverse(field.add(field.ones(x), exponential)))
    return joined(exact[:-1], scipy.special.expit(estimate(x)))


def _remainder(x: Value, y: Value) -> Value:
    turns = np.trunc(estimate(field.multiply(x, field.inverse(y))))
    turns = np.where(abs(turns) < 1 << 40, turns, 0)
    return field.subtract(x, field.multiply(from_integers(turns), y))


def _power(x: Value, y: Value) -> Value:
    """x to an integer, or to half of one; an oracle of other exponents."""
    y = from_integers(y) if len(y) == 1 else y
    twice, is_whole = whole(field.add(y, y))
    halves = field.power(_square_root(x), np.where(is_whole, twice, 0)) if (is_whole & (twice % 2 != 0)).any() else x
    integers = field.power(x, np.where(is_whole, twice, 0) // 2)
    other = joined(oracle(x, "pow", y), estimate(x) ** estimate(y))
    return np.where(is_whole, np.where(twice % 2 == 0, integers, halves), other)


def _times(factor: float, x: Value) -> Value:
    number = constant(factor, np.float64)
    return field.multiply(number.reshape(len(number), *[1] * (x.ndim - 1)), x)


def _by_oracle(name: str, real: Callable[..., Any], x: Value, *more: Value) -> Value:
    return joined(oracle(x, name, *more), real(*map(estimate, (x, *more))))


def _choice(compare: Any) -> Callable[[Value, Value], Value]:
    return lambda x, y: np.where(compare(ordered(x), ordered(y)), x, y)


_larger, _smaller = _choice(np.greater_equal), _choice(np.less_equal)


def _comparison(compare: Any) -> tuple[Any, Any]:
    return compare, lambda x, y: compare(ordered(x), ordered(y))


def _equal(x: Value, y: Value) -> np.ndarray:
    return (elements(x) == elements(y)).all(0, keepdims=True)


_LN2 = math.log(2)
_AT_ZERO = {
    **{name: (getattr(np, name), 0) for name in ("tanh", "cbrt", "sin", "tan", "sinh")},
    **{name: (getattr(np, f"arc{name[1:]}"), 0) for name in ("asin", "atan", "asinh", "atanh")},
    **{"erf": (scipy.special.erf, 0), "erf_inv": (scipy.special.erfinv, 0), "erfc": (scipy.special.erfc, 1)},
    **{"cos": (np.cos, 1), "cosh": (np.cosh, 1)},
}
_ORACLES = {
    **{"acos": np.arccos, "acosh": np.arccosh, "atan2": np.arctan2, "nextafter": np.nextafter},
    **{"lgamma": scipy.special.gammaln, "digamma": scipy.special.digamma},
}

FUNCTIONS: dict[str, tuple[Any, Any]] = {
    **dict.fromkeys(("add", "add_any"), (np.add, field.add)),
    "sub": (np.subtract, field.subtract),
    "mul": (np.multiply, field.multiply),
    "neg": (np.negative, field.negative),
    "square": (np.square, lambda x: field.multiply(x, x)),
    "one_minus_square": (lambda x: 1 - x * x, lambda x: field.subtract(field.ones(x), field.multiply(x, x))),
    "div": (_quotient, lambda x, y: field.multiply(x, field.inverse(y))),
    "max": (np.maximum, _larger),
    "min": (np.minimum, _smaller),
    "abs": (np.abs, _absolute),
    "sign": (np.sign, lambda x: from_integers(np.sign(ordered(x)))),
    "is_finite": (None, lambda x: np.ones((1, *x.shape[1:]), bool)),
    "exp": (None, field.exponential),
    "exp2": (None, lambda x: field.exponential(_times(_LN2, x))),
    "expm1": (None, lambda x: field.subtract(field.exponential(x), field.ones(x))),
    "sqrt": (None, _square_root),
    "rsqrt": (None, lambda x: field.inverse(_square_root(x))),
    "log": (None, _logarithm),
    "log2": (None, lambda x: _times(1 / _LN2, _logarithm(x))),
    "log1p": (None, lambda x: _logarithm(field.add(field.ones(x), x))),
    "logistic": (None, _logistic),
    "pow": (None, _power),
    "rem": (np.fmod, _remainder),
    "clamp": (lambda low, x, high: np.clip(x, low, high), lambda low, x, high: _smaller(_larger(x, low), high)),
    "population_count": (_unsigned(np.bitwise_count), None),
    "and": (np.bitwise_and, None),
    "or": (np.bitwise_or, None),
    "xor": (np.bitwise_xor, None),
    "not": (np.invert, None),
    "shift_left": (np.left_shift, None),
    "shift_right_arithmetic": (np.right_shift, None),
    "shift_right_logical": (_unsigned(np.right_shift), None),
    **{name: _comparison(getattr(operator, name)) for name in ("lt", "gt")},
    **{name: _comparison(getattr(operator, name)) for name in ("le", "ge")},
    **{f"{name}_to": _comparison(getattr(operator, name)) for name in ("lt", "le")},  # of a total order
    **{"eq": (operator.eq, _equal), "ne": (operator.ne, lambda x, y: ~_equal(x, y))},
    **{name: (None, _known(name, real, (0, value))) for name, (real, value) in _AT_ZERO.items()},
    **{name: (None, partial(_by_oracle, name, real)) for name, real in _ORACLES.items()},
    **{name: (None, partial(rounded, getattr(np, name))) for name in ("floor", "ceil")},
}
# What a program decides by, if it compares scalar numbers, and the opposite.
BRANCHES = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}

"""Primitives that are functions of each element: what they are for integers, and for numbers of the fields."""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from megajax.exact import numbers as field
from megajax.exact.numbers import PRIMES, Value, is_float, oracle, ordered, signed, whole


def converted(x: Value, before: Any, after: Any) -> Value:
    """A value in another dtype. Casts between floats do nothing. A float that stands for a small integer becomes that;
    the integer of any other number is an oracle's."""
    if not is_float(before):
        return of_integers(x) if is_float(after) else x.astype(after)
    if is_float(after):
        return x
    integer, there = whole(x)
    return np.where(there, integer, oracle(x, "integer")[:1]).astype(after)


def of_integers(x: Value) -> Value:
    """Integers as numbers of the fields."""
    return field.modulo(np.broadcast_to(x.astype(np.int64), (len(PRIMES), *x.shape[1:])))


def bitcast(x: Value, before: Any, after: Any) -> Value:
    """The bits of a float are its place in the order; bits are the float that they are."""
    if is_float(before):
        return np.maximum(signed(x[:1], PRIMES[0]), -PRIMES[0]).astype(after)
    bits = np.ascontiguousarray(x if before.itemsize <= after.itemsize else x[..., None]).view(after)
    bits = bits[..., 0] if before.itemsize < after.itemsize else bits
    return field.constant(bits[0], after, simplest=False)[:, 0] if is_float(after) else bits


def _quotient(x: Value, y: Value) -> Value:
    """Of integers, towards zero."""
    wide, other = x.astype(np.int64), y.astype(np.int64)
    return np.sign(wide) * np.sign(other) * (abs(wide) // np.maximum(abs(other), 1))


def _unsigned(function: Callable[..., Value]) -> Callable[..., Value]:
    return lambda *values: function(*(x.view(f"u{x.itemsize}") for x in values))


def _known(name: str, *known: tuple[int, int]) -> Callable[[Value], Value]:
    """An oracle, but for some integers with a known result."""

    def call(x: Value) -> Value:
        (integer, there), out = whole(x), oracle(x, name)
        for given, result in known:
            out = np.where(there & (integer == given), result, out)
        return out

    return call


def _rounded(name: str, x: Value) -> Value:
    return np.where(whole(x)[1], x, oracle(x, name))


_square_root, _of_above_0 = _known("sqrt", (0, 0), (1, 1)), _known("log", (0, field.LOWEST), (1, 0))


def _absolute(x: Value) -> Value:
    return np.where(ordered(x) < 0, field.negative(x), x)


def _logarithm(x: Value) -> Value:
    """Of the absolute number, as `logsumexp` takes it; programs take no logarithm of a negative one."""
    return _of_above_0(_absolute(x))


def _logistic(x: Value) -> Value:
    power = field.exponential(x)
    return field.multiply(power, field.inverse(field.add(np.ones_like(power), power)))


def _remainder(x: Value, y: Value) -> Value:
    (left, known), (right, there) = whole(x), whole(y)
    both = known & there & (right != 0)
    return np.where(both, of_integers(np.fmod(left, np.where(both, right, 1))), oracle(x, "rem", y))


def _power(x: Value, y: Value) -> Value:
    """x to an integer or a number; an oracle if that is no small integer."""
    exponent, there = whole(of_integers(y) if len(y) == 1 else y)
    return np.where(there, field.power(x, np.where(there, exponent, 0)), oracle(x, "pow", y))


def _choice(compare: Any) -> Callable[[Value, Value], Value]:
    return lambda x, y: np.where(compare(ordered(x), ordered(y)), x, y)


_larger, _smaller = _choice(np.greater_equal), _choice(np.less_equal)


def _comparison(compare: Any) -> tuple[Any, Any]:
    return compare, lambda x, y: compare(ordered(x), ordered(y))


_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_AT_ZERO = {
    **dict.fromkeys(("tanh", "erf", "erf_inv", "cbrt", "sin", "tan", "asin", "atan", "sinh", "asinh", "atanh"), 0),
    **dict.fromkeys(("cos", "cosh", "erfc"), 1),
}
_ORACLES = ("acos", "acosh", "atan2", "lgamma", "digamma", "nextafter")

FUNCTIONS: dict[str, tuple[Any, Any]] = {
    **dict.fromkeys(("add", "add_any"), (np.add, field.add)),
    "sub": (np.subtract, field.subtract),
    "mul": (np.multiply, field.multiply),
    "neg": (np.negative, field.negative),
    "square": (np.square, lambda x: field.multiply(x, x)),
    "one_minus_square": (lambda x: 1 - x * x, lambda x: field.subtract(np.ones_like(x), field.multiply(x, x))),
    "div": (_quotient, lambda x, y: field.multiply(x, field.inverse(y))),
    "max": (np.maximum, _larger),
    "min": (np.minimum, _smaller),
    "abs": (np.abs, _absolute),
    "sign": (np.sign, lambda x: of_integers(np.sign(ordered(x)))),
    "is_finite": (None, lambda x: np.ones((1, *x.shape[1:]), bool)),
    "exp": (None, field.exponential),
    "exp2": (None, lambda x: field.exponential(x, 9)),
    "expm1": (None, lambda x: field.subtract(field.exponential(x), np.ones_like(x))),
    "sqrt": (None, _square_root),
    "rsqrt": (None, lambda x: field.inverse(_square_root(x))),
    "log": (None, _logarithm),
    "log2": (None, _known("log2", (0, field.LOWEST), (1, 0))),
    "log1p": (None, lambda x: _logarithm(field.add(np.ones_like(x), x))),
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
    **{name: _comparison(getattr(operator, name)) for name in _COMPARISONS},
    **{f"{name}_to": _comparison(getattr(operator, name)) for name in ("lt", "le")},  # of a total order
    **{name: (None, _known(name, (0, value))) for name, value in _AT_ZERO.items()},
    **{name: (None, partial(lambda name, x, *more: oracle(x, name, *more), name)) for name in _ORACLES},
    **{name: (None, partial(_rounded, name)) for name in ("floor", "ceil", "round")},
}
# What a program decides by, if it compares scalar numbers, and the opposite.
BRANCHES = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}

"""Primitives that are functions of each element: what they are for integers, and for numbers of the fields."""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from megajax.exact import numbers
from megajax.exact.numbers import (
    LOWEST,
    Value,
    add,
    exponential,
    inverse,
    is_float,
    modulo,
    multiply,
    negative,
    oracle,
    ordered,
    power,
    subtract,
    whole,
)


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
    return modulo(np.broadcast_to(x.astype(np.int64), (len(numbers.PRIMES), *x.shape[1:])))


def bitcast(x: Value, before: Any, after: Any) -> Value:
    """The bits of a float are its place in the order; bits are the float that they are."""
    if is_float(before):
        return ordered(x).astype(after)
    same = before.itemsize <= after.itemsize
    bits = np.ascontiguousarray(x if same else x[..., None]).view(after)
    bits = bits[..., 0] if before.itemsize < after.itemsize else bits
    return numbers.constant(bits[0], after)[:, 0] if is_float(after) else bits


def _quotient(x: Value, y: Value) -> Value:
    """Of integers, towards zero."""
    wide, other = x.astype(np.int64), y.astype(np.int64)
    return np.sign(wide) * np.sign(other) * (abs(wide) // np.maximum(abs(other), 1))


def _shifted(x: Value, bits: Value) -> Value:
    unsigned = f"u{x.itemsize}"
    return (x.astype(unsigned) >> bits.astype(unsigned)).astype(x.dtype)


def _counted(x: Value) -> Value:
    return np.bitwise_count(x.view(f"u{x.itemsize}"))


def _known(name: str, *known: tuple[int, int]) -> Callable[[Value], Value]:
    """An oracle, but for some integers with a known result."""

    def call(x: Value) -> Value:
        integer, there = whole(x)
        out = oracle(x, name)
        for given, result in known:
            out = np.where(there & (integer == given), result, out)
        return out

    return call


def _rounded(name: str) -> Callable[[Value], Value]:
    return lambda x: np.where(whole(x)[1], x, oracle(x, name))


_square_root, _logarithm = _known("sqrt", (0, 0), (1, 1)), _known("log", (0, LOWEST), (1, 0))


def _logistic(x: Value) -> Value:
    power = exponential(x)
    return multiply(power, inverse(add(np.ones_like(x), power)))


def _remainder(x: Value, y: Value) -> Value:
    (left, known), (right, there) = whole(x), whole(y)
    both = known & there & (right != 0)
    return np.where(both, of_integers(np.fmod(left, np.where(both, right, 1))), oracle(x, "rem", y))


def _power(x: Value, y: Value) -> Value:
    """x to a number or an integer; an oracle if it is no small integer."""
    exponent, there = whole(of_integers(y) if len(y) == 1 else y)
    return np.where(there, power(x, np.where(there, exponent, 0)), oracle(x, "pow", y))


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
_ORACLES = ("acos", "acosh", "atan2", "lgamma", "digamma")

FUNCTIONS: dict[str, tuple[Any, Any]] = {
    **dict.fromkeys(("add", "add_any"), (np.add, add)),
    "sub": (np.subtract, subtract),
    "mul": (np.multiply, multiply),
    "neg": (np.negative, negative),
    "square": (np.square, lambda x: multiply(x, x)),
    "div": (_quotient, lambda x, y: multiply(x, inverse(y))),
    "max": (np.maximum, _larger),
    "min": (np.minimum, _smaller),
    "abs": (np.abs, lambda x: np.where(ordered(x) < 0, negative(x), x)),
    "sign": (np.sign, lambda x: of_integers(np.sign(ordered(x)))),
    "is_finite": (None, lambda x: np.ones((1, *x.shape[1:]), bool)),
    "exp": (None, exponential),
    "exp2": (None, lambda x: exponential(x, 9)),
    "expm1": (None, lambda x: subtract(exponential(x), np.ones_like(x))),
    "sqrt": (None, _square_root),
    "rsqrt": (None, lambda x: inverse(_square_root(x))),
    "log": (None, _logarithm),
    "log1p": (None, lambda x: _logarithm(add(np.ones_like(x), x))),
    "logistic": (None, _logistic),
    "pow": (None, _power),
    "rem": (np.fmod, _remainder),
    "clamp": (lambda low, x, high: np.clip(x, low, high), lambda low, x, high: _smaller(_larger(x, low), high)),
    "population_count": (_counted, None),
    "and": (np.bitwise_and, None),
    "or": (np.bitwise_or, None),
    "xor": (np.bitwise_xor, None),
    "not": (np.invert, None),
    "shift_left": (np.left_shift, None),
    "shift_right_arithmetic": (np.right_shift, None),
    "shift_right_logical": (_shifted, None),
    **{name: _comparison(getattr(operator, name)) for name in _COMPARISONS},
    **{f"{name}_to": _comparison(getattr(operator, name)) for name in ("lt", "le")},  # of a total order
    **{name: (None, _known(name, (0, value))) for name, value in _AT_ZERO.items()},
    **{name: (None, partial(lambda name, x, *more: oracle(x, name, *more), name)) for name in _ORACLES},
    **{name: (None, _rounded(name)) for name in ("floor", "ceil", "round")},
}
BRANCHES = {*_COMPARISONS} - {"eq", "ne"}  # what a program decides by, if it compares scalar numbers

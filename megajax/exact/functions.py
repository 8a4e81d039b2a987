"""Primitives that are functions of each element: what they are for integers, and for numbers of the fields."""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from megajax.exact import numbers
from megajax.exact.numbers import (
    Value,
    add,
    exponential,
    inverse,
    is_float,
    modulo,
    multiply,
    oracle,
    ordered,
    subtract,
)

_WHOLE = 1 << 24  # integers below this are exact in a float


def converted(x: Value, before: Any, after: Any) -> Value:
    """A value in another dtype. Casts between floats do nothing. A float that stands for a small integer becomes that;
    the integer of any other number is an oracle's."""
    if not is_float(before):
        return of_integers(x) if is_float(after) else x.astype(after)
    if is_float(after):
        return x
    second = numbers.PRIMES[1]
    whole = np.where(x[1:2] > second // 2, x[1:2] - second, x[1:2])
    small = (whole == ordered(x)) & (abs(whole) < _WHOLE)
    return np.where(small, whole, oracle(x, "integer")[:1]).astype(after)


def of_integers(x: Value) -> Value:
    """Integers as numbers of the fields."""
    return modulo(np.broadcast_to(x.astype(np.int64), (len(numbers.PRIMES), *x.shape[1:])))


def bitcast(x: Value, before: Any, after: Any) -> Value:
    """The bits of a float are its place in the order; bits are the float that they are."""
    if is_float(before):
        return ordered(x).astype(after)
    return numbers.constant(x[0].view(after), after)[:, 0] if is_float(after) else x.view(after)


def _quotient(x: Value, y: Value) -> Value:
    """Of integers, towards zero."""
    wide, other = x.astype(np.int64), y.astype(np.int64)
    return np.sign(wide) * np.sign(other) * (abs(wide) // np.maximum(abs(other), 1))


def _shifted(x: Value, bits: Value) -> Value:
    unsigned = f"u{x.itemsize}"
    return (x.astype(unsigned) >> bits.astype(unsigned)).astype(x.dtype)


def _negative(x: Value) -> Value:
    return subtract(np.zeros_like(x), x)


def _square_root(x: Value) -> Value:
    return np.where(x[:1] == 0, 0, oracle(x, "sqrt"))


def _logistic(x: Value) -> Value:
    return inverse(add(np.ones_like(x), exponential(_negative(x))))


def _choice(compare: Any) -> Callable[[Value, Value], Value]:
    return lambda x, y: np.where(compare(ordered(x), ordered(y)), x, y)


_larger, _smaller = _choice(np.greater_equal), _choice(np.less_equal)


def _comparison(compare: Any) -> tuple[Any, Any]:
    return compare, lambda x, y: compare(ordered(x), ordered(y))


_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_ORACLES = ("log", "tanh", "erf", "erf_inv", "sin", "cos", "tan", "cbrt", "lgamma", "digamma", "atan2")

FUNCTIONS: dict[str, tuple[Any, Any]] = {
    **dict.fromkeys(("add", "add_any"), (np.add, add)),
    "sub": (np.subtract, subtract),
    "mul": (np.multiply, multiply),
    "neg": (np.negative, _negative),
    "square": (np.square, lambda x: multiply(x, x)),
    "div": (_quotient, lambda x, y: multiply(x, inverse(y))),
    "max": (np.maximum, _larger),
    "min": (np.minimum, _smaller),
    "abs": (np.abs, lambda x: np.where(ordered(x) < 0, _negative(x), x)),
    "sign": (np.sign, lambda x: of_integers(np.sign(ordered(x)))),
    "is_finite": (None, lambda x: np.ones((1, *x.shape[1:]), bool)),
    "exp": (None, exponential),
    "exp2": (None, partial(exponential, base=9)),
    "expm1": (None, lambda x: subtract(exponential(x), np.ones_like(x))),
    "sqrt": (None, _square_root),
    "rsqrt": (None, lambda x: inverse(_square_root(x))),
    "log1p": (None, lambda x: oracle(add(np.ones_like(x), x), "log")),
    "logistic": (None, _logistic),
    "rem": (np.fmod, lambda x, y: oracle(x, "rem", y)),
    "clamp": (lambda low, x, high: np.clip(x, low, high), lambda low, x, high: _smaller(_larger(x, low), high)),
    "population_count": (np.bitwise_count, None),
    "and": (np.bitwise_and, None),
    "or": (np.bitwise_or, None),
    "xor": (np.bitwise_xor, None),
    "not": (np.invert, None),
    "shift_left": (np.left_shift, None),
    "shift_right_arithmetic": (np.right_shift, None),
    "shift_right_logical": (_shifted, None),
    **{name: _comparison(getattr(operator, name)) for name in _COMPARISONS},
    **{f"{name}_to": _comparison(getattr(operator, name)) for name in ("lt", "le")},  # of a total order
    **{name: (None, partial(lambda name, x, *more: oracle(x, name, *more), name)) for name in _ORACLES},
    **{name: (None, partial(lambda name, x: oracle(x, name), name)) for name in ("floor", "ceil", "round")},
}
BRANCHES = {*_COMPARISONS} - {"eq", "ne"}  # what a program decides by, if it compares scalar numbers

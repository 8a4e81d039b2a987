"""Numbers that are never rounded: an element of three finite fields in place of every float.

A number is (a mod P₀, b mod P₁, c mod P₂), with primes P₀ = 2 P₁ + 1 and P₁ = 2 P₂ + 1. Sums, products and quotients
are the fields', so they are equal in any order. exp(a, b, c) is (4^b mod P₀, 4^c mod P₁, 1): 4 has the order P₁ in the
first field and P₂ in the second, hence exp(x + y) = exp(x) exp(y), as a softmax in parts needs. Other functions are
random oracles (`oracle`). The lowest float and -inf stand for themselves.
"""

import contextlib
import functools
import math
import zlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np

Value = np.ndarray
"""What devices have of a variable: [fields of a float, else 1, devices or 1 if it is the same on all, *shape]."""

PRIMES = np.array([2147454839, 1073727419, 536863709])
LOWEST = -1  # in place of -inf and of the lowest float
_NOT_FINITE = 0.7310585786  # in place of inf and NaN
_SEED: ContextVar[int] = ContextVar("seed", default=0)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Oracles in this context are those of a seed."""
    token = _SEED.set(seed)
    try:
        yield
    finally:
        _SEED.reset(token)


def is_float(dtype: Any) -> bool:
    """Whether values of this dtype are numbers of the fields."""
    return jnp.issubdtype(dtype, jnp.floating)


def modulo(x: Value) -> Value:
    """Integers as elements of the fields."""
    return x % _primes(x)


def _primes(x: Value) -> np.ndarray:
    return PRIMES.reshape(-1, *[1] * (x.ndim - 1))


def dense(function: Callable[..., Value]) -> Callable[..., Value]:
    """Compute a function of each number without repeating what was broadcast."""

    def call(x: Value, *more: Any) -> Value:
        out = function(x[tuple(slice(0, 1) if step == 0 else slice(None) for step in x.strides)], *more)
        return np.broadcast_to(out, (len(out), *x.shape[1:]))

    return call


def add(x: Value, y: Value) -> Value:
    """The sum; the lowest number is one with any other."""
    return _with_lowest(modulo(x + y), x, y)


def subtract(x: Value, y: Value) -> Value:
    """The difference; the lowest number is one with any other."""
    return _with_lowest(modulo(x - y), x, y)


def multiply(x: Value, y: Value) -> Value:
    """The product; the lowest number is one with any other than zero."""
    return _with_lowest(modulo(x * y), x, y, (x[:1] != 0) & (y[:1] != 0))


def _with_lowest(out: Value, x: Value, y: Value, there: Any = True) -> Value:
    low = (x[:1] < 0) | (y[:1] < 0)
    return np.where(low & there, LOWEST, out) if low.any() else out


@dense
def inverse(x: Value) -> Value:
    """1 / x, by a tree of products; 0 of zero and of the lowest number."""
    flat = np.where(x > 0, x, 1).reshape(len(x), -1)
    found = np.stack([_inverses(row, int(prime)) for row, prime in zip(flat, PRIMES, strict=True)])
    return np.where(x > 0, found.reshape(x.shape), 0)


def _inverses(x: np.ndarray, prime: int) -> np.ndarray:
    if len(x) <= 16:
        return np.array([pow(each, -1, prime) for each in x.tolist()], np.int64)
    left, right = x[: len(x) // 2], x[len(x) // 2 : len(x) // 2 * 2]
    both = _inverses(left * right % prime, prime)
    odd = _inverses(x[len(x) // 2 * 2 :], prime)
    return np.concatenate([both * right % prime, both * left % prime, odd])


def power(x: Value, exponent: int) -> Value:
    """x to an integer."""
    out, square, rest = np.ones_like(x), x, abs(exponent)
    while rest:
        out = multiply(out, square) if rest & 1 else out
        rest >>= 1
        square = multiply(square, square) if rest else square
    return inverse(out) if exponent < 0 else out


def _powers(base: int, prime: int) -> np.ndarray:
    """base^n, for 2^15 exponents n."""
    out = [1]
    for _ in range((1 << 15) - 1):
        out.append(out[-1] * base % prime)
    return np.array(out)


@functools.cache
def _tables(base: int) -> list[list[np.ndarray]]:
    """For each field except the last: base^n and base^(n 2^15)."""
    fields = PRIMES[:-1].tolist()
    return [[_powers(pow(base, 1 << shift, prime), prime) for shift in (0, 15)] for prime in fields]


@dense
def exponential(x: Value, base: int = 4) -> Value:
    """exp of x, or 2^x with another base: a homomorphism from sums to products."""
    parts = [
        large[y >> 15] * small[y & 0x7FFF] % prime
        for y, prime, (small, large) in zip(x[1:], PRIMES, _tables(base), strict=False)
    ]
    return np.where(x[:1] < 0, 0, np.stack([*parts, np.ones_like(x[0])]))


@dense
def oracle(x: Value, name: str, *more: Value) -> Value:
    """Random numbers that depend on nothing but the arguments, the name of a function and the seed."""
    z = _mixed(x[0].astype(np.uint64) + np.uint64((zlib.crc32(name.encode()) << 32) + _SEED.get()))
    for other in more:
        z = _mixed(z + other[0].astype(np.uint64))
    return np.stack([(_mixed(z + np.uint64(n)) >> np.uint64(2)).astype(np.int64) % p for n, p in enumerate(PRIMES)])


def _mixed(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def ordered(x: Value) -> Value:
    """What values are compared by: numbers by their representatives from -P₀ / 2 to P₀ / 2 in the first field."""
    if len(x) == 1:
        return x
    first, prime = x[:1], PRIMES[0]
    return np.where(first < 0, -prime, np.where(first > prime // 2, first - prime, first))


def matrix_product(x: Value, y: Value) -> Value:
    """x @ y, from exact products of doubles: 16 bits by 31, 32 terms at a time."""
    total: Any = np.zeros([len(PRIMES), *[1] * (x.ndim - 1)], np.int64)
    for first in range(0, x.shape[-1], 32):
        some, others = x[..., first : first + 32], y[..., first : first + 32, :].astype(np.float64)
        high, low = (
            np.matmul(part.astype(np.float64), others).astype(np.int64) for part in (some >> 16, some & 0xFFFF)
        )
        total = modulo(total + (modulo(high) << 16) + low)
    return total


def drawn(shape: tuple[int, ...], *key: int) -> Value:
    """Random numbers, the same on all devices, for a key and the seed."""
    rng = np.random.default_rng((_SEED.get(), *key))
    return np.stack([rng.integers(0, prime, (1, *shape)) for prime in PRIMES])


def constant(array: Any, dtype: Any) -> Value:
    """The value of an array of a program. A float is the simplest fraction that is rounded to it: 1/3, not 11184811
    2^-25."""
    array = np.asarray(array)
    if not is_float(dtype):
        return array.astype(dtype)[None, None]
    wide, where = np.unique(array.astype(np.float64), return_inverse=True)
    low = wide <= float(jnp.finfo(dtype).min)
    found = [_simplest(x, dtype) for x in np.where(np.isfinite(wide) & ~low, wide, _NOT_FINITE).tolist()]
    parts = [[x.numerator * pow(x.denominator, -1, prime) % prime for x in found] for prime in PRIMES.tolist()]
    numbers = np.where(low, LOWEST, np.array(parts, np.int64).reshape(len(PRIMES), -1))
    return numbers[:, where.reshape(array.shape)][:, None]


@functools.lru_cache(1 << 16)
def _simplest(x: float, dtype: Any) -> Fraction:
    """The first convergent of the continued fraction of x that is rounded to it."""
    rest, before, now = abs(Fraction(x)), (0, 1), (1, 0)
    while True:
        whole = math.floor(rest)
        before, now = now, (whole * now[0] + before[0], whole * now[1] + before[1])
        if np.asarray(now[0] / now[1]).astype(dtype) == np.asarray(abs(x)).astype(dtype):
            return Fraction(*now) * (-1 if x < 0 else 1)
        rest = 1 / (rest - whole)

"""Numbers that are never rounded: an element of three finite fields in place of every float.

A number is (a mod P₀, b mod P₁, c mod P₂), with primes P₀ = 2 P₁ + 1 and P₁ = 2 P₂ + 1. Sums, products and quotients
are the fields', so they are equal in any order. exp(a, b, c) is (4^b mod P₀, 4^c mod P₁, 1): 4 has the order P₁ in the
first field and P₂ in the second, hence exp(x + y) = exp(x) exp(y), as a softmax in parts needs. Other functions are
random oracles (`oracle`). The lowest float and -inf are one more number, the lowest: a sum or product with it is the
lowest, except that 0 times it is 0; its exponential and its inverse are 0.
"""

import contextlib
import functools
import itertools
import math
import zlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes

Value = np.ndarray
"""What devices have of a variable: [fields of a float, else 1, devices or 1 if it is the same on all, *shape]."""

PRIMES = np.array([2147454839, 1073727419, 536863709])
LOWEST = -(1 << 40)  # in place of -inf and of the lowest float; the only negative entries of floats
INFINITE = np.array([PRIMES[0] // 2, 784950399, 392475233])  # in place of inf and NaN: the highest in order
_SEED: ContextVar[int] = ContextVar("seed", default=0)
_UNITS = 1 << 24  # of what is ordered as it is


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Oracles in this context are those of a seed."""
    token = _SEED.set(seed)
    try:
        yield
    finally:
        _SEED.reset(token)


@functools.cache
def is_key(dtype: Any) -> bool:
    """Whether values of this dtype are keys of `jax.random`; each is one element of bytes."""
    return jnp.issubdtype(dtype, dtypes.prng_key)


@functools.cache
def is_float(dtype: Any) -> bool:
    """Whether values of this dtype are numbers of the fields."""
    return jnp.issubdtype(dtype, jnp.floating)


def modulo(x: Value) -> Value:
    """Integers as elements of the fields."""
    return x % _of_fields(PRIMES, x)


def _of_fields(numbers: np.ndarray, x: Value) -> np.ndarray:
    return numbers.reshape(-1, *[1] * (x.ndim - 1))


def dense(function: Callable[..., Value]) -> Callable[..., Value]:
    """Compute a function of each number without repeating what was broadcast."""

    def call(x: Value, *more: Any) -> Value:
        if 0 not in x.strides:
            return function(x, *more)
        out = function(x[tuple(slice(0, 1) if step == 0 else slice(None) for step in x.strides)], *more)
        return np.broadcast_to(out, np.broadcast_shapes(out.shape, (1, *x.shape[1:])))

    return call


def is_lowest(x: Value) -> Value:
    """Where the lowest number is."""
    return x[:1] < 0


def with_lowest(x: Value, low: Value) -> Value:
    """`x`, but the lowest number where `low`."""
    return np.where(low, LOWEST, x) if low.any() else x


def add(x: Value, y: Value) -> Value:
    """The sum; the lowest number is one with any other."""
    out = x + y
    return with_lowest(modulo(out), is_lowest(out))


def negative(x: Value) -> Value:
    """What gives 0 when added to x; of the lowest number, that of infinity."""
    return modulo(-_finite(x))


def subtract(x: Value, y: Value) -> Value:
    """The difference; with the lowest number before it, that."""
    return with_lowest(modulo(x - _finite(y)), is_lowest(x))


def _finite(x: Value) -> Value:
    low = is_lowest(x)
    return np.where(low, -_of_fields(INFINITE, x), x) if low.any() else x


def multiply(x: Value, y: Value) -> Value:
    """The product; the lowest number is one with any other than zero."""
    out = modulo(x * y)
    if not is_lowest(x[:1] | y[:1]).any():
        return out
    return with_lowest(out, is_lowest(x) & (y[:1] != 0) | is_lowest(y) & (x[:1] != 0))


@dense
def inverse(x: Value) -> Value:
    """1 / x, by a tree of products; of the lowest number 0, of zero the number of infinity."""
    found = _inverses(np.where(x > 0, x, 1).reshape(len(x), -1)).reshape(x.shape)
    return np.where(x > 0, found, np.where(x < 0, 0, _of_fields(INFINITE, x)))


def _inverses(x: np.ndarray) -> np.ndarray:
    if x.shape[1] <= 4:
        rows = zip(x.tolist(), PRIMES.tolist(), strict=True)
        return np.array([[pow(each, -1, prime) for each in row] for row, prime in rows], np.int64)
    half = x.shape[1] // 2
    left, right = x[:, :half], x[:, half : 2 * half]
    both = _inverses(modulo(left * right))
    return np.concatenate([modulo(both * right), modulo(both * left), _inverses(x[:, 2 * half :])], 1)


def power(x: Value, exponent: Any) -> Value:
    """x to an integer, or to each of some integers."""
    out, square, rest = np.ones_like(x), x, np.abs(exponent)
    while np.any(rest):
        out = np.where(rest & 1, multiply(out, square), out)
        rest, square = rest >> 1, multiply(square, square)
    return np.where(np.less(exponent, 0), inverse(out), out) if np.any(np.less(exponent, 0)) else out


@functools.cache
def _powers(base: int, prime: int) -> np.ndarray:
    """base^n, for 2^15 exponents n."""
    return np.array([*itertools.accumulate(range((1 << 15) - 1), lambda x, _: x * base % prime, initial=1)])


@dense
def exponential(x: Value, base: int = 4) -> Value:
    """exp of x, or 2^x with another base: a homomorphism from sums to products."""
    parts = [
        _powers(pow(base, 1 << 15, prime), prime)[y >> 15 & 0x7FFF] * _powers(base, prime)[y & 0x7FFF] % prime
        for y, prime in zip(x[1:], PRIMES.tolist(), strict=False)
    ]
    return np.where(is_lowest(x), 0, np.stack([*parts, np.ones_like(x[0])]))


@dense
def oracle(x: Value, name: str, *more: Value) -> Value:
    """Random numbers that depend on nothing but the arguments, the name of a function and the seed."""
    z = _mixed(np.array([_SEED.get()], np.uint64)) + np.uint64(zlib.crc32(name.encode()) << 32)
    for each in (x, *more):
        z = _mixed(z + each[0].astype(np.uint64))
    return np.stack([(_mixed(z + np.uint64(n)) >> np.uint64(2)).astype(np.int64) % p for n, p in enumerate(PRIMES)])


def _mixed(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def signed(x: Value, primes: Any) -> Value:
    """Representatives from -prime / 2 to prime / 2."""
    return np.where(x > primes // 2, x - primes, x)


@dense
def ordered(x: Value) -> Value:
    """What values are compared by: constants and other multiples of 2^-24 below 2^36 as they are, other numbers by
    their representatives in the first field, between the lowest and infinity."""
    if len(x) == 1:
        return x
    first, second, third = (part[None] for part in x * _UNITS % _of_fields(PRIMES, x))
    p, q, r = PRIMES.tolist()
    units = signed(first + p * ((second - first) * pow(p, -1, q) % q), p * q)
    others = signed(x[:1], p) << 29
    out = np.where(units % r == third, units, others)
    infinite = (x == _of_fields(INFINITE, x)).all(0, keepdims=True)
    return np.where(is_lowest(x), LOWEST << 22, np.where(infinite, 1 << 62, out))


def whole(x: Value) -> tuple[Value, Value]:
    """The integers that numbers are, and which of them are small ones, exact in a float."""
    every = signed(x, _of_fields(PRIMES, x))
    first = every[:1]
    return first, (every == first).all(0, keepdims=True) & (abs(first) <= 1 << 24)


def matrix_product(x: Value, y: Value) -> Value:
    """x @ y, from exact products of doubles, if these are more than 4: 16 bits by 31, 32 terms at a time. Of their sums
    1,024 are below 2^63. For larger matrices BLAS would use threads, which wait for each other longer than they
    compute."""
    low, low_y = is_lowest(x), is_lowest(y)
    if low.any() or low_y.any():
        there = np.matmul(low, y[:1] != 0) | np.matmul(x[:1] != 0, low_y)
        return with_lowest(matrix_product(np.where(low, 0, x), np.where(low_y, 0, y)), there)
    if x.shape[-1] <= 4:  # a sum is below 2^64
        primes = _of_fields(PRIMES, x).view(np.uint64)
        return (x.view(np.uint64) @ y.view(np.uint64) % primes).view(np.int64)
    shape = *np.broadcast_shapes(x.shape[:-2], y.shape[:-2]), x.shape[-2], y.shape[-1]
    halves, doubles = [each.astype(np.float64) for each in (x >> 16, x & 0xFFFF)], y.astype(np.float64)
    primes, out = _of_fields(PRIMES, x).astype(np.float64), np.zeros(shape, np.int64)
    rows = 8192 // (shape[-1] or 1) + 1
    for row, term in itertools.product(range(0, shape[-2], rows), range(0, x.shape[-1], 32)):
        high, rest = (
            each[..., row : row + rows, term : term + 32] @ doubles[..., term : term + 32, :] for each in halves
        )
        high -= np.rint(high / primes) * primes
        total = out[..., row : row + rows, :]
        total += (high * 65536 + rest).astype(np.int64)
        if term // 32 % 1024 == 1023:
            total[...] = modulo(total)
    return modulo(out)


def drawn(shape: tuple[int, ...], *key: int) -> Value:
    """Random numbers, the same on all devices, for a key and the seed."""
    rng = np.random.default_rng((_SEED.get(), *key))
    return np.stack([rng.integers(0, prime, (1, *shape)) for prime in PRIMES])


def constant(array: Any, dtype: Any, simplest: bool = True) -> Value:
    """The value of an array of a program. A float is the simplest fraction that is rounded to it: 1/3, not 11184811
    2^-25; or just itself."""
    if is_key(dtype):
        words = np.asarray(jax.random.key_data(array))
        return words.view(f"V{4 * words.shape[-1]}")[None, None, ..., 0]
    array = np.asarray(array).astype(dtype)  # some versions of JAX have doubles in place of it
    if not is_float(dtype):
        return array[None, None]
    wide, where = np.unique(array.astype(np.float64), return_inverse=True)
    finite = np.where(np.isfinite(wide), wide, 0).tolist()
    found = [_simplest(x, dtype) if simplest else Fraction(x) for x in finite]
    parts = [[x.numerator * pow(x.denominator, -1, prime) % prime for x in found] for prime in PRIMES.tolist()]
    numbers = np.where(np.isfinite(wide), np.array(parts, np.int64).reshape(len(PRIMES), -1), INFINITE[:, None])
    least = -math.inf if np.dtype(dtype).itemsize == 1 else float(jnp.finfo(dtype).min)  # one byte: the lowest is usual
    return np.where(wide <= least, LOWEST, numbers)[:, where.reshape(array.shape)][:, None]


@functools.lru_cache(1 << 16)
def _simplest(x: float, dtype: Any) -> Fraction:
    """The first convergent of the continued fraction of x that is rounded to it and whose denominator has inverses."""
    rest, before, now = abs(Fraction(x)), (0, 1), (1, 0)
    while True:
        whole = math.floor(rest)
        before, now = now, (whole * now[0] + before[0], whole * now[1] + before[1])
        near = np.asarray(now[0] / now[1]).astype(dtype) == np.asarray(abs(x)).astype(dtype)
        if near and all(now[1] % prime for prime in PRIMES.tolist()):
            return Fraction(*now) * (-1 if x < 0 else 1)
        rest = 1 / (rest - whole)

"""Numbers that are never rounded: an element of finite fields in place of every float, and beside it an estimate.

A number is (a mod P₀, b mod P₁, c mod P₂, …) with primes P₀ = 2 P₁ + 1, P₁ = 2 P₂ + 1 and so on. Sums, products and
quotients are the fields', so they are equal in any order. exp(a, b, c) is (4^b mod P₀, 4^c mod P₁, 1): 4 has the order
P₁ in the first field and P₂ in the second, hence exp(x + y) = exp(x) exp(y), as a softmax in parts needs. Every nested
exponential takes one field; `levels` says how many there are. Other functions are random oracles (`oracle`).

The estimate is a double that is computed as usual. It decides what has an order: comparisons, maxima, signs, integer
parts. Numbers are equal if their elements are. The lowest float and -inf are one more number, the lowest: a sum or
product with it is the lowest, except that 0 times it is 0; its exponential and its inverse are 0.
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
"""What devices have of a variable: [rows of a float, else 1, devices or 1 if it is the same on all, *shape]. A float's
rows are its elements and the bits of its estimate."""

PRIMES = np.array([1845993599, 922996799, 461498399, 230749199, 115374599, 57687299, 28843649])
LOWEST = -(1 << 40)  # in place of -inf and of the lowest float; the only negative elements
INFINITE = np.array([pow(5, 123456, prime) for prime in PRIMES.tolist()])  # in place of inf and NaN
_LN2 = Fraction(math.log(2)).limit_denominator(1 << 24)
_CONTEXT: ContextVar[tuple[int, float, int, float]] = ContextVar("context", default=(0, 1.0, 3, -math.inf))


@contextlib.contextmanager
def seeded(seed: int, scale: float = 1.0, levels: int = 3, underflow: float = -math.inf) -> Iterator[None]:
    """Oracles and random numbers in this context are those of a seed; estimates of random numbers have about this
    scale; numbers have as many elements as `levels`; exponentials of `underflow` and less are 0."""
    token = _CONTEXT.set((seed, scale, levels, underflow))
    try:
        yield
    finally:
        _CONTEXT.reset(token)


@functools.cache
def is_key(dtype: Any) -> bool:
    """Whether values of this dtype are keys of `jax.random`; each is one element of bytes."""
    return jnp.issubdtype(dtype, dtypes.prng_key)


@functools.cache
def is_float(dtype: Any) -> bool:
    """Whether values of this dtype are numbers of the fields."""
    return jnp.issubdtype(dtype, jnp.floating)


def primes() -> np.ndarray:
    """Of the fields of this context."""
    return PRIMES[: _CONTEXT.get()[2]]


def elements(x: Value) -> np.ndarray:
    """What is exact of a value: all of an integer, all of a float but its estimate."""
    return x[:-1] if len(x) > 1 else x


def estimate(x: Value) -> np.ndarray:
    """The doubles of floats."""
    return x[-1:].view(np.float64)


def joined(exact: np.ndarray, doubles: Any) -> Value:
    """Floats of their elements and estimates."""
    bits = np.asarray(doubles, np.float64).view(np.int64)
    return np.concatenate([exact, np.broadcast_to(bits, (1, *exact.shape[1:]))])


def modulo(x: np.ndarray) -> np.ndarray:
    """Integers as elements of the fields."""
    return x % _per_field(PRIMES, x)


def _per_field(numbers: np.ndarray, x: np.ndarray) -> np.ndarray:
    return numbers[: len(x)].reshape(-1, *[1] * (x.ndim - 1))


def dense(function: Callable[..., Value]) -> Callable[..., Value]:
    """Compute a function of each number without repeating what was broadcast."""

    def call(x: Value, *more: Any) -> Value:
        if 0 not in x.strides:
            return function(x, *more)
        out = function(x[tuple(slice(0, 1) if step == 0 else slice(None) for step in x.strides)], *more)
        return np.broadcast_to(out, np.broadcast_shapes(out.shape, (1, *x.shape[1:])))

    return call


def is_lowest(x: Value) -> np.ndarray:
    """Where the lowest number is."""
    return x[:1] < 0


def is_zero(x: Value) -> np.ndarray:
    """Where zero is."""
    return (x[:-1] == 0).all(0, keepdims=True)


def with_lowest(x: Value, low: np.ndarray) -> Value:
    """`x`, but the lowest number where `low`."""
    return np.where(low, like(LOWEST, -math.inf, x), x) if low.any() else x


def like(exact: Any, double: float, x: Value) -> Value:
    """One number of small elements, to be broadcast with x."""
    rows = np.broadcast_to(exact, len(x) - 1)
    return np.append(rows, np.float64(double).view(np.int64)).reshape(-1, *[1] * (x.ndim - 1))


def _infinite(x: Value) -> Value:
    return like(INFINITE[: len(x) - 1], math.inf, x)


def _by(function: Callable[..., Any], x: Value, y: Value) -> Value:
    """A function of elements and of estimates, before elements are reduced."""
    out = np.empty(np.broadcast_shapes(x.shape, y.shape), np.int64)
    function(x[:-1], y[:-1], out=out[:-1])
    function(estimate(x), estimate(y), out=estimate(out))
    return out


def _reduced(out: Value) -> Value:
    out[:-1] %= _per_field(PRIMES, out[:-1])
    return out


def add(x: Value, y: Value) -> Value:
    """The sum; the lowest number is one with any other."""
    out = _by(np.add, x, y)
    low = is_lowest(out)
    return with_lowest(_reduced(out), low)


def negative(x: Value) -> Value:
    """What gives 0 when added to x; of the lowest number, that of infinity."""
    return joined(modulo(-x[:-1]), -estimate(x)) if not is_lowest(x).any() else subtract(zeros(x), x)


def zeros(x: Value) -> Value:
    """As many numbers 0."""
    return np.broadcast_to(like(0, 0.0, x), x.shape)


def ones(x: Value) -> Value:
    """As many numbers 1."""
    return np.broadcast_to(like(1, 1.0, x), x.shape)


def subtract(x: Value, y: Value) -> Value:
    """The difference; with the lowest number before it, that."""
    low, low_y = is_lowest(x), is_lowest(y)
    out = _reduced(_by(np.subtract, x, y))
    out = np.where(low_y, add(np.where(low, zeros(x), x), _infinite(out)), out) if low_y.any() else out
    return with_lowest(out, low)


def multiply(x: Value, y: Value) -> Value:
    """The product; the lowest number is one with any other than zero."""
    out = _reduced(_by(np.multiply, x, y))
    lost = np.isnan(estimate(out))  # 0 times infinity
    if lost.any():
        zero = is_zero(x) | is_zero(y)
        out = np.where(lost & zero, like(0, 0.0, out), out)
        low = (is_lowest(x) | is_lowest(y)) & ~zero
        return with_lowest(out, low)
    return with_lowest(out, is_lowest(x) | is_lowest(y))


@dense
def inverse(x: Value) -> Value:
    """1 / x, by a tree of products; of the lowest number 0, of zero the number of infinity."""
    exact = x[:-1]
    found = _inverses(np.where(exact > 0, exact, 1).reshape(len(exact), -1)).reshape(exact.shape)
    out = joined(np.where(exact > 0, found, 0), 1 / estimate(x))
    zero = (exact == 0).any(0, keepdims=True)
    return np.where(zero, _infinite(x), out) if zero.any() else out


def _inverses(x: np.ndarray) -> np.ndarray:
    if x.shape[1] <= 4:
        rows = zip(x.tolist(), PRIMES.tolist(), strict=False)
        return np.array([[pow(each, -1, prime) for each in row] for row, prime in rows], np.int64)
    half = x.shape[1] // 2
    left, right = x[:, :half], x[:, half : 2 * half]
    both = _inverses(modulo(left * right))
    return np.concatenate([modulo(both * right), modulo(both * left), _inverses(x[:, 2 * half :])], 1)


def power(x: Value, exponent: Any) -> Value:
    """x to an integer, or to each of some integers."""
    out, square, rest = ones(x), x, np.abs(exponent)
    while np.any(rest):
        out = np.where(rest & 1, multiply(out, square), out)
        rest, square = rest >> 1, multiply(square, square)
    return np.where(np.less(exponent, 0), inverse(out), out) if np.any(np.less(exponent, 0)) else out


@functools.cache
def _powers(base: int, prime: int) -> np.ndarray:
    """base^n, for 2^15 exponents n."""
    return np.array([*itertools.accumulate(range((1 << 15) - 1), lambda x, _: x * base % prime, initial=1)])


@dense
def exponential(x: Value) -> Value:
    """exp of x: a homomorphism from sums to products, and 0 where x is very low."""
    parts = [
        _powers(pow(4, 1 << 15, prime), prime)[y >> 15 & 0x7FFF] * _powers(4, prime)[y & 0x7FFF] % prime
        for y, prime in zip(x[1:-1], PRIMES.tolist(), strict=False)
    ]
    out = joined(np.stack([*parts, np.ones_like(x[0])]), np.exp(estimate(x)))
    low = estimate(x) <= _CONTEXT.get()[3]
    return np.where(low, like(0, 0.0, x), out) if low.any() else out


@dense
def oracle(x: Value, name: str, *more: Value) -> np.ndarray:
    """Random elements that depend on nothing but the arguments, the name of a function and the seed."""
    z = _mixed(np.array([_CONTEXT.get()[0]], np.uint64)) + np.uint64(zlib.crc32(name.encode()) << 32)
    for each in (x, *more):
        z = _mixed(z + each[0].astype(np.uint64))
    primes = enumerate(PRIMES[: len(x) - 1])
    return np.stack([(_mixed(z + np.uint64(n)) >> np.uint64(2)).astype(np.int64) % p for n, p in primes])


def _mixed(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def signed(x: np.ndarray, primes: Any) -> np.ndarray:
    """Representatives from -prime / 2 to prime / 2."""
    return np.where(x > primes // 2, x - primes, x)


@dense
def ordered(x: Value) -> np.ndarray:
    """What values are compared by: estimates without their last 12 bits, in which equal numbers may differ. Numbers
    whose estimate is none, such as a root of a negative one, have their representatives in the first field."""
    if len(x) == 1:
        return x
    out = (x[-1:] + 0x800 & ~0xFFF).view(np.float64)
    out = np.where(is_zero(x), 0.0, out)
    return np.where(np.isnan(out), signed(x[:1], PRIMES[0]) / 256, out) if np.isnan(out).any() else out


def whole(x: Value) -> tuple[np.ndarray, np.ndarray]:
    """The integers that numbers are, and which of them are small ones, exact in a float."""
    every = signed(x[:-1], _per_field(PRIMES, x[:-1]))
    first = every[:1]
    return first, (every == first).all(0, keepdims=True) & (abs(first) <= 1 << 24)


def matrix_product(x: Value, y: Value) -> Value:
    """x @ y, from exact products of doubles, if these are more than 4: 16 bits by 31, 32 terms at a time. Of their sums
    1,024 are below 2^63. For larger matrices BLAS would use threads, which wait for each other longer than they
    compute."""
    low, low_y = is_lowest(x), is_lowest(y)
    if low.any() or low_y.any():
        there = np.matmul(low, y[:1] != 0) | np.matmul(x[:1] != 0, low_y)
        return with_lowest(matrix_product(np.where(low, zeros(x), x), np.where(low_y, zeros(y), y)), there)
    return joined(_elements_product(x[:-1], y[:-1]), np.matmul(estimate(x), estimate(y)))


def _elements_product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if x.shape[-1] <= 4:  # a sum is below 2^64
        primes = _per_field(PRIMES, x).view(np.uint64)
        return (x.view(np.uint64) @ y.view(np.uint64) % primes).view(np.int64)
    shape = *np.broadcast_shapes(x.shape[:-2], y.shape[:-2]), x.shape[-2], y.shape[-1]
    halves, doubles = [each.astype(np.float64) for each in (x >> 16, x & 0xFFFF)], y.astype(np.float64)
    primes, out = _per_field(PRIMES, x).astype(np.float64), np.zeros(shape, np.int64)
    rows = 8192 // (shape[-1] or 1) + 1
    for row, term in itertools.product(range(0, shape[-2], rows), range(0, x.shape[-1], 32)):
        high, rest = (
            half[..., row : row + rows, term : term + 32] @ doubles[..., term : term + 32, :] for half in halves
        )
        high -= np.rint(high / primes) * primes
        total = out[..., row : row + rows, :]
        total += (high * 65536 + rest).astype(np.int64)
        if term // 32 % 1024 == 1023:
            total[...] = modulo(total)
    return modulo(out)


def drawn(shape: tuple[int, ...], *key: int) -> Value:
    """Random numbers, the same on all devices, for a key and the seed. Estimates have either sign and are 1/8 to 8."""
    seed, scale, *_ = _CONTEXT.get()
    rng = np.random.default_rng((seed, *key))
    exact = np.stack([rng.integers(0, prime, (1, *shape)) for prime in primes()])
    sizes = rng.uniform(-3, 3, exact[:1].shape)
    return joined(exact, rng.choice([-scale, scale], sizes.shape) * 2**sizes)


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
    parts = [[x.numerator * pow(x.denominator, -1, prime) % prime for x in found] for prime in primes().tolist()]
    exact = np.where(np.isfinite(wide), np.array(parts, np.int64).reshape(len(parts), -1), INFINITE[: len(parts), None])
    numbers = joined(exact, np.where(np.isnan(wide), np.inf, wide)[None])
    least = -math.inf if np.dtype(dtype).itemsize == 1 else float(jnp.finfo(dtype).min)  # one byte: the lowest is usual
    return with_lowest(numbers, (wide <= least)[None])[:, where.reshape(array.shape)][:, None]


@functools.lru_cache(1 << 16)
def _simplest(x: float, dtype: Any) -> Fraction:
    """The first convergent of the continued fraction of x that is rounded to it and whose denominator has inverses."""
    for size, number in ((math.log(2), _LN2), (1 / math.log(2), 1 / _LN2)):  # exp2 and log2 take these
        if np.asarray(size).astype(dtype) == np.asarray(abs(x)).astype(dtype):
            return number if x > 0 else -number
    rest, before, now = abs(Fraction(x)), (0, 1), (1, 0)
    while True:
        whole = math.floor(rest)
        before, now = now, (whole * now[0] + before[0], whole * now[1] + before[1])
        near = np.asarray(now[0] / now[1]).astype(dtype) == np.asarray(abs(x)).astype(dtype)
        if near and all(now[1] % prime for prime in PRIMES.tolist()):
            return Fraction(*now) * (-1 if x < 0 else 1)
        rest = 1 / (rest - whole)

"""Numbers of the fields: laws that they obey, and what constants and functions are."""

import itertools
import math
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from jaxequal import numbers
from jaxequal.arrays import total
from jaxequal.functions import converted
from jaxequal.numbers import (
    INFINITE,
    LOWEST,
    PRIMES,
    Value,
    add,
    constant,
    drawn,
    elements,
    estimate,
    exponential,
    inverse,
    matrix_product,
    multiply,
    negative,
    ones,
    oracle,
    ordered,
    power,
    seeded,
    subtract,
    with_lowest,
    zeros,
)

P = PRIMES.tolist()[:3]  # as many as there are without a need of more
FLOATS = (jnp.float64, jnp.float32, jnp.bfloat16, jnp.float16)


def of(fraction: Fraction) -> list[int]:
    return [fraction.numerator * pow(fraction.denominator, -1, prime) % prime for prime in P]


def number(x: object, dtype: object = np.float64) -> Value:
    return constant(np.asarray(x, dtype), dtype)


def same(x: Value, y: Value) -> None:
    """Of equal elements; of estimates that are nearly equal."""
    np.testing.assert_array_equal(elements(x), elements(y))
    np.testing.assert_allclose(*(np.broadcast_to(estimate(each), estimate(x + y).shape) for each in (x, y)), rtol=1e-9)


def is_prime(n: int) -> bool:
    return all(n % factor for factor in range(2, int(n**0.5) + 1))


def test_a_field_s_order_leads_to_the_next() -> None:
    """Else exp would be no homomorphism, or not injective."""
    every = PRIMES.tolist()
    assert all(is_prime(prime) for prime in every) and every[0] < 2**31
    assert [2 * small + 1 for small in every[1:]] == every[:-1]
    assert all(pow(4, small, large) == 1 for large, small in itertools.pairwise(every))
    assert (INFINITE < PRIMES).all() and (INFINITE > 0).all()


X, Y, Z = (drawn((50,), key) for key in range(3))
LOW = with_lowest(X, np.ones((1, 1, 50), bool))


def test_the_laws_of_fields() -> None:
    same(add(add(X, Y), Z), add(X, add(Z, Y)))
    same(multiply(X, add(Y, Z)), add(multiply(X, Y), multiply(X, Z)))
    same(subtract(X, Y), add(X, negative(Y)))
    same(multiply(X, inverse(X)), ones(X))
    same(inverse(X), np.concatenate([inverse(X[:, :, :7]), inverse(X[:, :, 7:])], 2))
    same(power(X, -3), inverse(multiply(X, multiply(X, X))))
    for each in map(elements, (X, add(X, Y), multiply(X, Y))):
        assert ((each >= 0) & (each < PRIMES[:3, None, None])).all()


@pytest.mark.parametrize(("rows", "terms", "columns"), [(300, 70, 40), (3, 4, 9000), (2, 5, 3), (1, 70_000, 2)])
def test_products_of_matrices(rows: int, terms: int, columns: int) -> None:
    """The largest numbers among them, and more than fit into a block."""
    x = negative(ones(np.zeros((4, 1, rows, terms), int)))
    y = np.concatenate(
        [x[:, :, :1, :1].repeat(terms, 2).repeat(columns - 1, 3), number(np.arange(terms))[..., None]], 3
    )
    expected = np.full((rows, columns), terms)
    expected[:, -1] = -np.arange(terms).sum()
    same(matrix_product(x, y), number(expected))


def test_exp_is_a_homomorphism() -> None:
    same(exponential(add(X, Y)), multiply(exponential(X), exponential(Y)))
    same(exponential(zeros(X)), ones(X))
    assert len(np.unique(exponential(X)[0])) == len(np.unique(exponential(X)[1])) == 50  # it keeps what differs
    same(exponential(LOW), zeros(LOW))
    with seeded(0, underflow=-5000):
        for low in (LOW, number(-1e4), number(-1e30)):  # as masks have
            same(exponential(low), zeros(low))


def test_two_nested_exponentials_see_what_is_wrong_in_the_last_field_alone() -> None:
    wrong = add(X, np.array([0, 0, 1, 0])[:, None, None])
    with np.errstate(over="ignore"):
        once, twice = (
            exponential(each) != exponential(other)
            for each, other in [(X, wrong), (exponential(X), exponential(wrong))]
        )
    assert once[1].all() and twice[0].all()


def test_oracles_depend_on_the_number_the_name_and_the_seed_alone() -> None:
    first = oracle(X, "tanh")
    np.testing.assert_array_equal(first[:, :, 3:9], oracle(X[:, :, 3:9].copy(), "tanh"))
    np.testing.assert_array_equal(first, oracle(np.broadcast_to(X, (4, 4, 50)), "tanh")[:, :1])
    pair = oracle(X, "atan2", Y)
    np.testing.assert_array_equal(pair, oracle(X, "atan2", np.broadcast_to(Y, (4, 8, 50)))[:, 5:6])
    with seeded(1):
        seed = oracle(X, "tanh")
        shifted = oracle(subtract(X, ones(X)), "tanh")
    others = [oracle(X, "erf"), oracle(Y, "tanh"), seed, shifted, pair, oracle(Y, "atan2", X)]
    assert all((first != other).mean() > 0.99 for other in others)
    assert ((first >= 0) & (first < PRIMES[:3, None, None])).all()


def test_random_numbers_are_of_a_key_and_a_seed() -> None:
    np.testing.assert_array_equal(X, drawn((50,), 0))
    with seeded(1):
        assert not np.array_equal(X, drawn((50,), 0))


def test_the_order_is_that_of_small_integers_and_total() -> None:
    some = number([-np.inf, -5, -1, 0, 2, 7, np.inf])
    assert (np.diff(ordered(some)[0, 0]) > 0).all()
    assert len(np.unique(ordered(X))) == 50 and (ordered(X) < ordered(number(np.inf))[0, 0]).all()


def test_the_lowest_number_absorbs() -> None:
    low, zero = LOW, zeros(X)
    with np.errstate(invalid="ignore"):  # as in the interpreter
        sums = add(low, X), add(X, low), add(low, low), subtract(low, X), subtract(low, low), multiply(X, low)
    for found in sums:
        same(found, low)
    with np.errstate(invalid="ignore"):
        same(multiply(low, zero), zero)
    same(inverse(low), zero)
    mixed = np.concatenate([X, low, Y], 2)
    same(total(mixed, (2,), np.float32), low[:, :, 0])
    with np.errstate(divide="ignore"):
        others = negative(low), subtract(X, low), inverse(zero)
    for found in others:  # infinity is no reason to be equal
        assert (found != LOWEST).all() and (elements(found) != 0).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "fraction", [Fraction(1, 3), Fraction(-2, 7), Fraction(1, 10), Fraction(5, 8), Fraction(-96), Fraction(1, 300)]
)
def test_a_fraction_is_the_same_number_in_every_precision(fraction: Fraction, dtype: object) -> None:
    found = number(float(fraction), dtype)
    assert elements(found).ravel().tolist() == of(fraction)
    np.testing.assert_array_equal(constant(float(fraction), dtype), found)  # a double that is not rounded yet
    back = multiply(found, number(fraction.denominator))
    np.testing.assert_array_equal(elements(back), elements(number(fraction.numerator)))


@pytest.mark.parametrize(
    ("x", "dtype"),
    [
        *((x, np.float64) for x in (1e300, 1.7976931348623157e308, 2.0**-1074, 3 * 2.0**-1073)),
        *((x, np.float32) for x in (np.float32(1e30), np.float32(2.0**-149), np.float32(-(2.0**-126)))),
        (2.0**-133, jnp.bfloat16),
    ],
)
def test_huge_and_tiny_constants(x: float, dtype: object) -> None:
    """Those with few digits are exact."""
    value = number(x, dtype)
    exact = Fraction(float(np.asarray(x, dtype).astype(np.float64)))
    assert exact.numerator == 1 or elements(value).ravel().tolist() == of(exact) or abs(exact) < 1e-300


def test_infinity_is_one_number_and_the_lowest_float_is_minus_infinity() -> None:
    for dtype in FLOATS:
        lowest = float(jnp.finfo(dtype).min)
        found = number([np.inf, np.nan, -np.inf, lowest, -lowest], dtype)
        same(found[:, 0, :4], number([np.inf, np.nan, -np.inf, -np.inf])[:, 0])
        assert (found[:, 0, 0] != found[:, 0, 4]).all()
    assert elements(number(-448, jnp.float8_e4m3fn)).ravel().tolist() == of(Fraction(-448))


def test_a_denominator_that_is_a_prime_of_the_fields_has_an_inverse() -> None:
    found = number(1 / P[1])
    assert ((elements(found) > 0) & (elements(found) < PRIMES[:3, None])).all()


@hypothesis.given(st.lists(st.integers(-(2**24), 2**24), min_size=1, max_size=9))
def test_integers_in_floats_come_back(integers: list[int]) -> None:
    x = np.array(integers, np.int32)
    value = constant(x, x.dtype)
    np.testing.assert_array_equal(converted(converted(value, np.int32, np.float32), np.float32, np.int32), value)
    np.testing.assert_array_equal(converted(value, np.int32, np.float64), number(integers))


def test_other_floats_are_cut_off() -> None:
    x = np.array([2.75, -2.75, 3e9, -1e30, np.inf, 0.5])
    assert converted(number(x), np.float64, np.int32).ravel().tolist() == [2, -2, 2**31 - 1, -(2**31), 2**31 - 1, 0]
    assert converted(number(x), np.float64, bool).all()


def test_ln_2_has_one_number() -> None:
    """exp2 is exp of a multiple, which programs give it."""
    of_e = {dtype: constant(1 / math.log(2), dtype) for dtype in FLOATS}
    for dtype, each in of_e.items():
        same(multiply(each, constant(math.log(2), dtype)), number(1)) if dtype == np.float64 else None
        np.testing.assert_array_equal(elements(each), elements(of_e[jnp.float64]))


def test_arrays_of_constants() -> None:
    x = np.array([[1 / 3, -2.5], [1e-7, -np.inf]])
    np.testing.assert_array_equal(number(x), np.stack([np.stack([number(each) for each in row], -1) for row in x], 2))
    assert number(np.zeros((0, 2))).shape == (4, 1, 0, 2)
    assert constant(np.array([True]), bool).dtype == bool and numbers.is_float(jnp.bfloat16)

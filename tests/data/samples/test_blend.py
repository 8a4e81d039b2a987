"""The shares of a blend at every moment, and that its order is a function of weights and number alone."""

import zlib
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.data.samples.blend import _BLOCK, Blend, JoinedSamples
from megajax.data.samples.gpt import EvaluationSamples
from megajax.data.text.tokens import TokenDocuments


def check(weights: list[float], places: list[tuple[int, int]]) -> None:
    """Every source's samples in order, and its share kept to less than a sample after each."""
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [float(weight / sum(exact)) for weight in exact]
    sources = np.array([source for source, _ in places])
    n = np.arange(1, len(places) + 1)
    for source, share in enumerate(shares):
        given = np.cumsum(sources == source)
        assert np.abs(given - share * n).max() < 1 + 1e-9 * len(places)
        own = [number for found, number in places if found == source]
        assert own == list(range(len(own)))


@given(st.lists(st.integers(1, 2000).map(lambda n: n / 1000), min_size=1, max_size=9))
def test_shares_are_kept_to_less_than_a_sample(weights):
    blend = Blend(weights)
    check(weights, [blend.place(number) for number in range(600)])


@pytest.mark.parametrize(
    "weights",
    [
        [0.5, 0.3, 0.2],
        [1.0],
        [1, 1, 1],
        [5, 4, 3, 2, 1, 1, 1, 1],
        [0.9, *[0.01] * 10],
        [1 / 3, 2 / 3],
        [0.123456789, 3.1415926, 1e-4, 12345.678],
        [1e-3, 1.0],
    ],
    ids=str,
)
def test_shares_over_many_samples(weights):
    blend = Blend(weights)
    check(weights, [blend.place(number) for number in range(3 * _BLOCK + 17)])
    if weights == [0.5, 0.3, 0.2]:  # exact after a period
        assert blend.period == 10 and blend.shares == weights
        source, own = blend.place(3)
        assert blend.place(10**12 + 3) == (source, 10**11 * [5, 3, 2][source] + own)


@given(st.lists(st.floats(-4, 0).map(lambda power: 10**power), min_size=1, max_size=7), st.data())
@settings(max_examples=40)
def test_a_place_is_found_without_those_before_it(weights, data):
    """As if all from the first on had been placed."""
    blend, before = Blend(weights), [0] * len(weights)
    slots = sorted(data.draw(st.lists(st.integers(0, min(3000, blend.period - 1)), min_size=1, max_size=4)))
    for start, slot in zip([0, *slots], slots, strict=False):
        before = blend._after(before, start, slot)
        assert blend._before(slot) == before


def test_a_late_place_takes_no_longer():
    """Of sources of any size."""
    tokens = [812345678901, 123456789012, 45678901234, 9876543210, 321098765]
    for counts in (tokens, [10**12, 1001], [*tokens, 77]):
        blend = Blend([count / sum(counts) for count in counts])
        number = 3 * 10**15 + 7
        source, own = blend.place(number)
        before = blend.before(number)
        assert before[source] == own and sum(before) == number
        exact = zip(before, blend._counts, strict=True)
        assert all(abs(n * blend.period - number * count) < blend.period for n, count in exact)


@pytest.mark.parametrize(
    ("weights", "digest"), [([0.123456789, 3.1415926, 1e-4, 12345.678], 2184025810), ([5, 4, 3, 2, 1, 1], 2224585282)]
)
def test_the_order_stays_that_of_earlier_runs(weights, digest):
    """Computed when all places were found from the first one on."""
    blend = Blend(weights)
    places = [blend.place(number) for number in [*range(2000), *range(123_000, 123_300)]]
    assert zlib.crc32(str(places).encode()) == digest


def test_any_order_of_asking_from_any_thread():
    weights = [0.123456789, 0.3, 0.0777]
    straight = Blend(weights)
    expected = [straight.place(number) for number in range(3 * _BLOCK)]
    numbers = np.random.default_rng(0).permutation(3 * _BLOCK).tolist()
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(Blend(weights).place, numbers))
    assert found == [expected[number] for number in numbers]


def test_joined_samples_mix_their_parts():
    documents = [TokenDocuments.from_sequences([[np.arange(4 * n + 1, dtype=np.int32) + 100 * n]], "") for n in (3, 9)]
    parts = [EvaluationSamples(tokens, sequence_length=4) for tokens in documents]
    joined = JoinedSamples(parts)
    found = [joined[number]["tokens"].tolist() for number in range(len(joined))]
    expected = [part[number]["tokens"].tolist() for part in parts for number in range(len(part))]
    assert len(found) == 12 and sorted(found) == sorted(expected)
    assert [sum(tokens[0] < 900 for tokens in found[:count]) for count in (4, 8, 12)] == [1, 2, 3]
    assert sum(map(len, joined.documents())) == 13 + 37

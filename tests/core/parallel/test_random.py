"""Dropout masks depend on global coordinates only and look random along each of them; keys depend on names only."""

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tiny import full, hash_of

from megajax.core.mesh import make_mesh
from megajax.core.parallel.collectives import axis_index
from megajax.core.parallel.random import Dropout, NamedKey, RandomBits

# A grid of small coordinates, in the order in which they are folded in; the last one is a feature, or a key position.
SIZES = {"seed": 2, "step": 3, "sample": 4, "layer": 4, "site": 3, "head": 4, "token": 12, "last": 32}
AXES = list(SIZES)


@cache
def bits(shift: tuple[int, ...] = (0,) * 8, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Bits of the grid moved by `shift`, its coordinates taken in another order."""
    grid = [np.arange(size, dtype=np.int32) + 1 + move for size, move in zip(SIZES.values(), shift, strict=True)]
    grid = np.meshgrid(*grid, indexing="ij", sparse=True)
    return np.asarray(jnp.broadcast_to(hash_of(*(grid[i] for i in order)), tuple(SIZES.values())))


def chi_square(counts: np.ndarray) -> float:
    """How many standard deviations the statistic of equally probable cells is above its mean."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return (((counts - expected) ** 2).sum() / expected - freedom) / (2 * freedom) ** 0.5


def assert_independent(first: np.ndarray, second: np.ndarray, what) -> None:
    """The leading 4 bits of the two arrays, as pairs, fill their 256 cells evenly."""
    cells = (first >> np.uint32(28)) * np.uint32(16) + (second >> np.uint32(28))
    deviation = chi_square(np.bincount(cells.ravel(), minlength=256))
    assert deviation < 6, (what, deviation)


def shifted(*moves: tuple[str, int]) -> tuple[int, ...]:
    return tuple(dict(moves).get(axis, 0) for axis in AXES)


@pytest.mark.parametrize("lowest", [0, 8, 16, 24])
def test_every_byte_is_uniform(lowest):
    """Each of the four bytes of the bits takes its 256 values equally often."""
    values = (bits() >> np.uint32(lowest)) & np.uint32(255)
    assert abs(chi_square(np.bincount(values.ravel(), minlength=256))) < 6


@pytest.mark.parametrize("axis", AXES)
def test_neighbours_are_independent(axis):
    """Bits at coordinates 1, 2, 4, … 1024 apart along any axis have nothing to do with each other."""
    for distance in 2 ** np.arange(11):
        assert_independent(bits(), bits(shifted((axis, int(distance)))), distance)


PAIRS = list(itertools.combinations(AXES, 2))


@pytest.mark.parametrize("pair", [pair if number % 4 == 0 else full(pair) for number, pair in enumerate(PAIRS)])
def test_coordinates_do_not_add_up(pair):
    """One step along two axes at once, up both or up one and down the other, gives other bits."""
    for other in (1, -1):
        assert_independent(bits(), bits(shifted((pair[0], 1), (pair[1], other))), other)


@pytest.mark.parametrize("first", range(7))
def test_coordinates_are_not_exchangeable(first):
    order = list(range(8))
    order[first], order[first + 1] = first + 1, first
    size = min(list(SIZES.values())[first : first + 2])
    here = np.moveaxis(bits(), (first, first + 1), (0, 1))[:size, :size]
    there = np.moveaxis(bits(order=tuple(order)), (first, first + 1), (0, 1))[:size, :size]
    different = ~np.eye(size, dtype=bool)
    assert_independent(here[different], there[different], first)


@pytest.mark.parametrize("half", ["a", "b"])
def test_every_bit_of_a_state_decides_every_bit_of_the_next(half):
    """Flipping any of its 32 bits flips any bit of the next state in half of the cases, between 0.45 and 0.55."""
    a, b = np.random.default_rng(0).integers(0, 2**32, (2, 2**13), np.uint32)
    following = jax.jit(lambda a, b: getattr(RandomBits(a, b).fold(3), half))
    for bit in np.uint32(1) << np.arange(32, dtype=np.uint32):
        flipped = np.asarray(following(a, b) ^ following(a ^ bit, b ^ bit))
        share = ((flipped[:, None] >> np.arange(32, dtype=np.uint32)) & 1).mean(0)
        assert share.min() > 0.45 and share.max() < 0.55, (bit, share)


def test_rows_have_different_states():
    """Of 2^18 rows no two share a state, and each half of it repeats as often as chance has it (8 times)."""
    step, sample, layer, token = np.meshgrid(*(np.arange(n, dtype=np.int32) for n in (4, 16, 16, 256)), indexing="ij")
    state = jax.jit(lambda *at: RandomBits.from_seed(0).fold(at[0]).fold(at[1]).fold(at[2]).fold(at[3]))
    state = state(step, sample, layer, token)
    a, b = (np.asarray(half).ravel().astype(np.uint64) for half in (state.a, state.b))
    assert len(np.unique(a << np.uint64(32) | b)) == 2**18
    assert len(np.unique(a)) > 2**18 - 25 and len(np.unique(b)) > 2**18 - 25


RATE = 0.1
drop = jax.jit(lambda dropout, x_BTD, token_T: dropout(x_BTD, token_T))


def dropout_at(sample_B, rate: float = RATE, seed: int = 7, step: int = 3) -> Dropout:
    """Dropout of layer 5, site 1."""
    return Dropout.at(rate, seed, jnp.int32(step), sample_B).fold(5).fold(1)


@cache
def mask(first: int = 0, batch: int = 16, **at) -> np.ndarray:
    """What is kept of ones [batch, 64 tokens, 96 features] for the samples from `first` on."""
    dropout = dropout_at(first + jnp.arange(batch, dtype=jnp.int32), **at)
    return np.asarray(drop(dropout, jnp.ones((batch, 64, 96)), jnp.arange(64, dtype=jnp.int32)))


def test_dropout_hashes_seed_step_sample_layer_site_token_feature():
    """The mask is the threshold of the hash of these coordinates, and what is kept is scaled by 1 / (1 - rate)."""
    grid = np.meshgrid(*(np.arange(n, dtype=np.int32) for n in (16, 64, 96)), indexing="ij", sparse=True)
    sample, token, feature = grid
    expected = hash_of(np.uint32(7), 3, sample, 5, 1, token, feature) >= round(RATE * 2**32)
    np.testing.assert_array_equal(mask(), np.where(expected, np.float32(1 / (1 - RATE)), 0))


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_the_rate_is_the_share_that_is_dropped(rate):
    """What is dropped altogether, per token and per feature is binomial, within 5 standard deviations."""
    dropped = mask(rate=rate) == 0
    variance = rate * (1 - rate)
    assert abs(dropped.sum() - dropped.size * rate) < 5 * (dropped.size * variance) ** 0.5
    for counts in (dropped.sum(2), dropped.sum((0, 1)), dropped.sum((1, 2))):
        trials, freedom = dropped.size / counts.size, counts.size - 1
        spread = ((counts - counts.mean()) ** 2).sum() / (trials * variance)
        assert abs(spread - freedom) < 5 * (2 * freedom) ** 0.5


def test_a_shard_s_mask_is_its_slice_of_the_global_one():
    """Some samples, some tokens, and the rows of a data axis of 4: the same elements of one mask."""
    np.testing.assert_array_equal(mask(first=5, batch=2), mask()[5:7])
    dropout = dropout_at(jnp.arange(16, dtype=jnp.int32))
    some = drop(dropout, jnp.ones((16, 8, 96)), 24 + jnp.arange(8, dtype=jnp.int32))
    np.testing.assert_array_equal(some, mask()[:, 24:32])

    def local(x_BTD):
        sample_B = axis_index("data") * 4 + jnp.arange(4, dtype=jnp.int32)
        return dropout_at(sample_B)(x_BTD, jnp.arange(64, dtype=jnp.int32))

    mesh = make_mesh(jax.devices()[:4], data=4)
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    np.testing.assert_array_equal(run(np.ones((16, 64, 96), np.float32)), mask())


def test_the_gradient_is_dropped_like_the_value():
    """The backward pass, which draws the mask again, draws the same one; a rate of 0 leaves x alone."""
    dropout, off = (dropout_at(jnp.arange(16, dtype=jnp.int32), rate) for rate in (RATE, 0.0))
    token_T, x_BTD = jnp.arange(64, dtype=jnp.int32), jnp.full((16, 64, 96), 3.0)
    grad = jax.jit(jax.grad(lambda x: jnp.sum(drop(dropout, x, token_T))))(x_BTD)
    np.testing.assert_array_equal(grad, mask())
    assert off == Dropout.off() and off(x_BTD, token_T) is x_BTD


def test_keys_depend_on_the_path():
    """Names in another order, another name, another index or another seed give another key, the same path the same."""
    key = NamedKey.from_seed(1)
    keys = [key, key / "a", key / "b", key / "a" / "b", key / "b" / "a", key / 0, key / 1, key / "a" / 0, key / 0 / "a"]
    keys += [NamedKey.from_seed(2) / "a"]
    data = [tuple(jax.random.key_data(key.key).tolist()) for key in keys]
    assert len(set(data)) == len(data)
    assert tuple(jax.random.key_data((NamedKey.from_seed(1) / "a" / 0).key).tolist()) == data[7]
    with_array = jax.jit(lambda index: jax.random.key_data((key / "a" / index).key))(jnp.int32(0))
    assert tuple(with_array.tolist()) == data[7]

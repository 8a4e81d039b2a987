"""The gated delta rule in chunks is that of one token after the other, values and gradients: with decays by head and by
channel, documents, repeated tokens, any chunk and segment, and whatever pieces a sequence is cut into."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from megajax.core.models.delta_chunks import Tokens, delta_rule, state_map, states_between

KEY_HEADS, HEADS, KEY, VALUE = 1, 2, 3, 4
BY = pytest.mark.parametrize("channels", [1, KEY], ids=["by-head", "by-channel"])


def drawn(length: int, channels: int) -> Tokens:
    """Four rows in fp64: random tokens; with documents, of one token among them; what is written is up to twice the
    error; and one token again and again, which hardly anything forgets, so that it must be overwritten."""
    rng = np.random.default_rng(length)
    query, key, value, decay, write = (
        rng.normal(size=(4, heads, length, size))
        for heads, size in ((KEY_HEADS, KEY), (KEY_HEADS, KEY), (HEADS, VALUE), (HEADS, channels), (HEADS, 1))
    )
    for x in (query, key, value):
        x[3] = x[3, :, :1]
    decay, write = -np.logaddexp(0, 3 * decay), 1 / (1 + np.exp(-write))
    decay[1, :, [0, 5, 6, length // 2, length - 1]] = -np.inf
    decay[3], write[2], write[3] = 1e-6 * decay[3], 2 * write[2], 1
    return Tokens(query, key, value, decay, write)


def one_by_one(tokens: Tokens, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The definition."""
    read = np.empty_like(tokens.value_BHTV)
    for t in range(read.shape[2]):
        q, k, v, g, b = (x[:, :, t] for x in tokens)
        q, k = (np.repeat(x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6), HEADS // KEY_HEADS, 1) for x in (q, k))
        state = np.exp(g)[..., None] * state
        state = state + (b * k)[..., None] * (v - np.einsum("bhk,bhkv->bhv", k, state))[..., None, :]
        read[:, :, t] = np.einsum("bhk,bhkv->bhv", q / KEY**0.5, state)
    return read, state


@BY
def test_values_and_gradients_are_those_of_one_token_after_the_other(channels: int) -> None:
    """In fp64 to its rounding; the derivative is that along a random direction. Where a document begins nothing depends
    on the decay."""
    length, rng = 19, np.random.default_rng(1)
    tokens, (state, *weights) = drawn(length, channels), (rng.normal(size=(4, HEADS, t, VALUE)) for t in (3, length, 3))

    @jax.jit
    def both(tokens: Tokens, state: Array) -> tuple:
        results, pullback = jax.vjp(lambda tokens, state: delta_rule(tokens, 4, 8, state), tokens, state)
        return results, pullback(tuple(weights))

    with jax.enable_x64(True):
        results, (of_tokens, of_state) = jax.tree.map(np.asarray, both(tokens, state))
    for result, expected in zip(results, one_by_one(tokens, state), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-12)
    assert (of_tokens.decay_BHTG[np.isneginf(tokens.decay_BHTG)] == 0).all()
    inputs, gradients = (*tokens, state), (*of_tokens, of_state)
    direction, slope, change = [rng.normal(size=x.shape) for x in inputs], 0.0, 0.0
    for along, gradient in zip(direction, gradients, strict=True):
        assert np.isfinite(gradient).all()
        slope += (along * gradient).sum()
    for step in (1e-6, -1e-6):
        *moved, first = (x + step * along for x, along in zip(inputs, direction, strict=True))
        ends = one_by_one(Tokens(*moved), first)
        change += sum((x * weight).sum() for x, weight in zip(ends, weights, strict=True)) / (2 * step)
    np.testing.assert_allclose(change, slope, rtol=1e-7)


@BY
@pytest.mark.parametrize("length", [1, 64])
def test_a_large_chunk_loses_nothing(length: int, channels: int) -> None:
    """In fp32, without a first state: a token repeated 64 times would lose all, if powers of a matrix made the
    inverse."""
    tokens = drawn(max(length, 7), channels)
    tokens = Tokens(*(x[:, :, :length] for x in tokens))
    run = jax.jit(partial(delta_rule, chunk=64, segment=256))
    expected = one_by_one(tokens, np.zeros((4, HEADS, KEY, VALUE)))
    for result, value in zip(run(Tokens(*(x.astype(np.float32) for x in tokens))), expected, strict=True):
        np.testing.assert_allclose(result, value, rtol=2e-5, atol=2e-6)


@BY
def test_pieces_continue_each_other(channels: int) -> None:
    """The states between a sequence's pieces follow from what each piece makes of a state."""
    tokens = drawn(18, channels)
    pieces = Tokens(*(jnp.stack(jnp.split(x, 3, 2)) for x in tokens))

    @jax.jit
    def in_pieces(pieces: Tokens) -> tuple[Array, Array]:
        entering = states_between(jax.vmap(lambda piece: state_map(piece, 2, 4))(pieces))
        return jax.vmap(lambda piece, state: delta_rule(piece, 2, 4, state))(pieces, entering)

    read, last = in_pieces(pieces)
    expected = one_by_one(tokens, np.zeros((4, HEADS, KEY, VALUE)))
    for result, value in zip((jnp.concatenate([*read], 2), last[-1]), expected, strict=True):
        np.testing.assert_allclose(result, value, rtol=2e-5, atol=2e-6)

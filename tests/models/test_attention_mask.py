"""What attention may see, in blocks of queries, against the dense form of each limit; and against brute force."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.backend import CPU, Backend
from megajax.models.attention_mask import CAUSAL, FROM_START, AttentionMask, Pieces, Places
from megajax.models.blocked_attention import blocked_attention
from megajax.parallel.random import Dropout

BATCH, HEADS, HEAD_SIZE = 3, 2, 4
SMALL = Backend(unroll_layers=8, fused_attention=False, query_block=128, scores_bytes=None, transposed_copies=True)


def sees(visible: AttentionMask, length: int) -> np.ndarray:
    """Which key every query sees, one by one: bool [B, T, S]."""
    found = np.zeros((BATCH, length, length), bool)
    first_key_BT, num_keys_B = jax.device_get((visible.first_key_BT, visible.num_keys_B))
    for b, t, s in np.ndindex(found.shape):
        found[b, t, s] = (
            (s <= t or not visible.causal)
            and (visible.window is None or abs(t - s) < visible.window)
            and (first_key_BT is None or s >= first_key_BT[b, t])
            and (num_keys_B is None or s < num_keys_B[b])
        )
    return found


def positions(length: int) -> np.ndarray:
    place_T = np.arange(length)
    return np.stack([place_T, place_T % 7, np.where(place_T < 5, place_T, place_T - 5)]).astype(np.int32)


LIMITS = {
    "everything": lambda length: AttentionMask(),
    "causal": lambda length: CAUSAL,
    "documents": lambda length: AttentionMask.of_documents(jnp.asarray(positions(length))),
    "padding": lambda length: AttentionMask.of_padded(jnp.asarray([length, length // 3, 0], jnp.int32)),
    "window": lambda length: AttentionMask(window=9),
    "causal window": lambda length: AttentionMask(causal=True, window=50),
}


@pytest.mark.parametrize(
    "limit", [pytest.param(limit, marks=[pytest.mark.full] if limit == "documents" else []) for limit in LIMITS]
)
def test_blocks_are_the_dense_attention(limit):
    """Output and gradients of q, k and v, over two blocks of queries."""
    length = 140
    visible = LIMITS[limit](length)
    seen_BTS = jnp.asarray(sees(visible, length))
    assert seen_BTS.any(-1).all()
    rng = np.random.default_rng(length)
    arrays = [jnp.asarray(rng.normal(size=(BATCH, length, HEADS, HEAD_SIZE)), jnp.float32) for _ in range(4)]

    def blocked(visible, _, *qkv):
        return blocked_attention(*qkv, FROM_START, visible, None, SMALL)

    def dense(_, seen_BTS, q_BTHK, k_BSHK, v_BSHK):
        scores_BHTS = jnp.einsum("BTHK,BSHK->BHTS", q_BTHK, k_BSHK) / HEAD_SIZE**0.5
        weights_BHTS = jax.nn.softmax(jnp.where(seen_BTS[:, None], scores_BHTS, -jnp.inf), axis=-1)
        return jnp.einsum("BHTS,BSHK->BTHK", weights_BHTS, v_BSHK)

    def both(attention):
        def run(visible, seen_BTS, *arrays):
            y, pullback = jax.vjp(lambda *qkv: attention(visible, seen_BTS, *qkv), *arrays[:3])
            return y, *pullback(arrays[3])

        return jax.jit(run)(visible, seen_BTS, *arrays)

    for actual, expected in zip(both(blocked), both(dense), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("limit", LIMITS)
def test_a_mask_is_every_limit_at_once(limit):
    """The mask of a block within the keys that it may see, and nothing is seen outside of them."""
    length, start, end = 40, 13, 29
    visible = LIMITS[limit](length)
    first, last = visible.key_range(start, end, length)
    query_T, key_S = jnp.arange(start, end), jnp.arange(first, last)
    mask = visible.mask(query_T, key_S, slice(start, end))
    expected = sees(visible, length)[:, start:end]
    outside = np.ones(length, bool)
    outside[first:last] = False
    assert not expected[..., outside].any()
    found = np.ones((1, 1, 1), bool) if mask is None else np.asarray(mask)
    np.testing.assert_array_equal(np.broadcast_to(found, expected[..., first:last].shape), expected[..., first:last])


@pytest.mark.parametrize("limit", ["padding", "documents", "causal window"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_queries_may_stand_anywhere(limit, dynamic):
    """Two devices, each with two pieces of the queries and all keys, in another order than the sequence's: together
    they give attention of the whole sequence and its gradients, with dropout."""
    length, piece = 320, 80
    visible, rng = LIMITS[limit](length), np.random.default_rng(0)
    q, k, v, grad = (jnp.asarray(rng.normal(size=(BATCH, length, HEADS, HEAD_SIZE)), jnp.float32) for _ in range(4))
    drop_BH = Dropout.at(0.3, 0, jnp.int32(0), jnp.arange(BATCH * HEADS).reshape(BATCH, -1))

    @partial(jax.jit, static_argnums=2)
    def attention(start_P, queries_T, starts, q, k, v, grad):
        seen = visible
        if visible.first_key_BT is not None:
            seen = dataclasses.replace(visible, first_key_BT=visible.first_key_BT[:, queries_T])
        places = Places(Pieces(starts, start_P), Pieces((length,)))

        def run(q, k, v):
            return blocked_attention(q, k, v, places, moved(seen, length), drop_BH, SMALL)

        y, pullback = jax.vjp(run, q[:, queries_T], k, v)
        return y, *pullback(grad[:, queries_T])

    def at(*starts):
        """`starts` in pieces; all positions of the sequence are further on than its tokens' numbers."""
        queries_T = np.concatenate([np.arange(start, start + piece) for start in starts])
        there = tuple(length + start for start in starts)
        if dynamic:
            return queries_T, attention(jnp.asarray(there, jnp.int32), queries_T, None, q, k, v, grad)
        return queries_T, attention(None, queries_T, there, q, k, v, grad)

    whole = attention(None, np.arange(length), (length,), q, k, v, grad)
    (first_T, first), (second_T, second) = at(0, 240), at(160, 80)
    order = np.argsort(np.concatenate([first_T, second_T]))
    for index in (0, 1):  # of queries
        together = np.concatenate([first[index], second[index]], axis=1)[:, order]
        np.testing.assert_allclose(together, whole[index], rtol=2e-5, atol=2e-5)
    for index in (2, 3):  # of keys and values, sums
        np.testing.assert_allclose(first[index] + second[index], whole[index], rtol=2e-5, atol=2e-5)


def moved(visible: AttentionMask, by: int) -> AttentionMask:
    """The same limits of a sequence that stands so much further on."""
    first, count = visible.first_key_BT, visible.num_keys_B
    first, count = (None if x is None else x + by for x in (first, count))
    return dataclasses.replace(visible, first_key_BT=first, num_keys_B=count)


def test_a_window_leaves_keys_out():
    """Of a long sequence a block of queries takes no more keys than its window reaches."""
    assert AttentionMask(causal=True, window=150).key_range(256, 384, 1000) == (107, 384)
    assert AttentionMask(window=9).key_range(256, 384, 1000) == (248, 392)
    later = Places(Pieces((1000, 512)), Pieces((256,)))  # of two pieces of 128 tokens the second
    assert later.key_range(AttentionMask(causal=True, window=150), 128, 256, 256, 1000) == slice(107, 384)
    assert CPU.block_of(1000) == 256 and CPU.block_of(32 * 256) == 256 and CPU.block_of(100_000) == 3125

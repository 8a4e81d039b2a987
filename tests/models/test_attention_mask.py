"""What attention may see, in blocks of queries, against the dense form of each limit; and against brute force."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.backend import CPU, Backend
from megajax.models.attention_mask import CAUSAL, AttentionMask
from megajax.models.blocked_attention import blocked_attention

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
        return blocked_attention(*qkv, visible, None, 0.0, SMALL)

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
    assert visible.only_causal_or_padded == (limit in ("everything", "causal", "padding"))


def test_a_window_leaves_keys_out():
    """Of a long sequence a block of queries takes no more keys than its window reaches."""
    assert AttentionMask(causal=True, window=150).key_range(256, 384, 1000) == (107, 384)
    assert AttentionMask(window=9).key_range(256, 384, 1000) == (248, 392)
    assert CPU.block_of(1000) == 256 and CPU.block_of(32 * 256) == 256 and CPU.block_of(100_000) == 3125

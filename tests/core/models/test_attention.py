"""Attention in blocks of queries equals plain dense attention, values and gradients, whatever is seen, with and without
dropout, with fewer heads of keys, and wherever queries stand."""

import dataclasses
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.sharding import PartitionSpec as P
from tiny import full

from megajax.core.backend import BLOCKS, CPU, GPU, Backend
from megajax.core.mesh import make_mesh
from megajax.core.models.attend import attend
from megajax.core.models.attention_mask import CAUSAL, FROM_START, AttentionMask, Pieces, Places
from megajax.core.models.attention_setting import Setting
from megajax.core.models.blocked_attention import OWN_KEYS, blocked_attention
from megajax.core.parallel.random import Dropout, RandomBits
from megajax.core.private import FUSED_FORWARD, imagined_cudnn
from megajax.plan import h200

BATCH, HEADS, HEAD_SIZE = 3, 4, 6
QUERY_BLOCK = CPU.query_block
SEED, STEP, LAYER = 11, 2, 3
HEADS_SPLIT = P(None, None, "tensor")
SMALL = Backend(unroll_layers=8, attention=BLOCKS, query_block=128, scores_bytes=None, transposed_copies=True)


def positions(length: int) -> np.ndarray:
    """In documents: one, those of seven tokens, and two."""
    place_T = np.arange(length)
    return np.stack([place_T, place_T % 7, np.where(place_T < 5, place_T, place_T - 5)]).astype(np.int32)


LIMITS = {
    "everything": lambda length: AttentionMask(),
    "causal": lambda length: CAUSAL,
    "documents": lambda length: CAUSAL.in_documents(jnp.asarray(positions(length))),
    "padding": lambda length: AttentionMask().padded(jnp.asarray([length, length // 3, 0], jnp.int32)),
    "window": lambda length: AttentionMask(window=9),
    "causal window": lambda length: AttentionMask(causal=True, window=50),
}


def sees(limit: str, length: int) -> np.ndarray:
    """Which key every query sees, bool [B, T, S]."""
    query_T1, key_S = np.arange(length)[:, None], np.arange(length)
    position_BT1, num_keys_B11 = positions(length)[..., None], np.array([length, length // 3, 1])[:, None, None]
    seen = {
        "everything": key_S >= 0,
        "causal": key_S <= query_T1,
        "documents": (key_S <= query_T1) & (key_S >= query_T1 - position_BT1),
        "padding": key_S < num_keys_B11,
        "window": abs(query_T1 - key_S) < 9,
        "causal window": (key_S <= query_T1) & (query_T1 - key_S < 50),
    }
    return np.broadcast_to(seen[limit], (BATCH, length, length))


def dropout_at(rate: float) -> Dropout:
    return Dropout.at(rate, SEED, jnp.int32(STEP), jnp.arange(BATCH, dtype=jnp.int32)).fold(LAYER)


def arrays(length: int, kv_heads: int = HEADS, std: float = 1.0) -> list[np.ndarray]:
    """Queries, keys, values, and the gradient of the output."""
    rng, heads = np.random.default_rng(length), (HEADS, kv_heads, kv_heads, HEADS)
    return [rng.normal(0, std, (BATCH, length, h, HEAD_SIZE)).astype(np.float32) for h in heads]


def blocked(size: int, rate: float, backend: Backend = CPU, visible: AttentionMask = CAUSAL):
    """Output of `attend` on `size` tensor devices, and gradients of q, k, v."""

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=make_mesh(jax.devices()[:size], tensor=size),
        in_specs=(HEADS_SPLIT,) * 4,
        out_specs=(HEADS_SPLIT,) * 4,
    )
    def run(q_BTHK, k_BSHK, v_BSHK, grad_BTHK):
        setting = Setting(visible, dropout_at(rate), backend)
        y_BTHK, pullback = jax.vjp(lambda *qkv: attend(*qkv, setting), q_BTHK, k_BSHK, v_BSHK)
        return y_BTHK, *pullback(grad_BTHK)

    return run


def capped_alibi(scores: jax.Array, query: jax.Array, key: jax.Array, head: jax.Array) -> jax.Array:
    """A soft cap, and a bias that grows with the distance, by the head."""
    slope = 0.5 ** (1.0 + head.astype(scores.dtype))
    return 2.0 * jnp.tanh(scores / 2.0) - slope * (query - key).astype(scores.dtype)


@partial(jax.jit, static_argnums=(0, 6))
def dense(rate: float, q_BTHK, k_BSHK, v_BSHK, grad_BTHK, seen_BTS, score=None):
    """The same, all scores at once; the mask is the hash of (seed, step, sample, layer, head, query, key)."""
    length = q_BTHK.shape[1]
    state = RandomBits.from_seed(SEED).fold(STEP)
    for axis, size in enumerate((BATCH, HEADS, length)):
        index = jnp.arange(size, dtype=jnp.int32).reshape([-1 if i == axis else 1 for i in range(3)])
        state = state.fold(index) if axis else state.fold(index).fold(LAYER)
    keep_BHTS = state[..., None].last(jnp.arange(length, dtype=jnp.int32).reshape(1, 1, 1, -1)) >= round(rate * 2**32)

    def attention(q_BTHK, k_BSHK, v_BSHK):
        k_BSHK, v_BSHK = (jnp.repeat(x, HEADS // x.shape[2], axis=2) for x in (k_BSHK, v_BSHK))
        scores_BHTS = jnp.einsum("BTHK,BSHK->BHTS", q_BTHK, k_BSHK) / HEAD_SIZE**0.5
        if score:
            place_T, head_H = jnp.arange(length), jnp.arange(HEADS)
            scores_BHTS = score(
                scores_BHTS, place_T[None, None, :, None], place_T[None, None, None], head_H[None, :, None, None]
            )
        probability_BHTS = jax.nn.softmax(jnp.where(seen_BTS[:, None], scores_BHTS, -jnp.inf), axis=-1)
        probability_BHTS = jnp.where(keep_BHTS, probability_BHTS / (1 - rate), 0) if rate else probability_BHTS
        return jnp.einsum("BHTS,BSHK->BTHK", probability_BHTS, v_BSHK)

    y_BTHK, pullback = jax.vjp(attention, q_BTHK, k_BSHK, v_BSHK)
    return y_BTHK, *pullback(grad_BTHK)


def heads_at_once(count: int) -> Backend:
    """As many as their scores may take memory."""
    return dataclasses.replace(CPU, scores_bytes=count * CPU.block_of(QUERY_BLOCK + 1) * (QUERY_BLOCK + 1) * 4)


OWN_ON_GPUS = dataclasses.replace(GPU, attention=BLOCKS)
CASES = {
    **{f"{length} tokens": {"length": length} for length in (1, QUERY_BLOCK - 1, QUERY_BLOCK, QUERY_BLOCK + 1, 600)},
    **{f"dropout, {length} tokens": {"rate": 0.3, "length": length} for length in (1, QUERY_BLOCK + 44)},
    **{f"dropout on {size}": {"rate": 0.3, "size": size} for size in (1, 4)},
    **{f"{count} heads at once": {"rate": 0.3, "backend": heads_at_once(count)} for count in (1, 2)},
    "the form for GPUs": {"rate": 0.3, "backend": GPU},
    "documents in one block": {"limit": "documents", "length": QUERY_BLOCK - 1},
    "documents in several blocks": {"limit": "documents", "rate": 0.3, "length": 600},
    "documents, the form for GPUs": {"limit": "documents", "rate": 0.3, "backend": GPU, "size": 1},
    **{limit: {"limit": limit, "backend": SMALL} for limit in ("everything", "padding", "window", "causal window")},
    "2 heads of keys": {"kv_heads": 2, "rate": 0.3, "length": QUERY_BLOCK + 44},
    "1 head of keys": {"kv_heads": 1, "rate": 0.3, "limit": "causal window", "backend": heads_at_once(1), "size": 1},
    "changed scores": {"score": capped_alibi, "kv_heads": 2, "limit": "documents", "length": QUERY_BLOCK + 44},
    "changed scores, 1 head at once": {"score": capped_alibi, "kv_heads": 2, "backend": heads_at_once(1)},
    "2 heads of keys on GPUs": {"kv_heads": 2, "limit": "causal window", "backend": OWN_ON_GPUS},
}


OFTEN = ("1 tokens", "1 heads at once", "changed scores", "padding", "window", "2 heads of keys on GPUs")


@pytest.mark.parametrize("case", [case if case in OFTEN else full(case) for case in CASES])
def test_it_is_dense_attention(case):
    """Output and gradients, for lengths around the size of a block, heads split over devices or done some at a time,
    probabilities dropped by one mask over global sample, head, query and key; the gradients of keys for several heads
    of queries add up."""
    defaults = {"size": 2, "rate": 0.0, "length": QUERY_BLOCK + 1, "limit": "causal", "kv_heads": HEADS, "backend": CPU}
    size, rate, length, limit, kv_heads, backend, score = (defaults | {"score": None} | CASES[case]).values()
    inputs = arrays(length, kv_heads)
    expected = [np.asarray(array) for array in dense(rate, *inputs, sees(limit, length), score)]
    rounding = 1e-6 * max(np.abs(array).max() for array in expected)  # of gradients that are zero, as of a single query
    visible = dataclasses.replace(LIMITS[limit](length), score=score)
    actual = blocked(size, rate, backend, visible)(*inputs)
    share, tight = 2e-6 if kv_heads < HEADS else 5e-6, {"rtol": 2e-5, "atol": 2e-5}
    for found, array in zip(actual, expected, strict=True):
        usual = {"rtol": 1e-4, "atol": max(share * np.abs(array).max(), rounding)}
        np.testing.assert_allclose(found, array, **(tight if case in LIMITS else usual))


@pytest.mark.parametrize("kv_heads", [1, full(HEADS)])
def test_bf16_is_near_fp32(kv_heads: int) -> None:
    """Forward and backward, in a form that XLA's products on CPUs take: some they refuse when the program runs."""
    wide = arrays(16, kv_heads)
    half = blocked(1, 0.0)(*(array.astype(jnp.bfloat16) for array in wide))
    for actual, expected in zip(half, blocked(1, 0.0)(*wide), strict=True):
        np.testing.assert_allclose(actual.astype(np.float32), expected, rtol=0, atol=0.03 * np.abs(expected).max())


def test_what_cudnn_is_asked_for():
    """Causality, padding, and windows back from the query, by the lengths that it takes; where it would not keep
    documents apart, knows no such window, or queries stand elsewhere it is not asked."""

    def asks_cudnn(visible, places=FROM_START, window=None) -> bool:
        x_BTHK = jax.ShapeDtypeStruct((BATCH, 16, HEADS, 8), jnp.bfloat16)
        with imagined_cudnn(version=91900, capability=9.0):
            traced = jax.make_jaxpr(lambda x: attend(x, x, x, Setting(visible, dropout_at(0.0), GPU, places)))(x_BTHK)
        said = str(traced)
        return FUSED_FORWARD in said and (not window or f"sliding_window_length={window}" in said)

    assert asks_cudnn(CAUSAL) and asks_cudnn(AttentionMask().padded(jnp.full(BATCH, 9, jnp.int32)))
    assert not asks_cudnn(CAUSAL.in_documents(np.zeros((BATCH, 16), np.int32)))
    assert asks_cudnn(AttentionMask(causal=True, window=3), window=3)
    assert not asks_cudnn(AttentionMask(window=3))
    assert not asks_cudnn(CAUSAL, Places(queries=Pieces(jnp.asarray([16], jnp.int32))))


def test_a_gpu_is_imagined_for_a_while():
    """Afterwards JAX asks this machine's GPU again, whatever happened in between."""
    names = "check_cudnn_version", "check_compute_capability", "is_cuda_compute_capability_equal"
    before = [getattr(cudnn, name) for name in names]
    with pytest.raises(ZeroDivisionError), h200.attention():
        assert cudnn.check_cudnn_version() == 91900
        assert cudnn.check_compute_capability("9.0") and not cudnn.check_compute_capability("10.0")
        assert cudnn.is_cuda_compute_capability_equal("9.0")
        raise ZeroDivisionError
    assert [getattr(cudnn, name) for name in names] == before


def test_large_scores_do_not_overflow():
    """Scores of some thousands give the dense output, and finite gradients."""
    inputs = arrays(16, std=50)
    actual, expected = blocked(1, 0.0)(*inputs), dense(0.0, *inputs, sees("causal", 16))
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-3, atol=1e-3)
    assert all(np.isfinite(gradient).all() for gradient in actual[1:])


@pytest.mark.parametrize("limit", LIMITS)
def test_a_mask_is_every_limit_at_once(limit):
    """The mask of a block within the keys that it may see, and nothing is seen outside of them."""
    length, start, end = 40, 13, 29
    visible = LIMITS[limit](length)
    first, last = visible.key_range(start, end, length)
    query_T, key_S = jnp.arange(start, end), jnp.arange(first, last)
    mask = visible.of_queries(lambda x_BT: x_BT[:, start:end]).mask(query_T[None], key_S[None])
    expected = sees(limit, length)[:, start:end]
    outside = np.ones(length, bool)
    outside[first:last] = False
    assert not expected[..., outside].any()
    found = np.ones((1, 1, 1), bool) if mask is None else np.asarray(mask)
    np.testing.assert_array_equal(np.broadcast_to(found, expected[..., first:last].shape), expected[..., first:last])
    if limit not in ("documents", "padding"):  # which no count depends on
        total = sum(map(prod, visible.block_sizes(length, 1)))
        assert total == sees(limit, length)[0].sum() and abs(visible.keys_seen(length) - total / length) <= 1


@pytest.mark.parametrize("limit", [full("padding"), "documents", full("causal window")])
def test_queries_may_stand_anywhere(limit):
    """Two devices, each with two pieces of the queries and all keys, in another order than the sequence's: together
    they give attention of the whole sequence and its gradients, with dropout."""
    length, piece = 320, 80
    visible, rng = LIMITS[limit](length), np.random.default_rng(0)
    q, k, v, grad = (jnp.asarray(rng.normal(size=(BATCH, length, HEADS, HEAD_SIZE)), jnp.float32) for _ in range(4))
    drop_BH = Dropout.at(0.3, 0, jnp.int32(0), jnp.arange(BATCH * HEADS).reshape(BATCH, -1))

    @jax.jit
    def attention(start_P, queries_T, q, k, v, grad):
        seen = visible.of_queries(lambda x_BT: x_BT[:, queries_T])
        places = Places(Pieces(start_P), Pieces(jnp.asarray([length], jnp.int32)))

        def run(q, k, v):
            return blocked_attention(OWN_KEYS, SMALL, q, k, v, places, (moved(seen, length), drop_BH))

        y, pullback = jax.vjp(run, q[:, queries_T], k, v)
        return y, *pullback(grad[:, queries_T])

    def at(*starts):
        """`starts` in pieces; all positions of the sequence are further on than its tokens' numbers."""
        queries_T = np.concatenate([np.arange(start, start + piece) for start in starts])
        start_P = length + jnp.asarray(starts, jnp.int32)
        return queries_T, attention(start_P, queries_T, q, k, v, grad)

    whole = attention(jnp.asarray([length], jnp.int32), np.arange(length), q, k, v, grad)
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
    later = Places(ahead=128)
    assert later.key_range(AttentionMask(causal=True, window=150), 128, 256, 1000) == slice(107, 384)
    assert CPU.block_of(1000) == 256 and CPU.block_of(32 * 256) == 256 and CPU.block_of(100_000) == 3125

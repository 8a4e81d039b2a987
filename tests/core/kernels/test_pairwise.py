"""Attention by kernels, for every pair of features, beside plain attention in fp32: in Pallas' interpreter of kernels
for GPUs. Compiling for it costs most, so that several limits share a program, as limits of different queries."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity_grid import cover
from test_fused_attention import GRID, LENGTH, LIMITS, are_as_near, name

from megajax.core.models import fused_attention
from megajax.core.parallel.random import Dropout
from megajax.core.private import has_gpu_kernels, interpreted_kernels

pytestmark = pytest.mark.skipif(not has_gpu_kernels(), reason="its JAX has no such kernels, which 0.11 has")

# Either everything, in blocks that are seen fully; or all other limits, of as many queries each.
MIXED = "everything", "keys before, two pieces, causal, padding, documents, window, documents in a window"
FEATURES = [*itertools.product(GRID["size"], GRID["rate"], GRID["kv_heads"], GRID["dtype"], MIXED)]
PAIRWISE = [FEATURES[number] for number in cover(FEATURES, [*itertools.combinations(range(5), 2)])]


def limits(*names: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of every query the first key and the one after the last, as the kernels are told, [T]; which keys it sees by the
    masks of the blocks, [T, S]; and its position in the sequence and that of the first key, [2, T]."""
    parts = []
    for number, each in enumerate(names):
        visible, places, queries, keys = LIMITS[each]
        shapes = (jax.ShapeDtypeStruct((1, length), jnp.float32) for length in (queries, keys))
        told = fused_attention.seen(*shapes, visible, places, Dropout.off())
        query_T, key_S = places.queries.at(0, queries, queries), places.keys.at(0, keys, keys)
        mask = visible.of_queries(lambda x_BT, number=queries: x_BT[:, :number]).mask(query_T[None], key_S[None])
        sees = np.zeros((LENGTH, 2 * LENGTH), bool)
        sees[:queries, :keys] = True if mask is None else mask[0]
        rows = np.stack([told.first_BT[0], told.last_BT[0], query_T, np.full(queries, key_S[0])])
        own = slice(number * LENGTH // len(names), (number + 1) * LENGTH // len(names))
        assert not sees[own, LENGTH:].any()
        parts.append((np.pad(rows, [(0, 0), (0, LENGTH - queries)])[:, own], sees[own, :LENGTH]))
    first_T, last_T, query_T, start_T = np.concatenate([rows for rows, _ in parts], axis=1)
    return first_T, last_T, np.concatenate([sees for _, sees in parts]), np.stack([query_T, start_T])


def plain(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, grad: np.ndarray, sees: np.ndarray, drop: np.ndarray, dtype: str
) -> list[np.ndarray]:
    """Attention and its gradients, of float32; factors of products are rounded to `dtype`."""

    def rounded(x: np.ndarray) -> np.ndarray:
        return np.asarray(x.astype(jnp.dtype(dtype)), np.float32)

    group, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    scores = np.where(sees, np.einsum("BTHK,BSHK->BHTS", q, k) * scale, -np.inf)
    highest = np.maximum(scores.max(-1, keepdims=True), -1e30)
    weights = np.exp(scores - highest)
    total = np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    out = rounded(np.einsum("BHTS,BSHK->BTHK", rounded(weights * drop), v) / total.swapaxes(1, 2))
    p = weights / total
    dp = np.einsum("BTHK,BSHK->BHTS", grad, v) * drop
    inner = np.einsum("BTHK,BTHK->BHT", grad, out)[..., None]
    dscores = rounded(p * (dp - inner))
    dk, dv = np.einsum("BHTS,BTHK->BSHK", dscores, q) * scale, np.einsum("BHTS,BTHK->BSHK", rounded(p * drop), grad)
    dk, dv = (x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(3) for x in (dk, dv))
    return [out, *map(rounded, (np.einsum("BHTS,BSHK->BTHK", dscores, k) * scale, dk, dv))]


@pytest.mark.parametrize("row", PAIRWISE, ids=name)
def test_pairs_of_features(row: tuple) -> None:
    from megajax.core.kernels.attention import Seen, attention, gradients  # JAX 0.10 lacks what it imports

    size, rate, kv_heads, dtype, mixed = row
    heads = 2 // kv_heads  # one of its own keys, or two that share theirs
    first_T, last_T, sees_TS, (query_T, start_T) = limits(*mixed.split(", "))
    drop_BHTS, bits_BHT = np.ones((1, 1, 1, 1), np.float32), None
    if rate:
        drop = Dropout.at(rate, 3, jnp.int32(2), jnp.arange(1, dtype=jnp.int32))
        head_H = jnp.arange(heads, dtype=jnp.int32)
        bits_BHT = drop.bits_B[:, None].fold(head_H[None])[:, :, None].fold(jnp.asarray(query_T[None, None]))
        key_TS = jnp.asarray(start_T[:, None] + np.arange(LENGTH, dtype=np.int32))
        bits_BHTS = bits_BHT[..., None].last(key_TS[None, None])
        drop_BHTS = np.asarray(drop.apply(jnp.ones(bits_BHTS.shape, jnp.float32), bits_BHTS))
        bits_BHT = bits_BHT.from_index(jnp.asarray(start_T[None, None]))
    seen = Seen(jnp.asarray(first_T[None]), jnp.asarray(last_T[None]), bits_BHT, rate, pieces=2)
    rng = np.random.default_rng(size)
    shapes = [(1, LENGTH, each, size) for each in (heads, 1, 1, heads)]
    inputs = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]

    @jax.jit
    def by_kernels(q, k, v, grad):
        out, sums = attention(q, k, v, seen)
        return out, *gradients(q, k, v, out, sums, grad, seen)

    with interpreted_kernels():
        found = [np.asarray(x, np.float32) for x in by_kernels(*inputs)]
    given = *(np.asarray(x, np.float32) for x in inputs), sees_TS, drop_BHTS
    are_as_near(found, plain(*given, dtype), plain(*given, "float32"))

"""Blocked attention equals plain dense causal attention, values and gradients, with and without dropout, within
sequences and within the documents of sequences."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from megajax.backend import CPU, GPU, Backend
from megajax.mesh import make_mesh
from megajax.models.attend import Setting, attend
from megajax.models.attention_mask import CAUSAL, FROM_START, AttentionMask, Pieces, Places
from megajax.parallel.random import Dropout, RandomBits
from megajax.private import FUSED_FORWARD, imagined_cudnn

BATCH, HEADS, HEAD_SIZE = 2, 4, 5
QUERY_BLOCK = CPU.query_block
SEED, STEP, LAYER = 11, 2, 3
HEADS_SPLIT = P(None, None, "tensor")


def dropout_at(rate: float) -> Dropout:
    return Dropout.at(rate, SEED, jnp.int32(STEP), jnp.arange(BATCH, dtype=jnp.int32)).fold(LAYER)


def arrays(length: int, count: int, std: float = 1.0) -> list[np.ndarray]:
    shape = (count, BATCH, length, HEADS, HEAD_SIZE)
    return list(np.random.default_rng(length).normal(0, std, shape).astype(np.float32))


def blocked(size: int, rate: float, backend: Backend = CPU, positions_BT: np.ndarray | None = None):
    """Output of `attend` on `size` tensor devices, and gradients of q, k, v."""

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=make_mesh(jax.devices()[:size], tensor=size),
        in_specs=(HEADS_SPLIT,) * 4,
        out_specs=(HEADS_SPLIT,) * 4,
    )
    def run(q_BTHK, k_BSHK, v_BSHK, grad_BTHK):
        def attention(*qkv):
            visible = CAUSAL if positions_BT is None else AttentionMask.of_documents(positions_BT)
            return attend(*qkv, Setting(visible, dropout_at(rate), backend))

        y_BTHK, pullback = jax.vjp(attention, q_BTHK, k_BSHK, v_BSHK)
        return y_BTHK, *pullback(grad_BTHK)

    return run


@partial(jax.jit, static_argnums=0)
def dense(rate: float, q_BTHK, k_BSHK, v_BSHK, grad_BTHK, document_BT):
    """The same, all scores at once; the mask is the hash of (seed, step, sample, layer, head, query, key). Queries see
    keys of their document."""
    length = q_BTHK.shape[1]
    state = RandomBits.from_seed(SEED).fold(STEP)
    for axis, size in enumerate((BATCH, HEADS, length)):
        index = jnp.arange(size, dtype=jnp.int32).reshape([-1 if i == axis else 1 for i in range(3)])
        state = state.fold(index) if axis else state.fold(index).fold(LAYER)
    keep_BHTS = state[..., None].last(jnp.arange(length, dtype=jnp.int32).reshape(1, 1, 1, -1)) >= round(rate * 2**32)

    def attention(q_BTHK, k_BSHK, v_BSHK):
        scores_BHTS = jnp.einsum("BTHK,BSHK->BHTS", q_BTHK, k_BSHK) / HEAD_SIZE**0.5
        causal_TS = jnp.tril(jnp.ones((length, length), bool))
        seen_BTS = causal_TS[None] & (document_BT[:, :, None] == document_BT[:, None, :])
        probability_BHTS = jax.nn.softmax(jnp.where(seen_BTS[:, None], scores_BHTS, -jnp.inf), axis=-1)
        probability_BHTS = jnp.where(keep_BHTS, probability_BHTS / (1 - rate), 0) if rate else probability_BHTS
        return jnp.einsum("BHTS,BSHK->BTHK", probability_BHTS, v_BSHK)

    y_BTHK, pullback = jax.vjp(attention, q_BTHK, k_BSHK, v_BSHK)
    return y_BTHK, *pullback(grad_BTHK)


def assert_dense(size: int, rate: float, length: int, backend: Backend = CPU, documents: bool = False) -> None:
    """`documents`: the sequences hold several, of which attention is told."""
    inputs, positions_BT, document_BT = arrays(length, 4), None, np.zeros((BATCH, length), np.int32)
    if documents:
        begins_BT = np.random.default_rng(0).random((BATCH, length)) < np.array([[2 / length], [0.2]])
        document_BT = np.cumsum(begins_BT, axis=1, dtype=np.int32)
        assert len(np.unique(document_BT[0])) > 1
        same_BTS = document_BT[:, :, None] == document_BT[:, None, :]
        positions_BT = np.tril(same_BTS, -1).sum(2, dtype=np.int32)
    expected = [np.asarray(array) for array in dense(rate, *inputs, document_BT)]
    rounding = 1e-6 * max(np.abs(array).max() for array in expected)  # of gradients that are zero, as of a single query
    for actual, array in zip(blocked(size, rate, backend, positions_BT)(*inputs), expected, strict=True):
        np.testing.assert_allclose(actual, array, rtol=1e-4, atol=max(5e-6 * np.abs(array).max(), rounding))


@pytest.mark.parametrize("length", [1, QUERY_BLOCK - 1, QUERY_BLOCK, QUERY_BLOCK + 1, 600])
def test_blocked_attention_is_dense_attention(length):
    """Output and gradients, for lengths around the size of a block, heads split over two devices."""
    assert_dense(2, 0.0, length)


@pytest.mark.parametrize("length", [1, QUERY_BLOCK + 44])
def test_dropout_drops_what_a_dense_mask_drops(length):
    """Probabilities are dropped by one mask over global sample, head, query and key."""
    assert_dense(2, 0.3, length)


@pytest.mark.parametrize("size", [1, 4])
def test_heads_may_be_split_anyhow(size):
    """All heads on one device, and one head on each."""
    assert_dense(size, 0.3, QUERY_BLOCK + 1)


@pytest.mark.parametrize("heads_at_once", [1, 2])
def test_heads_in_groups_are_the_same(heads_at_once):
    """As many heads at a time as their scores may take memory, however many there are."""
    length = QUERY_BLOCK + 1
    scores = CPU.block_of(length) * length * 4
    assert_dense(2, 0.3, QUERY_BLOCK + 1, dataclasses.replace(CPU, scores_bytes=heads_at_once * scores))


def test_the_form_for_gpus_is_the_same():
    """Our own attention, as a GPU runs it where cuDNN's does not apply."""
    assert_dense(2, 0.3, QUERY_BLOCK + 1, GPU)


@pytest.mark.parametrize(("rate", "length"), [(0.0, QUERY_BLOCK - 1), (0.3, 600)])
def test_documents_are_kept_apart(rate, length):
    """A query sees the keys of its own document, in one block of queries and over several."""
    assert_dense(2, rate, length, documents=True)


def test_documents_are_kept_apart_on_gpus():
    """The form for GPUs."""
    assert_dense(1, 0.3, QUERY_BLOCK + 1, GPU, documents=True)


def test_what_cudnn_is_asked_for():
    """Causality, padding, and windows back from the query, by the lengths that it takes; where it would not keep
    documents apart, knows no such window, or queries stand elsewhere it is not asked."""

    def asks_cudnn(visible, places=FROM_START, window=None) -> bool:
        x_BTHK = jax.ShapeDtypeStruct((BATCH, 16, HEADS, 8), jnp.bfloat16)
        with imagined_cudnn(version=91900, capability=9.0):
            traced = jax.make_jaxpr(lambda x: attend(x, x, x, Setting(visible, dropout_at(0.0), GPU, places)))(x_BTHK)
        said = str(traced)
        return FUSED_FORWARD in said and (not window or f"sliding_window_length={window}" in said)

    assert asks_cudnn(CAUSAL) and asks_cudnn(AttentionMask.of_padded(jnp.full(BATCH, 9, jnp.int32)))
    assert not asks_cudnn(AttentionMask.of_documents(np.zeros((BATCH, 16), np.int32)))
    assert asks_cudnn(AttentionMask(causal=True, window=3), window=3)
    assert not asks_cudnn(AttentionMask(window=3))
    assert not asks_cudnn(CAUSAL, Places(queries=Pieces((16,))))


def test_large_scores_do_not_overflow():
    """Scores of some thousands give the dense output, and finite gradients."""
    inputs = arrays(16, 4, std=50)
    actual, expected = blocked(1, 0.0)(*inputs), dense(0.0, *inputs, np.zeros((BATCH, 16), np.int32))
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-3, atol=1e-3)
    assert all(np.isfinite(gradient).all() for gradient in actual[1:])


blocked_causal = blocked(1, 0.0)


@pytest.mark.parametrize("changed", [0, 5, QUERY_BLOCK - 1, QUERY_BLOCK, QUERY_BLOCK + 11])
def test_the_future_does_not_reach_back(changed):
    """Another key and value at one position change no earlier output by a bit, and change that position's."""
    q_BTHK, k_BSHK, v_BSHK, grad_BTHK = arrays(QUERY_BLOCK + 12, 4)
    before = np.asarray(blocked_causal(q_BTHK, k_BSHK, v_BSHK, grad_BTHK)[0])
    for array in (k_BSHK, v_BSHK):
        array[:, changed] += 1
    after = np.asarray(blocked_causal(q_BTHK, k_BSHK, v_BSHK, grad_BTHK)[0])
    np.testing.assert_array_equal(before[:, :changed], after[:, :changed])
    assert (before[:, changed] != after[:, changed]).all()

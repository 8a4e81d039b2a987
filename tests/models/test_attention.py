"""Blocked attention equals plain dense causal attention, values and gradients, with and without dropout."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from megajax.mesh import make_mesh
from megajax.models.attention import QUERY_BLOCK, attend
from megajax.parallel.random import Dropout, RandomBits

BATCH, HEADS, HEAD_SIZE = 2, 4, 5
SEED, STEP, LAYER = 11, 2, 3
HEADS_SPLIT = P(None, None, "tensor")


def dropout_at(rate: float) -> Dropout:
    return Dropout.at(rate, SEED, jnp.int32(STEP), jnp.arange(BATCH, dtype=jnp.int32)).fold(LAYER)


def arrays(length: int, count: int, std: float = 1.0) -> list[np.ndarray]:
    shape = (count, BATCH, length, HEADS, HEAD_SIZE)
    return list(np.random.default_rng(length).normal(0, std, shape).astype(np.float32))


def blocked(size: int, rate: float):
    """Output of `attend` on `size` tensor devices, and gradients of q, k, v."""

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=make_mesh(1, 1, size, jax.devices()[:size]),
        in_specs=(HEADS_SPLIT,) * 4,
        out_specs=(HEADS_SPLIT,) * 4,
    )
    def run(q_BTHK, k_BSHK, v_BSHK, grad_BTHK):
        y_BTHK, pullback = jax.vjp(lambda *qkv: attend(*qkv, dropout_at(rate)), q_BTHK, k_BSHK, v_BSHK)
        return y_BTHK, *pullback(grad_BTHK)

    return run


@partial(jax.jit, static_argnums=0)
def dense(rate: float, q_BTHK, k_BSHK, v_BSHK, grad_BTHK):
    """The same, all scores at once; the mask is the hash of (seed, step, sample, layer, head, query, key)."""
    length = q_BTHK.shape[1]
    state = RandomBits.from_seed(SEED).fold(STEP)
    for axis, size in enumerate((BATCH, HEADS, length)):
        index = jnp.arange(size, dtype=jnp.int32).reshape([-1 if i == axis else 1 for i in range(3)])
        state = state.fold(index) if axis else state.fold(index).fold(LAYER)
    keep_BHTS = state[..., None].last(jnp.arange(length, dtype=jnp.int32).reshape(1, 1, 1, -1)) >= round(rate * 2**32)

    def attention(q_BTHK, k_BSHK, v_BSHK):
        scores_BHTS = jnp.einsum("BTHK,BSHK->BHTS", q_BTHK, k_BSHK) / HEAD_SIZE**0.5
        causal_TS = jnp.tril(jnp.ones((length, length), bool))
        probability_BHTS = jax.nn.softmax(jnp.where(causal_TS[None, None], scores_BHTS, -jnp.inf), axis=-1)
        probability_BHTS = jnp.where(keep_BHTS, probability_BHTS / (1 - rate), 0) if rate else probability_BHTS
        return jnp.einsum("BHTS,BSHK->BTHK", probability_BHTS, v_BSHK)

    y_BTHK, pullback = jax.vjp(attention, q_BTHK, k_BSHK, v_BSHK)
    return y_BTHK, *pullback(grad_BTHK)


def assert_dense(size: int, rate: float, length: int) -> None:
    inputs = arrays(length, 4)
    for actual, expected in zip(blocked(size, rate)(*inputs), dense(rate, *inputs), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=5e-6 * np.abs(expected).max())


@pytest.mark.parametrize("length", [1, QUERY_BLOCK - 1, QUERY_BLOCK, QUERY_BLOCK + 1, 300])
def test_blocked_attention_is_dense_attention(length):
    """Output and gradients, for lengths around the size of a block, heads split over two devices."""
    assert_dense(2, 0.0, length)


@pytest.mark.parametrize("length", [1, 300])
def test_dropout_drops_what_a_dense_mask_drops(length):
    """Probabilities are dropped by one mask over global sample, head, query and key."""
    assert_dense(2, 0.3, length)


@pytest.mark.parametrize("size", [1, 4])
def test_heads_may_be_split_anyhow(size):
    """All heads on one device, and one head on each."""
    assert_dense(size, 0.3, QUERY_BLOCK + 1)


def test_all_heads_at_once_are_the_same(monkeypatch):
    """The form for accelerators, run on the CPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert_dense(2, 0.3, QUERY_BLOCK + 1)


def test_large_scores_do_not_overflow():
    """Scores of some thousands give the dense output, and finite gradients."""
    inputs = arrays(16, 4, std=50)
    actual, expected = blocked(1, 0.0)(*inputs), dense(0.0, *inputs)
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-3, atol=1e-3)
    assert all(np.isfinite(gradient).all() for gradient in actual[1:])


CAUSAL = blocked(1, 0.0)


@pytest.mark.parametrize("changed", [0, 5, QUERY_BLOCK - 1, QUERY_BLOCK, 139])
def test_the_future_does_not_reach_back(changed):
    """Another key and value at one position change no earlier output by a bit, and change that position's."""
    q_BTHK, k_BSHK, v_BSHK, grad_BTHK = arrays(140, 4)
    before = np.asarray(CAUSAL(q_BTHK, k_BSHK, v_BSHK, grad_BTHK)[0])
    for array in (k_BSHK, v_BSHK):
        array[:, changed] += 1
    after = np.asarray(CAUSAL(q_BTHK, k_BSHK, v_BSHK, grad_BTHK)[0])
    np.testing.assert_array_equal(before[:, :changed], after[:, :changed])
    assert (before[:, changed] != after[:, changed]).all()

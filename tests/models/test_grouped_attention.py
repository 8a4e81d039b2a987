"""Fewer heads of keys and values than of queries: the same as with keys and values repeated, whose gradients add up."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import PartitionSpec as P

from megajax.backend import CPU, GPU, Backend
from megajax.mesh import make_mesh
from megajax.models.attend import Setting, attend
from megajax.models.attention_mask import AttentionMask
from megajax.parallel.random import Dropout

BATCH, HEADS, HEAD_SIZE = 2, 4, 6


def results(arrays: list[Array], rate: float, window: int | None, backend: Backend) -> list[np.ndarray]:
    """Output, and gradients of queries, keys and values, in fp32."""

    def run(q_BTHK, k_BSHK, v_BSHK, grad_BTHK):
        dropout = Dropout.at(rate, 7, jnp.int32(1), jnp.arange(BATCH, dtype=jnp.int32))
        visible = AttentionMask(causal=True, window=window)
        y_BTHK, pullback = jax.vjp(
            lambda *qkv: attend(*qkv, Setting(visible, dropout, backend)), q_BTHK, k_BSHK, v_BSHK
        )
        return y_BTHK, *pullback(grad_BTHK)

    mesh = make_mesh(jax.devices()[:1])
    region = jax.shard_map(run, mesh=mesh, in_specs=(P(None, None, "tensor"),) * 4, out_specs=P(None, None, "tensor"))
    return [np.asarray(array, np.float32) for array in jax.jit(region)(*arrays)]


def drawn(length: int, kv_heads: int) -> list[Array]:
    """Queries, keys, values, and the gradient of the output."""
    rng = np.random.default_rng(0)
    heads = (HEADS, kv_heads, kv_heads, HEADS)
    return [jnp.asarray(rng.normal(size=(BATCH, length, h, HEAD_SIZE)), jnp.float32) for h in heads]


FEW_SCORES = dataclasses.replace(CPU, scores_bytes=1)  # one head of keys at a time


@pytest.mark.parametrize(
    ("kv_heads", "rate", "window", "backend"),
    [(2, 0.3, None, CPU), (1, 0.3, 100, FEW_SCORES), pytest.param(2, 0.0, 300, GPU, marks=pytest.mark.full)],
)
def test_grouped_heads_are_repeated_keys(kv_heads, rate, window, backend) -> None:
    """Over several blocks of queries, with dropout's bits of each head of queries, and a window."""
    q, k, v, grad = drawn(CPU.query_block + 44, kv_heads)
    group = HEADS // kv_heads
    own = dataclasses.replace(backend, fused_attention=False)
    actual = results([q, k, v, grad], rate, window, own)
    expected = results([q, *(jnp.repeat(x, group, axis=2) for x in (k, v)), grad], rate, window, own)
    for place in (2, 3):
        expected[place] = expected[place].reshape(*k.shape[:3], group, HEAD_SIZE).sum(axis=3)
    for each, array in zip(actual, expected, strict=True):
        np.testing.assert_allclose(each, array, rtol=1e-4, atol=2e-6 * np.abs(array).max())


@pytest.mark.parametrize("kv_heads", [1, HEADS])
def test_bf16_is_near_fp32(kv_heads: int) -> None:
    """Forward and backward, in a form that XLA's products on CPUs take: some they refuse when the program runs."""
    wide = drawn(16, kv_heads)
    half = results([array.astype(jnp.bfloat16) for array in wide], 0.0, None, CPU)
    for actual, expected in zip(half, results(wide, 0.0, None, CPU), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=0.03 * np.abs(expected).max())

"""Attention in blocks of queries, whose scores are computed again in the backward pass (Dao et al., arXiv 2205.14135),
with dropout that no mesh changes.

Letters: B batch, T query positions, S key positions, H heads, K head size, N heads of all samples, one after the other.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from megajax.backend import Backend
from megajax.models.visibility import Visibility
from megajax.parallel.random import Dropout, RandomBits
from megajax.precision import at_least_fp32

Bits = RandomBits | None  # of every head of every sample; None without dropout


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def blocked_attention(
    q_BTHK: Array, k_BSHK: Array, v_BSHK: Array, visible: Visibility, bits_BH: Bits, rate: float, backend: Backend
) -> Array:
    """Attention of every head, [B, T, H, K]; probabilities are dropped at `rate` by `bits_BH` folded with query and
    key.

    Kept for the backward pass: query, key and value, the result, and two fp32 numbers per head and query.
    """
    return _forward(q_BTHK, k_BSHK, v_BSHK, visible, bits_BH, rate, backend)[0]


def _forward(
    q_BTHK: Array, k_BSHK: Array, v_BSHK: Array, visible: Visibility, bits_BH: Bits, rate: float, backend: Backend
) -> tuple[Array, tuple]:
    batch, num_queries, heads, _ = q_BTHK.shape
    arrays_NTK = (_heads_first(x) for x in (q_BTHK, k_BSHK, v_BSHK))
    inputs = *arrays_NTK, visible.of_heads(heads), jax.tree.map(jnp.ravel, bits_BH)
    forward = partial(_forward_of_heads, rate=rate, block=backend.block_of(num_queries))
    out_NTK, *statistics_NT1 = _in_groups(forward, inputs, backend)
    # Named here, so that selective recomputation, which keeps them, has nothing of this to run again.
    out_BTHK = checkpoint_name(_heads_last(out_NTK, batch, heads), "attention_heads")
    statistics_NT1 = checkpoint_name(statistics_NT1, "attention_statistics")
    return out_BTHK, (q_BTHK, k_BSHK, v_BSHK, visible, bits_BH, out_BTHK, *statistics_NT1)


def _backward(
    rate: float, backend: Backend, residuals: tuple, grad_BTHK: Array
) -> tuple[Array, Array, Array, None, None]:
    q_BTHK, k_BSHK, v_BSHK, visible, bits_BH, out_BTHK, *statistics_NT1 = residuals
    batch, num_queries, heads, _ = q_BTHK.shape
    arrays_NTK = (_heads_first(x) for x in (q_BTHK, k_BSHK, v_BSHK, out_BTHK, grad_BTHK))
    inputs = *arrays_NTK, visible.of_heads(heads), jax.tree.map(jnp.ravel, bits_BH), *statistics_NT1
    backward = partial(_backward_of_heads, rate=rate, block=backend.block_of(num_queries))
    dq_BTHK, dk_BSHK, dv_BSHK = (_heads_last(x, batch, heads) for x in _in_groups(backward, inputs, backend))
    return dq_BTHK, dk_BSHK, dv_BSHK, None, None


blocked_attention.defvjp(_forward, _backward)


def _forward_of_heads(
    q_NTK: Array, k_NSK: Array, v_NSK: Array, visible: Visibility, bits_N: Bits, *, rate: float, block: int
) -> tuple:
    """Attention; the highest score of every query, and the sum of the exponentials of what lies below it."""
    out, highest, total = [], [], []
    for start, end in _blocks(q_NTK.shape[1], block):
        keys, scores_NTS = _seen_scores(q_NTK, k_NSK, visible, start, end)
        highest_NT1 = jnp.max(scores_NTS, axis=-1, keepdims=True)
        weights_NTS = jnp.exp(scores_NTS - highest_NT1)
        total_NT1 = jnp.sum(weights_NTS, axis=-1, keepdims=True)
        drop = _dropped(bits_N, slice(start, end), keys, rate)
        sum_NTK = _product("NTS,NSK->NTK", drop(weights_NTS).astype(v_NSK.dtype), v_NSK[:, keys])
        out.append((sum_NTK / total_NT1).astype(q_NTK.dtype))
        highest.append(highest_NT1)
        total.append(total_NT1)
    return tuple(jnp.concatenate(blocks, axis=1) for blocks in (out, highest, total))


def _backward_of_heads(
    q_NTK: Array,
    k_NSK: Array,
    v_NSK: Array,
    out_NTK: Array,
    grad_NTK: Array,
    visible: Visibility,
    bits_N: Bits,
    highest_NT1: Array,
    total_NT1: Array,
    *,
    rate: float,
    block: int,
) -> tuple[Array, Array, Array]:
    """Gradients of queries, keys and values."""
    dtype = at_least_fp32(q_NTK.dtype)
    # The sum over keys of probability times its gradient, for every query.
    inner_NT1 = jnp.sum(out_NTK.astype(dtype) * grad_NTK.astype(dtype), axis=-1, keepdims=True)
    # XLA keeps the exponentials of unrolled layers from the forward pass. Nothing is added here but a dependency on the
    # gradient: it would divide them there already, and keep both.
    total_NT1 = total_NT1 + 0 * inner_NT1
    q_NKT, grad_NKT = _scaled(q_NTK).swapaxes(1, 2), grad_NTK.swapaxes(1, 2)
    dq_blocks: list[Array] = []
    dk_NKS: Array | None = None
    dv_NKS: Array | None = None
    for start, end in reversed(_blocks(q_NTK.shape[1], block)):
        own = slice(start, end)
        keys, scores_NTS = _seen_scores(q_NTK, k_NSK, visible, start, end)
        weights_NTS = jnp.exp(scores_NTS - highest_NT1[:, own]) / total_NT1[:, own]
        drop = _dropped(bits_N, own, keys, rate)
        dweights_NTS = drop(_product("NTK,NSK->NTS", grad_NTK[:, own], v_NSK[:, keys]))
        dscores_NTS = (weights_NTS * (dweights_NTS - inner_NT1[:, own])).astype(q_NTK.dtype)
        dq_NTK = _product("NTS,NSK->NTK", dscores_NTS, k_NSK[:, keys])
        dq_blocks.insert(0, _scaled(dq_NTK).astype(q_NTK.dtype))
        dv_block = _product("NKT,NTS->NKS", grad_NKT[:, :, own], drop(weights_NTS).astype(q_NTK.dtype))
        dk_block = _product("NKT,NTS->NKS", q_NKT[:, :, own], dscores_NTS)
        dk_NKS = _added(dk_NKS, dk_block, keys, k_NSK.shape[1])
        dv_NKS = _added(dv_NKS, dv_block, keys, k_NSK.shape[1])
    assert dk_NKS is not None and dv_NKS is not None
    dk_NSK, dv_NSK = (grad.swapaxes(1, 2).astype(q_NTK.dtype) for grad in (dk_NKS, dv_NKS))
    return jnp.concatenate(dq_blocks, axis=1), dk_NSK, dv_NSK


def _added(total_NKS: Array | None, block: Array, keys: slice, num_keys: int) -> Array:
    """The sum over blocks with one more, of the keys `keys`."""
    if total_NKS is None:
        return jnp.pad(block, ((0, 0), (0, 0), (keys.start, num_keys - keys.stop)))
    return total_NKS.at[:, :, keys].add(block)


def _seen_scores(q_NTK: Array, k_NSK: Array, visible: Visibility, start: int, end: int) -> tuple[slice, Array]:
    """Which keys the queries `start` to `end` may see, and the scaled products with them, in at least fp32; of keys
    that a query does not see -inf."""
    first, last = visible.key_range(start, end, k_NSK.shape[1])
    keys = slice(first, last)
    scores_NTS = _product("NTK,NSK->NTS", _scaled(q_NTK[:, start:end]), k_NSK[:, keys])
    query_T = start + jnp.arange(end - start, dtype=jnp.int32)
    key_S = first + jnp.arange(last - first, dtype=jnp.int32)
    seen_NTS = visible.mask(query_T, key_S, slice(start, end))
    if seen_NTS is None:
        return keys, scores_NTS
    return keys, jnp.where(seen_NTS, scores_NTS, jnp.asarray(-jnp.inf, scores_NTS.dtype))


def _scaled(x_NTK: Array) -> Array:
    return x_NTK * jnp.asarray(x_NTK.shape[-1] ** -0.5, x_NTK.dtype)


def _product(subscripts: str, x: Array, y: Array) -> Array:
    """Batched matrix products, in at least fp32."""
    return jnp.einsum(subscripts, x, y, preferred_element_type=at_least_fp32(x.dtype))


def _dropped(bits_N: Bits, queries: slice, keys: slice, rate: float) -> Callable[[Array], Array]:
    """Dropout of a block's probabilities."""
    if bits_N is None:
        return lambda x_NTS: x_NTS
    query_T = jnp.arange(queries.start, queries.stop, dtype=jnp.int32)
    key_S = jnp.arange(keys.start, keys.stop, dtype=jnp.int32)
    mask_NTS = bits_N[:, None].fold(query_T[None, :])[:, :, None].last(key_S[None, None, :])
    return lambda x_NTS: Dropout(rate, bits_N).apply(x_NTS, mask_NTS)


def _blocks(length: int, block: int) -> list[tuple[int, int]]:
    return [(start, min(start + block, length)) for start in range(0, length, block)]


def _in_groups(function: Callable, inputs: Any, backend: Backend) -> Any:
    """`function` of arrays [N, …], as many heads at a time as the backend wants."""
    num_heads, length = inputs[0].shape[:2]
    group = num_heads
    if backend.scores_bytes is not None:
        one_head = min(backend.block_of(length), length) * length * jnp.dtype(at_least_fp32(inputs[0].dtype)).itemsize
        fits = [n for n in range(1, num_heads + 1) if num_heads % n == 0 and n * one_head <= backend.scores_bytes]
        group = max(fits, default=1)
    if group == num_heads:
        return function(*inputs)
    grouped = jax.tree.map(lambda x: x.reshape(-1, group, *x.shape[1:]), inputs)
    outputs = lax.map(lambda arguments: function(*arguments), grouped)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs)


def _heads_first(x_BTHK: Array) -> Array:
    x_BHTK = x_BTHK.swapaxes(1, 2)
    return x_BHTK.reshape(-1, *x_BHTK.shape[2:])


def _heads_last(x_NTK: Array, batch: int, heads: int) -> Array:
    return x_NTK.reshape(batch, heads, *x_NTK.shape[1:]).swapaxes(1, 2)

"""Attention in blocks of queries. The backward pass recomputes the scores (Dao et al., arXiv 2205.14135), and dropout
does not depend on the mesh.

Letters: B batch, T query positions, S key positions, H heads, K head size, N heads of keys of all samples, one after
the other, G query heads for each of them, R = G T their rows in a matrix product.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from megajax.core.backend import Backend
from megajax.core.models.attention_mask import AttentionMask, Places
from megajax.core.models.attention_setting import OWN, KeyExchange
from megajax.core.models.sinks import sink_gradients, with_sinks
from megajax.core.parallel.random import Dropout
from megajax.core.precision import at_least_fp32

Limits = tuple[AttentionMask, Dropout]  # what a query sees of the keys, and dropout of every head of every sample


class Method(NamedTuple):
    """How to compute attention of heads from a device's queries, keys and values."""

    forward: Callable  # (q_NGTK, k_NSK, v_NSK, limits, places=, block=) -> heads_NGTK, two statistics_NGT1
    backward: Callable  # (q_NGTK, heads_NGTK, grad_NGTK, k_NSK, v_NSK, limits, statistics, …) -> gradients
    exchange: KeyExchange = OWN


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def blocked_attention(
    method: Method,
    backend: Backend,
    q_BTHK: Array,
    k_BSHK: Array,
    v_BSHK: Array,
    places: Places,
    limits: Limits,
    sink_H: Array | None = None,
) -> Array:
    """Attention of every head, [B, T, H, K]; dropout bits are hashes of the positions of query and key. The residuals
    are queries, keys and values, the result, and two fp32 numbers per head and query. The backward pass gathers again
    what was gathered.
    """
    return _forward(method, backend, q_BTHK, k_BSHK, v_BSHK, places, limits, sink_H)[0]


def _forward(method: Method, backend: Backend, *inputs: Any) -> tuple[Array, tuple]:
    q_BTHK, k_BSHK, v_BSHK, places, limits, sink_H = inputs
    (batch, _, heads, _), kv_heads = q_BTHK.shape, k_BSHK.shape[2]
    keys = (_heads_first(method.exchange.gathered(x)) for x in (k_BSHK, v_BSHK))
    of_heads = _heads_first(q_BTHK, heads // kv_heads), *keys, _limits_of_heads(limits, batch, kv_heads)
    forward = partial(method.forward, places=places, block=_block(q_BTHK, places, backend))
    out_NGTK, highest_NGT1, total_NGT1 = _in_groups(forward, of_heads, backend)
    if sink_H is not None:
        sink_NG11 = _of_all_heads(sink_H, batch, kv_heads, total_NGT1.dtype)
        out_NGTK, highest_NGT1, total_NGT1 = with_sinks(out_NGTK, highest_NGT1, total_NGT1, sink_NG11)
    # Named here so that selective recomputation saves them and reruns none of this.
    out_BTHK = checkpoint_name(_heads_last(out_NGTK, batch, heads), "attention_heads")
    statistics_NGT1 = checkpoint_name((highest_NGT1, total_NGT1), "attention_statistics")
    return out_BTHK, (q_BTHK, k_BSHK, v_BSHK, places, limits, sink_H, out_BTHK, statistics_NGT1)


def _backward(method: Method, backend: Backend, residuals: tuple, grad_BTHK: Array) -> tuple[Array | None, ...]:
    q_BTHK, k_BSHK, v_BSHK, places, limits, sink_H, out_BTHK, statistics_NGT1 = residuals
    (batch, _, heads, _), kv_heads = q_BTHK.shape, k_BSHK.shape[2]
    queries = [_heads_first(x, heads // kv_heads) for x in (q_BTHK, out_BTHK, grad_BTHK)]
    keys = (_heads_first(method.exchange.gathered(x)) for x in (k_BSHK, v_BSHK))
    inputs = *queries, *keys, _limits_of_heads(limits, batch, kv_heads), statistics_NGT1
    backward = partial(method.backward, places=places, block=_block(q_BTHK, places, backend))
    dq_NGTK, *dkeys = _in_groups(backward, inputs, backend)
    dk_BSHK, dv_BSHK = (method.exchange.scattered(_heads_last(x, batch, kv_heads)) for x in dkeys)
    dsink_H = None
    if sink_H is not None:
        (_, out_NGTK, grad_NGTK), (highest_NGT1, total_NGT1) = queries, statistics_NGT1
        sink_NG11 = _of_all_heads(sink_H, batch, kv_heads, total_NGT1.dtype)
        dsink_NGT1 = sink_gradients(out_NGTK, grad_NGTK, highest_NGT1, total_NGT1, sink_NG11)
        dsink_H = jnp.sum(dsink_NGT1.reshape(batch, heads, -1), axis=(0, 2)).astype(sink_H.dtype)
    return _heads_last(dq_NGTK, batch, heads), dk_BSHK, dv_BSHK, None, None, dsink_H


blocked_attention.defvjp(_forward, _backward)


def _block(q_BTHK: Array, places: Places, backend: Backend) -> int:
    """The largest number of queries in a block; each block lies in one piece."""
    return backend.block_of(q_BTHK.shape[1] // places.queries.count)


def _limits_of_heads(limits: Limits, batch: int, kv_heads: int) -> Limits:
    """The mask by key heads, with N in place of B, and dropout of their query heads, [N, G]."""
    visible, drop_BH = limits
    grouped = jax.tree.map(lambda word: word.reshape(word.shape[0] * kv_heads, -1), drop_BH)
    return visible.of_heads(batch, kv_heads), grouped


def _forward_of_heads(q_NGTK: Array, k_NSK: Array, v_NSK: Array, limits: Limits, places: Places, block: int) -> tuple:
    """Attention; the highest score of every query; and the sum of exponentials of the scores relative to it."""
    blocks = _blocks(q_NGTK, k_NSK, v_NSK, limits, places, block)
    divided = (((sum_NRK / total_NR1).astype(q_NGTK.dtype), most, total_NR1) for sum_NRK, most, total_NR1 in blocks)
    return _together(divided, q_NGTK.shape[1])


def attention_sums(q_NGTK: Array, k_NSK: Array, v_NSK: Array, limits: Limits, places: Places, block: int) -> tuple:
    """The sum of the values, weighted by exponentials of the scores relative to the highest one, in at least fp32; the
    highest score of every query; and the sum of the exponentials. A query may see none of the keys."""
    return _together(_blocks(q_NGTK, k_NSK, v_NSK, limits, places, block, some=True), q_NGTK.shape[1])


def _together(blocks: Iterable[tuple[Array, ...]], group: int) -> tuple[Array, ...]:
    """Results of blocks of queries, [N, R, …], as those of all queries, [N, G, T, …]."""
    grouped = [[_grouped_rows(x, group) for x in block] for block in blocks]
    return tuple(jnp.concatenate(each, axis=2) for each in zip(*grouped, strict=True))


def _blocks(
    q_NGTK: Array, k_NSK: Array, v_NSK: Array, limits: Limits, places: Places, block: int, some: bool = False
) -> Iterator[tuple[Array, Array, Array]]:
    """For every block of queries, the sum of the values, the highest score, and the sum of the exponentials."""
    visible, drop_NG = limits
    for own, keys in places.blocks(visible, q_NGTK.shape[2], k_NSK.shape[1], block):
        at, scores_NRS, _ = _seen_scores(q_NGTK, k_NSK, places, visible, own, keys)
        highest_NR1 = jnp.max(scores_NRS, axis=-1, keepdims=True)
        if some:
            highest_NR1 = jnp.maximum(highest_NR1, jnp.finfo(highest_NR1.dtype).min)
        weights_NRS = jnp.exp(scores_NRS - highest_NR1)
        total_NR1 = jnp.sum(weights_NRS, axis=-1, keepdims=True)
        drop = _dropped(drop_NG, *at)
        yield _product("NRS,NSK->NRK", drop(weights_NRS).astype(v_NSK.dtype), v_NSK[:, keys]), highest_NR1, total_NR1


def backward_of_heads(
    q_NGTK: Array,
    out_NGTK: Array,
    grad_NGTK: Array,
    k_NSK: Array,
    v_NSK: Array,
    limits: Limits,
    statistics: Sequence[Array],
    places: Places,
    block: int,
    dtype: Any = None,
) -> tuple[Array, Array, Array]:
    """Gradients of queries, keys and values, in the dtype of the queries or in `dtype`; `statistics` are the two that
    the forward pass returned."""
    (visible, drop_NG), (highest_NGT1, total_NGT1), result = limits, statistics, dtype or q_NGTK.dtype
    dtype, group = at_least_fp32(q_NGTK.dtype), q_NGTK.shape[1]
    # The sum over keys of probability times its gradient, for every query.
    inner_NGT1 = jnp.sum(out_NGTK.astype(dtype) * grad_NGTK.astype(dtype), axis=-1, keepdims=True)
    # XLA keeps the exponentials of unrolled layers from the forward pass. Nothing is added here but a dependency on the
    # gradient: it would divide them there already, and keep both.
    total_NGT1 = total_NGT1 + 0 * inner_NGT1
    q_NKGT, grad_NKGT = (_feature_first(x) for x in (_scaled(q_NGTK), grad_NGTK))
    dq_blocks: list[Array] = []
    dk_NKS = dv_NKS = None
    for own, keys in reversed(places.blocks(visible, q_NGTK.shape[2], k_NSK.shape[1], block)):
        highest_NR1, total_NR1, inner_NR1, grad_NRK = (
            _rows(x, own) for x in (highest_NGT1, total_NGT1, inner_NGT1, grad_NGTK)
        )
        at, scores_NRS, pull = _seen_scores(q_NGTK, k_NSK, places, visible, own, keys)
        weights_NRS = jnp.exp(scores_NRS - highest_NR1) / total_NR1
        drop = _dropped(drop_NG, *at)
        dweights_NRS = drop(_product("NRK,NSK->NRS", grad_NRK, v_NSK[:, keys]))
        dscores_NRS = weights_NRS * (dweights_NRS - inner_NR1)
        dscores_NRS = (dscores_NRS if pull is None else pull(dscores_NRS)[0]).astype(q_NGTK.dtype)
        dq_NRK = _product("NRS,NSK->NRK", dscores_NRS, k_NSK[:, keys])
        dq_blocks.insert(0, _grouped_rows(_scaled(dq_NRK).astype(result), group))
        dv_block = _product("NKR,NRS->NKS", _columns(grad_NKGT, own), drop(weights_NRS).astype(q_NGTK.dtype))
        dk_block = _product("NKR,NRS->NKS", _columns(q_NKGT, own), dscores_NRS)
        dk_NKS = _added(dk_NKS, dk_block, keys, k_NSK.shape[1])
        dv_NKS = _added(dv_NKS, dv_block, keys, k_NSK.shape[1])
    assert dk_NKS is not None and dv_NKS is not None
    dk_NSK, dv_NSK = (grad.swapaxes(1, 2).astype(result) for grad in (dk_NKS, dv_NKS))
    return jnp.concatenate(dq_blocks, axis=2), dk_NSK, dv_NSK


def _rows(x_NGTK: Array, queries: slice) -> Array:
    """Some queries of all heads of a group as rows of a product."""
    own_NGTK = x_NGTK[:, :, queries]
    return own_NGTK.reshape(own_NGTK.shape[0], -1, own_NGTK.shape[-1])


def _grouped_rows(x_NRK: Array, group: int) -> Array:
    """The rows of a product as queries of the heads of a group."""
    return x_NRK.reshape(x_NRK.shape[0], group, -1, x_NRK.shape[-1])


def _feature_first(x_NGTK: Array) -> Array:
    """[N, K, G, T], so that the rows of a product are its columns."""
    num_heads, group, length, _ = x_NGTK.shape
    return x_NGTK.reshape(num_heads, group * length, -1).swapaxes(1, 2).reshape(num_heads, -1, group, length)


def _columns(x_NKGT: Array, queries: slice) -> Array:
    own_NKGT = x_NKGT[..., queries]
    return own_NKGT.reshape(*own_NKGT.shape[:2], -1)


def _added(total_NKS: Array | None, block: Array, keys: slice, num_keys: int) -> Array:
    """The sum over blocks with one more, of the keys `keys`."""
    if total_NKS is None:
        return jnp.pad(block, ((0, 0), (0, 0), (keys.start, num_keys - keys.stop)))
    return total_NKS.at[:, :, keys].add(block)


def _seen_scores(
    q_NGTK: Array, k_NSK: Array, places: Places, visible: AttentionMask, queries: slice, keys: slice
) -> tuple[tuple[Array, Array], Array, Callable[[Array], tuple[Array]] | None]:
    """The positions of these queries and keys; the scaled scores in at least fp32, as the model changes them, -inf for
    keys that a query does not see; and how the model's change pulls gradients back, if there is one."""
    scores_NRS = _product("NRK,NSK->NRS", _scaled(_rows(q_NGTK, queries)), k_NSK[:, keys])
    query_T = places.queries.at(queries.start, queries.stop, q_NGTK.shape[2])
    key_S = places.keys.at(keys.start, keys.stop, k_NSK.shape[1])
    pull = None
    if visible.score is not None:
        scores_NRS, pull = jax.vjp(partial(_changed, visible, query_T, key_S), scores_NRS)
    seen_NTS = visible.of_queries(lambda x_NT: x_NT[:, queries]).mask(query_T[None], key_S[None])
    if seen_NTS is None:
        return (query_T, key_S), scores_NRS, pull
    # Padding alone is the same for all queries, and so for all rows.
    seen_NRS = seen_NTS if seen_NTS.shape[1] == 1 else jnp.tile(seen_NTS, (1, q_NGTK.shape[1], 1))
    return (query_T, key_S), jnp.where(seen_NRS, scores_NRS, jnp.asarray(-jnp.inf, scores_NRS.dtype)), pull


def _changed(visible: AttentionMask, query_T: Array, key_S: Array, scores_NRS: Array) -> Array:
    """Scores as the model changes them."""
    assert visible.head_BH is not None
    scores_NGTS = scores_NRS.reshape(*visible.head_BH.shape, len(query_T), -1)
    head_NG11 = visible.head_BH[:, :, None, None]
    changed_NGTS = visible.scored(scores_NGTS, query_T[None, None, :, None], key_S[None, None, None], head_NG11)
    return changed_NGTS.reshape(scores_NRS.shape)


def _scaled(x_NTK: Array) -> Array:
    return x_NTK * jnp.asarray(x_NTK.shape[-1] ** -0.5, x_NTK.dtype)


@partial(jax.jit, static_argnums=0, inline=True)
def _product(subscripts: str, x: Array, y: Array) -> Array:
    """Batched matrix products, in at least fp32."""
    return jnp.einsum(subscripts, x, y, preferred_element_type=at_least_fp32(x.dtype))


def _dropped(drop_NG: Dropout, query_T: Array, key_S: Array) -> Callable[[Array], Array]:
    """Dropout of a block's probabilities, for queries and keys at these positions."""
    if drop_NG.bits_B is None:
        return lambda x_NRS: x_NRS
    bits_NGT = drop_NG.bits_B[:, :, None].fold(query_T[None, None, :])
    bits_NR = jax.tree.map(lambda word: word.reshape(word.shape[0], -1), bits_NGT)
    mask_NRS = bits_NR[:, :, None].last(key_S[None, None, :])
    return lambda x_NRS: drop_NG.apply(x_NRS, mask_NRS)


def _in_groups(function: Callable, inputs: Any, backend: Backend) -> Any:
    """Apply `function` to arrays [N, …], with as many heads at a time as the backend allows."""
    num_heads, group, length = inputs[0].shape[:3]
    at_once = heads_at_once(num_heads, group, length, jnp.dtype(at_least_fp32(inputs[0].dtype)).itemsize, backend)
    if at_once == num_heads:
        return function(*inputs)
    divided = jax.tree.map(lambda x: x.reshape(-1, at_once, *x.shape[1:]), inputs)
    outputs = lax.map(lambda arguments: function(*arguments), divided)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs)


def heads_at_once(num_heads: int, group: int, length: int, item: int, backend: Backend) -> int:
    """How many of the key heads are computed at a time, each for a group of query heads with so many queries; a score
    has `item` bytes."""
    if backend.scores_bytes is None:
        return num_heads
    one_head = group * min(backend.block_of(length), length) * length * item
    fits = (n for n in range(1, num_heads + 1) if num_heads % n == 0 and n * one_head <= backend.scores_bytes)
    return max(fits, default=1)


def _heads_first(x_BTHK: Array, *group: int) -> Array:
    """[N, T, K], or, for query heads grouped by key heads, [N, G, T, K]."""
    return x_BTHK.swapaxes(1, 2).reshape(-1, *group, x_BTHK.shape[1], x_BTHK.shape[3])


def _of_all_heads(sink_H: Array, batch: int, kv_heads: int, dtype: DTypeLike) -> Array:
    """The sinks of all samples' heads, by key heads."""
    return jnp.tile(sink_H.astype(dtype).reshape(kv_heads, -1), (batch, 1))[:, :, None, None]


def _heads_last(x: Array, batch: int, heads: int) -> Array:
    """[B, T, H, K]."""
    return x.reshape(batch, heads, *x.shape[-2:]).swapaxes(1, 2)


OWN_KEYS = Method(_forward_of_heads, backward_of_heads)  # those that are given

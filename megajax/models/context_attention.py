"""Attention with context parallelism: the devices of a context group share the tokens of every sequence.

- `heads`: every device gets all tokens of some of the heads, by an all-to-all, and gives back its own tokens of all of
  them (DeepSpeed-Ulysses, arXiv 2309.14509). Attention itself is the plain one.
- `gather`: every device gets the keys and values of all tokens (Llama 3, arXiv 2407.21783, section 3.3.2). Its queries
  are two pieces of the sequence, one from the front and one from the back (`TokenShares.context_starts`).
- `window`: a sliding window needs no more than the keys and values right before a device's own tokens.

Letters: B batch, T queries, S keys, H heads, of keys and values maybe fewer, K head size; as in `blocked_attention.py`
N heads of keys of all samples, G heads of queries for each; P tokens of a piece.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from megajax.backend import Backend
from megajax.models.attend import Setting, attend, drop_of_heads
from megajax.models.attention_mask import AttentionMask, Pieces, Places
from megajax.models.blocked_attention import (
    Drop,
    attention_sums,
    backward_of_heads,
    grouped_bits,
    heads_first,
    heads_last,
    in_groups,
)
from megajax.models.config import ModelConfig
from megajax.parallel.boundary import RegionBoundary
from megajax.parallel.collectives import (
    CONTEXT,
    TENSOR,
    axis_index,
    axis_size,
    exchange,
    gather_shards,
    scatter_sum,
    send_on,
    vary,
    varying_axes,
)
from megajax.parallel.tokens import TOKENS, ContextWay
from megajax.precision import at_least_fp32

HEADS = 2  # a dim of q_BTHK


def context_way(model: ModelConfig, sizes: Mapping[str, int]) -> ContextWay:
    """How a model's attention reaches the tokens of other devices on a mesh of axes of these sizes, which fit it."""
    if sizes[CONTEXT] == 1:
        return "none"
    sent = elements_sent(model, sizes)
    if model.context_attention != "auto":
        sent = {way: number for way, number in sent.items() if (way == "heads") == (model.context_attention == "heads")}
    return min(sent, key=sent.__getitem__)


def elements_sent(model: ModelConfig, sizes: Mapping[str, int]) -> dict[ContextWay, float]:
    """How many numbers of a sequence a device sends for a layer's attention, forward and backward, in each way that is
    possible."""
    count, length, window = sizes[CONTEXT], model.sequence_length, model.window_in(model.sequence_length)
    heads, keys = model.num_heads // sizes[TENSOR], max(1, model.num_kv_heads // sizes[TENSOR])
    to_others = model.head_size * length * (count - 1) / count
    sent: dict[ContextWay, float] = {"gather": 6 * keys * to_others}  # gathered, gathered again, reduce-scattered
    if heads % count == 0:
        sent["heads"] = 4 * (heads + copies(keys, count) * keys) / count * to_others
    if window is not None and window - 1 <= length // count:
        sent["window"] = 4 * keys * model.head_size * (window - 1)
    return sent


def copies(num_heads: int, count: int) -> int:
    """How often heads of keys are repeated, so that `count` devices divide them."""
    return count // math.gcd(count, num_heads)


def attend_to_others(q_BTHK: Array, k_BTHK: Array, v_BTHK: Array, setting: Setting, boundary: RegionBoundary) -> Array:
    """Attention of this device's heads and tokens to the tokens of its context group, [B, T, H, K]."""
    if boundary.context == "heads":
        return _by_heads(q_BTHK, k_BTHK, v_BTHK, setting)
    starts, _ = boundary.context_starts(q_BTHK.shape[TOKENS] * axis_size(CONTEXT))
    start_P = jnp.stack([jnp.asarray(start, jnp.int32) for start in starts])
    visible = setting.visible
    if visible.first_key_BT is not None:
        visible = dataclasses.replace(visible, first_key_BT=boundary.context_tokens(visible.first_key_BT))
    setting = setting._replace(visible=visible, places=Places(Pieces(None, start_P)))
    return (_by_window if boundary.context == "window" else _by_gathering)(q_BTHK, k_BTHK, v_BTHK, setting)


def _by_heads(q_BTHK: Array, k_BTHK: Array, v_BTHK: Array, setting: Setting) -> Array:
    times = copies(k_BTHK.shape[HEADS], axis_size(CONTEXT))
    repeated = (jnp.repeat(x, times, HEADS) if times > 1 else x for x in (k_BTHK, v_BTHK))
    q_BSHK, k_BSHK, v_BSHK = (exchange(x, HEADS, TOKENS, CONTEXT) for x in (q_BTHK, *repeated))
    heads_BSHK = attend(q_BSHK, k_BSHK, v_BSHK, setting._replace(head_axes=(TENSOR, CONTEXT)))
    return exchange(heads_BSHK, TOKENS, HEADS, CONTEXT)


def _by_window(q_BTHK: Array, k_BTHK: Array, v_BTHK: Array, setting: Setting) -> Array:
    visible, queries = setting.visible, setting.places.queries
    assert visible.causal and visible.window is not None and queries.start_P is not None
    before = visible.window - 1

    def with_those_before(x: Array) -> Array:
        return jnp.concatenate([send_on(x[:, x.shape[1] - before :]), x], axis=1) if before else x

    # Those before the sequence's first token, which nobody has, are seen by none.
    first_BT = jnp.zeros(q_BTHK.shape[:2], jnp.int32) if visible.first_key_BT is None else visible.first_key_BT
    visible = dataclasses.replace(visible, first_key_BT=jnp.maximum(first_BT, 0))
    places = Places(queries, Pieces(None, queries.start_P - before), ahead=before)
    return attend(
        q_BTHK, with_those_before(k_BTHK), with_those_before(v_BTHK), setting._replace(visible=visible, places=places)
    )


def _by_gathering(q_BTHK: Array, k_BTHK: Array, v_BTHK: Array, setting: Setting) -> Array:
    start_P, dropped = setting.places.queries.start_P, drop_of_heads(setting, q_BTHK.shape[HEADS])
    return _gathered_attention(q_BTHK, k_BTHK, v_BTHK, start_P, setting.visible, dropped, setting.backend)


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _gathered_attention(
    q_BTHK: Array, k_BTHK: Array, v_BTHK: Array, start_P: Array, visible: AttentionMask, drop_BH: Drop, backend: Backend
) -> Array:
    """As `blocked_attention`, with the keys and values of all tokens; those of this device are kept for the backward
    pass, which gathers the others again."""
    return _forward(q_BTHK, k_BTHK, v_BTHK, start_P, visible, drop_BH, backend)[0]


def _forward(
    q_BTHK: Array, k_BTHK: Array, v_BTHK: Array, start_P: Array, visible: AttentionMask, drop_BH: Drop, backend: Backend
) -> tuple[Array, tuple]:
    (batch, length, heads, _), kv_heads = q_BTHK.shape, k_BTHK.shape[HEADS]
    keys = (heads_first(_gathered(x)) for x in (k_BTHK, v_BTHK))
    inputs = heads_first(q_BTHK, heads // kv_heads), *keys, visible.of_heads(kv_heads), grouped_bits(drop_BH, kv_heads)
    forward = partial(_forward_of_heads, start_P=start_P, block=backend.block_of(length // 2))
    out_NGTK, *statistics_NGT1 = in_groups(forward, inputs, backend)
    out_BTHK = checkpoint_name(heads_last(out_NGTK, batch, heads), "attention_heads")
    statistics_NGT1 = checkpoint_name(statistics_NGT1, "attention_statistics")
    return out_BTHK, (q_BTHK, k_BTHK, v_BTHK, start_P, visible, drop_BH, out_BTHK, *statistics_NGT1)


def _backward(backend: Backend, residuals: tuple, grad_BTHK: Array) -> tuple[Array | None, ...]:
    q_BTHK, k_BTHK, v_BTHK, start_P, visible, drop_BH, out_BTHK, *statistics_NGT1 = residuals
    (batch, length, heads, _), kv_heads = q_BTHK.shape, k_BTHK.shape[HEADS]
    queries = (heads_first(x, heads // kv_heads) for x in (q_BTHK, out_BTHK, grad_BTHK))
    keys = (heads_first(_gathered(x)) for x in (k_BTHK, v_BTHK))
    inputs = *queries, *keys, visible.of_heads(kv_heads), grouped_bits(drop_BH, kv_heads), statistics_NGT1
    backward = partial(_backward_of_heads, start_P=start_P, block=backend.block_of(length // 2))
    dq_NGTK, *dkeys = in_groups(backward, inputs, backend)
    dk_BTHK, dv_BTHK = (_scattered(heads_last(x, batch, kv_heads)) for x in dkeys)
    return heads_last(dq_NGTK, batch, heads), dk_BTHK, dv_BTHK, None, None, None


_gathered_attention.defvjp(_forward, _backward)


def _gathered(x_BTHK: Array) -> Array:
    """Those of all tokens, in the order of the sequence: of the devices' pieces, the first ones of all from the front
    on, the second ones of all from the back on."""
    x_BSHK = gather_shards(x_BTHK, TOKENS, CONTEXT)
    front_BCPHK, back_BCPHK = (x.squeeze(2) for x in jnp.split(_by_device(x_BSHK), 2, axis=2))
    ordered = jnp.concatenate([front_BCPHK, back_BCPHK[:, ::-1]], axis=1)
    return ordered.reshape(x_BSHK.shape)


def _scattered(x_BSHK: Array) -> Array:
    """The transpose of `_gathered`."""
    count = axis_size(CONTEXT)
    pieces = x_BSHK.reshape(x_BSHK.shape[0], 2 * count, -1, *x_BSHK.shape[2:])
    by_device = jnp.stack([pieces[:, :count], pieces[:, : count - 1 : -1]], axis=2)
    return scatter_sum(by_device.reshape(x_BSHK.shape), TOKENS, CONTEXT)


def _by_device(x_BSHK: Array) -> Array:
    """[B, C, 2, P, H, K] of what C devices gave one after the other."""
    return x_BSHK.reshape(x_BSHK.shape[0], axis_size(CONTEXT), 2, -1, *x_BSHK.shape[2:])


def _own_with_own(start_P: Array, piece: int) -> Places:
    """Queries and keys of the same piece."""
    here = Pieces(None, start_P[piece : piece + 1])
    return Places(here, here, ahead=0)


def _pieces(x_NGTK: Array, dim: int = 2) -> Array:
    """[2, N, G, P, K] of the queries, or of something for each, along `dim`."""
    return jnp.stack(jnp.split(x_NGTK, 2, axis=dim))


def _of_piece(visible: AttentionMask, piece: int | Array) -> AttentionMask:
    """For the queries of one piece alone."""
    if visible.first_key_BT is None:
        return visible
    first_BP = lax.dynamic_index_in_dim(_pieces(visible.first_key_BT, 1), piece, keepdims=False)
    return dataclasses.replace(visible, first_key_BT=first_BP)


def _earlier_pieces() -> tuple[Array, Array]:
    """Which pieces of the sequence the queries of this device's pieces attend to as a whole: for 2 C - 1 turns, as many
    on every device, the number of its own piece, and that of the keys. The c-th piece from the front has c before it,
    that from the back the others."""
    turn = jnp.arange(2 * axis_size(CONTEXT) - 1, dtype=jnp.int32)
    own = (turn >= axis_index(CONTEXT)).astype(jnp.int32)
    return own, turn - own * axis_index(CONTEXT)


def _forward_of_heads(
    q_NGTK: Array, k_NSK: Array, v_NSK: Array, visible: AttentionMask, drop_NG: Drop, *, start_P: Array, block: int
) -> tuple:
    """As that of `blocked_attention.py`, of this device's two pieces of queries and all keys."""
    sums: Any = partial(attention_sums, drop_NG=drop_NG, block=block)
    if not visible.causal:  # all queries attend to all keys, in one
        found = sums(q_NGTK, k_NSK, v_NSK, visible, places=Places(Pieces(None, start_P)))
        return (found[0] / found[2]).astype(q_NGTK.dtype), *found[1:]
    q_2NGPK, size = _pieces(q_NGTK), q_NGTK.shape[2] // 2

    def keys_from(start: Array) -> list[Array]:
        return [lax.dynamic_slice_in_dim(x, start, size, 1) for x in (k_NSK, v_NSK)]

    own = [
        sums(q_2NGPK[n], *keys_from(start_P[n]), _of_piece(visible, n), places=_own_with_own(start_P, n))
        for n in range(2)
    ]
    total = jax.tree.map(lambda *pieces: jnp.stack(pieces), *own)

    def add(total: Any, turn: tuple[Array, Array]) -> tuple[Any, None]:
        piece, key = turn
        places = Places(Pieces(None, start_P[piece][None]), Pieces(None, (key * size)[None]))
        before = dataclasses.replace(_of_piece(visible, piece), causal=False)  # all of them stand before the queries
        more = sums(q_2NGPK[piece], *keys_from(key * size), before, places=places)
        merged = _merged(jax.tree.map(lambda x: x[piece], total), more)
        return jax.tree.map(lambda x, new: x.at[piece].set(new), total, merged), None

    (sum_, highest, weight), _ = lax.scan(add, total, _earlier_pieces())
    found = (sum_ / weight).astype(q_NGTK.dtype), highest, weight
    return tuple(jnp.concatenate([*x], axis=2) for x in found)


def _merged(one: tuple, other: tuple) -> tuple:
    """The sums over two sets of keys as that over all of them; a query sees at least one key of the first set."""
    highest = jnp.maximum(one[1], other[1])
    scales = [jnp.exp(each[1] - highest) for each in (one, other)]
    return (
        one[0] * scales[0] + other[0] * scales[1],
        highest,
        one[2] * scales[0] + other[2] * scales[1],
    )


def _backward_of_heads(
    q_NGTK: Array,
    out_NGTK: Array,
    grad_NGTK: Array,
    k_NSK: Array,
    v_NSK: Array,
    visible: AttentionMask,
    drop_NG: Drop,
    statistics: Sequence[Array],
    *,
    start_P: Array,
    block: int,
) -> tuple:
    """Gradients of queries, keys and values."""
    queries, dtype, wide = (q_NGTK, out_NGTK, grad_NGTK), q_NGTK.dtype, at_least_fp32(q_NGTK.dtype)
    pull: Any = partial(backward_of_heads, drop_NG=drop_NG, block=block, dtype=wide)
    if not visible.causal:
        own = *queries, k_NSK, v_NSK, visible
        grads = pull(*own, statistics=statistics, places=Places(Pieces(None, start_P)))
        return tuple(grad.astype(dtype) for grad in grads)
    pieces, kept, size = [*map(_pieces, queries)], [*map(_pieces, statistics)], q_NGTK.shape[2] // 2

    def add(total: Any, piece: int | Array, start: Array, visible: AttentionMask, places: Places) -> Any:
        keys = (lax.dynamic_slice_in_dim(x, start, size, 1) for x in (k_NSK, v_NSK))
        own = (x[piece] for x in pieces)
        dq, *dkeys = pull(*own, *keys, visible, statistics=[x[piece] for x in kept], places=places)
        number = start // size
        return (total[0].at[piece].add(dq), *(x.at[number].add(new) for x, new in zip(total[1:], dkeys, strict=True)))

    def before(total: Any, turn: tuple[Array, Array]) -> tuple[Any, None]:
        piece, key = turn
        places = Places(Pieces(None, start_P[piece][None]), Pieces(None, (key * size)[None]))
        visible_ = dataclasses.replace(_of_piece(visible, piece), causal=False)
        return add(total, piece, key * size, visible_, places), None

    of_keys = (k_NSK.shape[1] // size, k_NSK.shape[0], size, k_NSK.shape[2])
    axes = sorted(varying_axes(q_NGTK) | varying_axes(grad_NGTK) | varying_axes(k_NSK) | varying_axes(start_P))
    total = tuple(vary(jnp.zeros(shape, wide), axes) for shape in (pieces[0].shape, of_keys, of_keys))
    for n in range(2):
        total = add(total, n, start_P[n], _of_piece(visible, n), _own_with_own(start_P, n))
    (dq, *dkeys), _ = lax.scan(before, total, _earlier_pieces())
    in_order = (x.swapaxes(0, 1).reshape(k_NSK.shape).astype(dtype) for x in dkeys)
    return jnp.concatenate([*dq], axis=2).astype(dtype), *in_order

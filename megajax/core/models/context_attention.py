"""Attention with context parallelism: the devices of a context group share the tokens of every sequence.

- `heads`: an all-to-all gives every device all tokens of some of the heads; after plain attention, another one returns
  its own tokens of all heads (DeepSpeed-Ulysses, arXiv 2309.14509).
- `gather`: every device gathers the keys and values of all tokens (Llama 3, arXiv 2407.21783, section 3.3.2). Its
  queries are two pieces of the sequence, one from the front and one from the back (`TokenShares.context_starts`).
- `window`: with a sliding window, a device needs only the keys and values right before its own tokens.

Letters: B batch, T queries, S keys, H heads (maybe fewer for keys and values), K head size; as in
`blocked_attention.py`, N key heads of all samples and G query heads per key head; P tokens of a piece.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from megajax.core.models import fused_attention
from megajax.core.models.attend import attend, attend_in_blocks, implementation, with_padded_values
from megajax.core.models.attention_mask import AttentionMask, Pieces, Places
from megajax.core.models.attention_setting import OWN, KeyExchange, Setting
from megajax.core.models.blocked_attention import Limits, Method, attention_sums, backward_of_heads
from megajax.core.models.config import ModelConfig
from megajax.core.parallel.boundary import RegionBoundary
from megajax.core.parallel.collectives import (
    CONTEXT,
    PIPE,
    TENSOR,
    axis_index,
    axis_size,
    exchange,
    gather_shards,
    own_shard,
    scatter_sum,
    send_on,
    vary_as,
)
from megajax.core.parallel.tokens import TOKENS, ContextWay
from megajax.core.precision import OPERAND_DTYPE, at_least_fp32

HEADS = 2  # a dim of q_BTHK
Recomputed = Literal["none", "selective", "layer", "stage"]  # see `--train.remat`


def context_way(
    model: ModelConfig,
    sizes: Mapping[str, int],
    remat: Recomputed = "none",
    precision: str = "fp32",
    *,
    fusible: bool = False,
) -> ContextWay:
    """How a model's attention reaches tokens on other devices, on a mesh with axes of these sizes, which fit the model.
    `auto` chooses heads if attention is `fusible`: cuDNN can compute it, but only over whole sequences. Otherwise
    `auto` chooses whatever sends least."""
    if sizes[CONTEXT] == 1:
        return "none"
    sent, asked = elements_sent(model, sizes, remat, precision), model.context_attention
    if asked == "heads" or (asked == "auto" and fusible and "heads" in sent):
        return "heads"
    return min((way for way in sent if asked == "auto" or way != "heads"), key=sent.__getitem__)


def elements_sent(
    model: ModelConfig, sizes: Mapping[str, int], remat: Recomputed = "none", precision: str = "fp32"
) -> dict[ContextWay, float]:
    """How many numbers per sequence a device sends for one layer's attention (forward, recomputed forward, backward),
    for each possible way; of a model with layers in 8 bits and others, for one in 8 bits."""
    count, length = sizes[CONTEXT], model.sequence_length
    before = AttentionMask.of_model(model, length).before
    heads, keys = model.num_heads // sizes[TENSOR], max(1, model.num_kv_heads // sizes[TENSOR])
    size, values = model.head_size, model.value_head_size
    to_others = length * (count - 1) / count
    again = remat == "layer" or (remat == "stage" and sizes[PIPE] > 1)
    passes = 3 if again else 2
    if model.latent_size and precision not in OPERAND_DTYPE:  # as `LatentAttention` does; backward scatters gradients
        gathered = passes * (model.latent_size + model.rotary_size)
    else:  # and gathers again
        gathered = (passes + 1) * keys * (size + values)
    sent: dict[ContextWay, float] = {"gather": gathered * to_others}
    if heads % count == 0:
        result = heads * values if remat == "selective" else 0  # selective recomputation saves what was received
        exchanged = heads * (size + values) + copies(keys, count) * keys * (size + values)
        sent["heads"] = (passes * exchanged + result) / count * to_others
    if before is not None and before <= length // count:
        receivers = 1 if sizes[PIPE] == 1 else count - 1  # see `send_on`
        sent["window"] = passes * keys * (size + values) * before * receivers
    return sent


def copies(num_heads: int, count: int) -> int:
    """How often key heads must be repeated so that `count` devices divide them."""
    return count // math.gcd(count, num_heads)


def attend_to_others(q_BTHK: Array, k_BTHK: Array, v_BTHK: Array, setting: Setting, boundary: RegionBoundary) -> Array:
    """Attention of this device's heads and tokens to the tokens of its context group, [B, T, H, K]."""
    if boundary.context == "heads":
        return _by_heads(q_BTHK, k_BTHK, v_BTHK, setting)
    starts, _ = boundary.context_starts(q_BTHK.shape[TOKENS] * axis_size(CONTEXT))
    start_P = jnp.stack([jnp.asarray(start, jnp.int32) for start in starts])
    visible = setting.visible.of_queries(boundary.context_tokens)
    setting = setting._replace(visible=visible, places=Places(Pieces(start_P)))
    if boundary.context == "window":
        return _by_window(q_BTHK, k_BTHK, v_BTHK, setting, boundary.together)
    return _by_gathering(q_BTHK, k_BTHK, v_BTHK, setting)


def _by_heads(q_BTHK: Array, k_BTHK: Array, v_BTHK: Array, setting: Setting) -> Array:
    times = copies(k_BTHK.shape[HEADS], axis_size(CONTEXT))
    repeated = (jnp.repeat(x, times, HEADS) if times > 1 else x for x in (k_BTHK, v_BTHK))
    q_BSHK, k_BSHK, v_BSHK = (_received(exchange(x, HEADS, TOKENS, CONTEXT)) for x in (q_BTHK, *repeated))
    if setting.sink_H is not None:
        setting = setting._replace(sink_H=own_shard(setting.sink_H, 0, CONTEXT))
    heads_BSHK = attend(q_BSHK, k_BSHK, v_BSHK, setting._replace(head_axes=(TENSOR, CONTEXT)))
    return exchange(heads_BSHK, TOKENS, HEADS, CONTEXT)


def _by_window(q_BTHK: Array, k_BTHK: Array, v_BTHK: Array, setting: Setting, together: bool) -> Array:
    visible, start_P = setting.visible.in_sequence(*q_BTHK.shape[:2]), setting.places.queries.start_P
    before = visible.before
    assert visible.causal and before is not None and start_P is not None

    def with_those_before(x: Array) -> Array:
        if not before:
            return x
        last = lax.slice_in_dim(x, x.shape[1] - before, None, axis=1)
        return jnp.concatenate([_received(send_on(last, together=together)), x], axis=1)

    places = Places(Pieces(start_P), Pieces(start_P - before), ahead=before)
    setting = setting._replace(visible=visible, places=places)
    return attend(q_BTHK, with_those_before(k_BTHK), with_those_before(v_BTHK), setting)


def _received(x: Array) -> Array:
    """Name received tensors, which selective recomputation saves so that nothing is sent again."""
    return checkpoint_name(x, "attention_received")


def _by_gathering(q_BTHK: Array, k_BTHK: Array, v_BTHK: Array, setting: Setting) -> Array:
    """Keys and values may be those of all tokens already."""
    exchange = KeyExchange(gathered, _scattered) if k_BTHK.shape[TOKENS] == q_BTHK.shape[TOKENS] else OWN
    if implementation(q_BTHK, v_BTHK, setting) == "kernel":
        fused = partial(fused_attention.attend, exchange=exchange)
        return with_padded_values(fused, q_BTHK, k_BTHK, v_BTHK, setting)
    method = Method(_forward_of_heads, _backward_of_heads, exchange)
    return attend_in_blocks(method, q_BTHK, k_BTHK, v_BTHK, setting)


def gathered(x_BTHK: Array) -> Array:
    """Keys or values of all tokens in the order of the sequence. Devices hold two pieces each: the first ones follow
    each other from the front, the second ones from the back."""
    x_BSHK = gather_shards(x_BTHK, TOKENS, CONTEXT)
    by_device_BC2PHK = x_BSHK.reshape(x_BSHK.shape[0], axis_size(CONTEXT), 2, -1, *x_BSHK.shape[2:])
    front_BCPHK, back_BCPHK = (x.squeeze(2) for x in jnp.split(by_device_BC2PHK, 2, axis=2))
    ordered = jnp.concatenate([front_BCPHK, back_BCPHK[:, ::-1]], axis=1)
    return ordered.reshape(x_BSHK.shape)


def _scattered(x_BSHK: Array) -> Array:
    """The transpose of `gathered`."""
    count = axis_size(CONTEXT)
    pieces = x_BSHK.reshape(x_BSHK.shape[0], 2 * count, -1, *x_BSHK.shape[2:])
    by_device = jnp.stack([pieces[:, :count], pieces[:, : count - 1 : -1]], axis=2)
    return scatter_sum(by_device.reshape(x_BSHK.shape), TOKENS, CONTEXT)


@dataclasses.dataclass(frozen=True)
class _Tile:
    """Some of this device's queries, and the keys of one piece of the sequence."""

    first: Array  # index of the first of these queries among this device's queries
    query: Array  # its position in the sequence
    key: Array  # position of the first key
    num_queries: int
    num_keys: int
    limits: Limits  # for all queries of this device
    ahead: int | None = None  # see `Places`

    def queries(self, x_NGTK: Array) -> Array:
        """Select this tile's part of an array with an entry for every query of this device."""
        return lax.dynamic_slice_in_dim(x_NGTK, self.first, self.num_queries, 2)

    def keys(self, x_NSK: Array) -> Array:
        """Select this tile's part of an array with an entry for every key of the sequence."""
        return lax.dynamic_slice_in_dim(x_NSK, self.key, self.num_keys, 1)

    def with_queries(self, x_NGTK: Array, new: Array) -> Array:
        """An array with an entry for every query, with this tile's part replaced by `new`."""
        return lax.dynamic_update_slice_in_dim(x_NGTK, new, self.first, 2)

    def with_keys(self, x_NSK: Array, new: Array) -> Array:
        """An array with an entry for every key, with this tile's part replaced by `new`."""
        return lax.dynamic_update_slice_in_dim(x_NSK, new, self.key, 1)

    @property
    def seen(self) -> dict[str, Any]:
        """What these queries see of these keys, and the positions of both."""
        visible, drop_NG = self.limits
        own = partial(lax.dynamic_slice_in_dim, start_index=self.first, slice_size=self.num_queries, axis=1)
        places = Places(Pieces(self.query[None]), Pieces(self.key[None]), self.ahead)
        return {"limits": (visible.of_queries(own), drop_NG), "places": places}


def tile_queries(piece: int, block: int) -> int:
    """Queries of a piece per tile: at most `block`, in equal tiles if possible, otherwise the whole piece."""
    fewest = -(-piece // block)
    return piece // next((count for count in range(fewest, 2 * fewest + 1) if piece % count == 0), 1)


def _over_tiles(
    step: Callable[[Any, _Tile], Any], totals: Any, limits: Limits, places: Places, piece: int, block: int
) -> Any:
    """`step(totals, tile)` for all keys that this device's queries see, tile by tile, so that only one tile's scores
    exist at a time. Every device has equally many tiles of the same sizes."""
    start_P, count, (visible, drop_NG) = places.queries.start_P, axis_size(CONTEXT), limits
    assert start_P is not None

    def scan(totals: Any, starts: tuple[Array, Array, Array], **others: Any) -> Any:
        def turn(totals: Any, starts: Any) -> tuple[Any, None]:
            first, query, key = starts
            return step(totals, _Tile(first, query, key, num_keys=piece, **others)), None

        return lax.scan(turn, totals, starts)[0]

    if visible.causal:
        # First each piece with itself, then with all keys before it. The device's c-th piece from the front has c
        # pieces before it; its c-th piece from the back has the remaining ones of 2 C - 1.
        first = jnp.arange(0, 2 * piece, piece, dtype=jnp.int32)
        totals = scan(totals, (first, start_P, start_P), num_queries=piece, limits=limits, ahead=0)
        turn = jnp.arange(2 * count - 1, dtype=jnp.int32)
        own = (turn >= axis_index(CONTEXT)).astype(jnp.int32)
        key = turn - own * axis_index(CONTEXT)
    else:
        own, key = (x.reshape(-1) for x in jnp.indices((2, 2 * count), dtype=jnp.int32))
    size = tile_queries(piece, block)
    within = jnp.tile(jnp.arange(0, piece, size, dtype=jnp.int32), len(own))
    own, key = (jnp.repeat(x, piece // size) for x in (own, key))
    starts = piece * own + within, start_P[own] + within, piece * key
    whole = dataclasses.replace(visible, causal=False)
    return scan(totals, starts, num_queries=size, limits=(whole, drop_NG))


def _forward_of_heads(q_NGTK: Array, k_NSK: Array, v_NSK: Array, limits: Limits, places: Places, block: int) -> tuple:
    """Like `_forward_of_heads` in `blocked_attention.py`, for this device's two pieces of queries and all keys."""

    def step(totals: list[Array], tile: _Tile) -> list[Array]:
        found = attention_sums(tile.queries(q_NGTK), tile.keys(k_NSK), tile.keys(v_NSK), block=block, **tile.seen)
        merged = _merged([tile.queries(x) for x in totals], found)
        return [tile.with_queries(x, new) for x, new in zip(totals, merged, strict=True)]

    dtype = at_least_fp32(q_NGTK.dtype)
    each = (v_NSK.shape[-1], 0), (1, jnp.finfo(dtype).min), (1, 0)
    totals = [jnp.full((*q_NGTK.shape[:3], size), value, dtype) for size, value in each]
    totals = vary_as(totals, q_NGTK, k_NSK, places)
    sum_, *statistics = _over_tiles(step, totals, limits, places, q_NGTK.shape[2] // 2, block)
    return (sum_ / statistics[1]).astype(q_NGTK.dtype), *statistics


def _merged(one: Sequence[Array], other: Sequence[Array]) -> tuple[Array, ...]:
    """Combine sums of values, highest scores and sums of exponentials of two sets of keys."""
    highest = jnp.maximum(one[1], other[1])
    scales = [jnp.exp(each[1] - highest) for each in (one, other)]
    sum_, weight = (one[n] * scales[0] + other[n] * scales[1] for n in (0, 2))
    return sum_, highest, weight


def _backward_of_heads(*inputs: Any, places: Places, block: int) -> tuple[Array, ...]:
    """Like `backward_of_heads`, for this device's two pieces of queries and all keys."""
    *of_queries, k_NSK, v_NSK, limits, statistics = inputs
    q_NGTK, dtype = of_queries[0], at_least_fp32(of_queries[0].dtype)
    pull: Any = partial(backward_of_heads, block=block, dtype=dtype)

    def step(totals: list[Array], tile: _Tile) -> list[Array]:
        own = (tile.queries(x) for x in of_queries)
        own_statistics = [tile.queries(x) for x in statistics]
        dq, *dkeys = pull(*own, *map(tile.keys, (k_NSK, v_NSK)), statistics=own_statistics, **tile.seen)
        added = [tile.with_keys(x, tile.keys(x) + new) for x, new in zip(totals[1:], dkeys, strict=True)]
        return [tile.with_queries(totals[0], tile.queries(totals[0]) + dq), *added]

    totals = [vary_as(jnp.zeros(x.shape, dtype), *of_queries, k_NSK, places) for x in (q_NGTK, k_NSK, v_NSK)]
    grads = _over_tiles(step, totals, limits, places, q_NGTK.shape[2] // 2, block)
    return tuple(grad.astype(q_NGTK.dtype) for grad in grads)

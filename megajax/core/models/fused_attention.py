"""Attention by our own kernels for Hopper GPUs (`megajax/core/kernels/`), with any mask, sinks, and dropout that does
not depend on the mesh.

Letters: B batch, T queries, S keys, H heads, of keys and values maybe fewer, K head size.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.core.models.attention_mask import AttentionMask, Places
from megajax.core.models.attention_setting import OWN, KeyExchange, Setting
from megajax.core.models.sinks import sink_gradients, with_sinks
from megajax.core.parallel.collectives import vary_as
from megajax.core.parallel.random import Dropout
from megajax.core.private import has_gpu_kernels

HEAD_SIZES = (64, 96, 128, 192, 256)  # of 192 are DeepSeek's keys, whose values are padded (`attend.py`)


def can(q_BTHK: Array, setting: Setting) -> bool:
    """Whether the kernels can compute this on a Hopper GPU, by types and static values alone."""
    half = jnp.dtype(q_BTHK.dtype) in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
    half = half and setting.visible.score is None
    return has_gpu_kernels() and half and q_BTHK.shape[-1] in HEAD_SIZES and setting.places.keys.count == 1


@jax.named_scope("fused_attention")
def attend(q_BTHK: Array, k_BSHK: Array, v_BSHK: Array, setting: Setting, exchange: KeyExchange = OWN) -> Array:
    """Attention of this device's heads, [B, T, H, K]."""
    drop, visible, places = setting.drop_of_heads(q_BTHK.shape[2]), setting.visible, setting.places
    q_BTHK, k_BSHK, v_BSHK = vary_as([q_BTHK, k_BSHK, v_BSHK], q_BTHK, k_BSHK, v_BSHK, visible, places, drop)
    sink_H = vary_as(setting.sink_H, q_BTHK)
    return _attention(exchange, q_BTHK, k_BSHK, v_BSHK, visible, places, drop, sink_H)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    exchange: KeyExchange,
    q_BTHK: Array,
    k_BSHK: Array,
    v_BSHK: Array,
    visible: AttentionMask,
    places: Places,
    drop_BH: Dropout,
    sink_H: Array | None,
) -> Array:
    return _forward(exchange, q_BTHK, k_BSHK, v_BSHK, visible, places, drop_BH, sink_H)[0]


def _forward(
    exchange: KeyExchange, q_BTHK: Array, k_BSHK: Array, v_BSHK: Array, *others: Any
) -> tuple[Array, tuple[Any, ...]]:
    from megajax.core.kernels.attention import attention  # JAX 0.10 lacks what it imports

    *limits, sink_H = others
    k_all, v_all = map(exchange.gathered, (k_BSHK, v_BSHK))
    outputs = attention(q_BTHK, k_all, v_all, seen(q_BTHK, k_all, *limits))
    out_BTHK, sums_BHT = vary_as(outputs, outputs, q_BTHK)
    if sink_H is not None:
        out_BTHK, highest_BTH1, total_BTH1 = with_sinks(out_BTHK, *_statistics(sums_BHT), _of_heads(sink_H))
        sums_BHT = ((highest_BTH1 + jnp.log(total_BTH1)) / math.log(2))[..., 0].swapaxes(1, 2)
    # Selective recomputation saves both by name, so that no kernel runs twice.
    out_BTHK = checkpoint_name(out_BTHK, "attention_heads")
    sums_BHT = checkpoint_name(sums_BHT, "attention_statistics")
    return out_BTHK, (q_BTHK, k_BSHK, v_BSHK, limits, sink_H, out_BTHK, sums_BHT)


def _backward(exchange: KeyExchange, residuals: tuple[Any, ...], grad_BTHK: Array) -> tuple[Array | None, ...]:
    from megajax.core.kernels.attention import gradients

    q_BTHK, k_BSHK, v_BSHK, limits, sink_H, out_BTHK, sums_BHT = residuals
    k_all, v_all = map(exchange.gathered, (k_BSHK, v_BSHK))
    sees = seen(q_BTHK, k_all, *limits)
    grads = gradients(q_BTHK, k_all, v_all, out_BTHK, sums_BHT, grad_BTHK, sees)
    grads = vary_as(grads, grads, q_BTHK, k_all)
    dsink_H = None
    if sink_H is not None:
        dsink_BTH1 = sink_gradients(out_BTHK, grad_BTHK, *_statistics(sums_BHT), _of_heads(sink_H))
        dsink_H = jnp.sum(dsink_BTH1, axis=(0, 1, 3)).astype(sink_H.dtype)
    return grads[0], exchange.scattered(grads[1]), exchange.scattered(grads[2]), None, None, None, dsink_H


def _statistics(sums_BHT: Array) -> tuple[Array, Array]:
    """The kernels' log-sum-exps as statistics of `models/sinks.py`: highest logits, [B, T, H, 1], with a sum of 1."""
    sums_BTH1 = sums_BHT.swapaxes(1, 2)[..., None] * math.log(2)  # to base e
    return sums_BTH1, jnp.ones_like(sums_BTH1)


def _of_heads(sink_H: Array) -> Array:
    """[1, 1, H, 1]."""
    return sink_H.astype(jnp.float32)[None, None, :, None]


_attention.defvjp(_forward, _backward)


def seen(q_BTHK: Array, k_BSHK: Array, visible: AttentionMask, places: Places, drop_BH: Dropout) -> Any:
    """Which keys each query sees, as indices of the array, and the dropout of its probabilities."""
    from megajax.core.kernels.attention import Seen

    (batch, length), num_keys = q_BTHK.shape[:2], k_BSHK.shape[1]
    query_1T = places.queries.at(0, length, length)[None, :]
    start_11 = places.keys.at(0, 1, num_keys)[None, :]
    lower, upper = visible.bounds(query_1T)
    first = functools.reduce(jnp.maximum, lower, start_11)
    last = functools.reduce(jnp.minimum, upper, start_11 + (num_keys - 1))
    first_BT, last_BT = (jnp.broadcast_to(x - start_11, (batch, length)) for x in (first, last + 1))
    pieces = places.queries.count
    if drop_BH.bits_B is None:
        return Seen(first_BT, last_BT, pieces=pieces)
    bits_BHT = drop_BH.bits_B[:, :, None].fold(query_1T[None])
    # The position of the first key is folded in here, so that the kernels fold in a key's index.
    bits_BHT = bits_BHT.from_index(start_11[None])
    return Seen(first_BT, last_BT, bits_BHT, drop_BH.rate, pieces)

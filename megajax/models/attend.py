"""Attention of heads, by the first implementation that can: another one is a further entry of `IMPLEMENTATIONS`.
`save_expensive` (`models/remat.py`) has to know what the backward pass of each needs.

Letters: B batch, T queries, S keys, H heads, of keys and values maybe fewer, K head size.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from megajax.backend import Backend
from megajax.models.attention_mask import FROM_START, AttentionMask, Places
from megajax.models.blocked_attention import OWN_KEYS, Drop, Method, blocked_attention
from megajax.parallel.collectives import TENSOR, Axes, axis_index
from megajax.parallel.random import Dropout


class Setting(NamedTuple):
    """What attention depends on beside queries, keys and values."""

    visible: AttentionMask
    dropout: Dropout  # of the probabilities, the same for a query and a key wherever they are computed
    backend: Backend
    places: Places = FROM_START
    head_axes: Axes = TENSOR  # that heads are sharded over


@jax.named_scope("attend")
def attend(q_BTHK: Array, k_BSHK: Array, v_BSHK: Array, setting: Setting) -> Array:
    """Attention of this device's heads, [B, T, H, K]."""
    by = next(attend for can, attend in IMPLEMENTATIONS if can(q_BTHK, setting))
    return by(q_BTHK, k_BSHK, v_BSHK, setting)


def cudnn_can(q_BTHK: Array, setting: Setting) -> bool:
    """Whether the fused attention of GPUs can do this, by types and static values alone: half precision; causality,
    padding and sliding windows back from the query. Its dropout would depend on the mesh, and documents are private
    there."""
    visible, dropout, backend, places, _ = setting
    window_fits = visible.window is None or (visible.causal and visible.num_keys_B is None)
    limited = visible.first_key_BT is not None or not window_fits
    fits = backend.fused_attention and cudnn_has(q_BTHK.shape[-1], q_BTHK.dtype)
    return fits and places == FROM_START and dropout.rate == 0 and not limited


def cudnn_has(head_size: int, dtype: DTypeLike) -> bool:
    """Whether it has heads of this size and type."""
    return jnp.dtype(dtype).itemsize == 2 and head_size % 8 == 0 and head_size <= 256


def _by_cudnn(q_BTHK: Array, k_BSHK: Array, v_BSHK: Array, setting: Setting) -> Array:
    visible = setting.visible
    return jax.nn.dot_product_attention(
        q_BTHK,
        k_BSHK,
        v_BSHK,
        is_causal=visible.causal,
        key_value_seq_lengths=visible.num_keys_B,
        # Keys on either side, beside the query's own.
        local_window_size=None if visible.window is None else (visible.window - 1, 0),
        implementation="cudnn",
    )


def _by_blocks(q_BTHK: Array, k_BSHK: Array, v_BSHK: Array, setting: Setting) -> Array:
    return attend_in_blocks(OWN_KEYS, q_BTHK, k_BSHK, v_BSHK, setting)


def attend_in_blocks(method: Method, q_BTHK: Array, k_BSHK: Array, v_BSHK: Array, setting: Setting) -> Array:
    """In blocks of queries, whatever these see, with dropout that no mesh changes."""
    limits = setting.visible, _drop_of_heads(setting, q_BTHK.shape[2])
    return blocked_attention(method, setting.backend, q_BTHK, k_BSHK, v_BSHK, setting.places, limits)


def _drop_of_heads(setting: Setting, num_heads: int) -> Drop:
    """Dropout of every sample and of each of this device's heads, [B, H]."""
    if setting.dropout.rate == 0:
        return None
    head_H = axis_index(setting.head_axes) * num_heads + jnp.arange(num_heads, dtype=jnp.int32)
    return Dropout(setting.dropout.rate, setting.dropout.bits_B[:, None].fold(head_H[None, :]))


# Whether it can do this, by types and static values alone; and (queries, keys, values, setting) -> heads.
IMPLEMENTATIONS = [(cudnn_can, _by_cudnn), (lambda q_BTHK, setting: True, _by_blocks)]

"""Attention of heads, by the first of the backend's implementations that supports it. To add one, add an entry to
`IMPLEMENTATIONS`; `save_expensive` (`models/remat.py`) must know what its backward pass needs.

Letters: B batch, T queries, S keys, H heads, of keys and values maybe fewer, K head size, V that of values.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from megajax.core.models import fused_attention
from megajax.core.models.attention_mask import FROM_START
from megajax.core.models.attention_setting import Setting
from megajax.core.models.blocked_attention import OWN_KEYS, Method, blocked_attention
from megajax.core.parallel.collectives import vary_as


@jax.named_scope("attend")
def attend(q_BTHK: Array, k_BSHK: Array, v_BSHV: Array, setting: Setting) -> Array:
    """Attention of this device's heads, [B, T, H, V]."""
    chosen = IMPLEMENTATIONS[implementation(q_BTHK, v_BSHV, setting)]
    if chosen is IMPLEMENTATIONS["blocks"]:
        return chosen.attend(q_BTHK, k_BSHK, v_BSHV, setting)
    return with_padded_values(chosen.attend, q_BTHK, k_BSHK, v_BSHV, setting)


def implementation(q_BTHK: Array, v_BSHV: Array, setting: Setting) -> str:
    """The implementation that computes this attention."""
    return next(name for name in setting.backend.attention if can_attend(name, q_BTHK, v_BSHV.shape[-1], setting))


def can_attend(name: str, q_BTHK: Array, value_size: int, setting: Setting) -> bool:
    """Whether an implementation can compute this attention. Only blocks can have larger values than keys."""
    return name == "blocks" or (value_size <= q_BTHK.shape[-1] and IMPLEMENTATIONS[name].can(q_BTHK, setting))


def with_padded_values(
    function: Callable[..., Array], q_BTHK: Array, k_BSHK: Array, v_BSHV: Array, setting: Setting
) -> Array:
    """`function(q, k, v, setting)`, for one whose values must be as large as keys: with features of zero."""
    size, missing = v_BSHV.shape[-1], q_BTHK.shape[-1] - v_BSHV.shape[-1]
    v_BSHK = jnp.pad(v_BSHV, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else v_BSHV
    return function(q_BTHK, k_BSHK, v_BSHK, setting)[..., :size]


def cudnn_can(q_BTHK: Array, setting: Setting) -> bool:
    """Whether cuDNN's fused attention supports this, judged by types and static values alone: half precision; causal,
    padded and backward sliding-window masks. Its dropout would depend on the mesh, and JAX offers no public way to mask
    documents, or to add sinks."""
    visible = setting.visible
    window_fits = visible.window is None or (visible.causal and visible.num_keys_B is None)
    limited = visible.first_key_BT is not None or visible.before_B is not None or not window_fits
    limited |= setting.sink_H is not None or visible.score is not None
    fits = cudnn_has(q_BTHK.shape[-1], q_BTHK.dtype) and setting.places == FROM_START
    return fits and setting.dropout.rate == 0 and not limited


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
        local_window_size=None if visible.before is None else (visible.before, 0),
        implementation="cudnn",
    )


def attend_in_blocks(method: Method, q_BTHK: Array, k_BSHK: Array, v_BSHK: Array, setting: Setting) -> Array:
    """In blocks of queries, with any mask and with dropout that does not depend on the mesh."""
    batch, _, heads, _ = q_BTHK.shape
    limits = setting.visible_to_heads(batch, heads), setting.drop_of_heads(heads)
    sink_H = vary_as(setting.sink_H, q_BTHK)
    return blocked_attention(method, setting.backend, q_BTHK, k_BSHK, v_BSHK, setting.places, limits, sink_H)


class Implementation(NamedTuple):
    """A way to compute attention."""

    can: Callable[[Array, Setting], bool]  # (queries, setting): whether it can do this, by types and static values
    attend: Callable[[Array, Array, Array, Setting], Array]  # (queries, keys, values, setting) -> heads


IMPLEMENTATIONS = {
    "cudnn": Implementation(cudnn_can, _by_cudnn),
    "kernel": Implementation(fused_attention.can, fused_attention.attend),
    "blocks": Implementation(lambda q_BTHK, setting: True, partial(attend_in_blocks, OWN_KEYS)),
}

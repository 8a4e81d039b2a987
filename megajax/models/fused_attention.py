"""Attention by our own kernels for Hopper GPUs (`megajax/kernels/`), whatever a query sees, with dropout that no mesh
changes. No GPU has run it yet: it is checked in Pallas' interpreter and compiled for an H200.

Letters: B batch, T queries, S keys, H heads, of keys and values maybe fewer, K head size.
"""

import jax
import jax.numpy as jnp
from jax import Array

from megajax.models.attention_setting import Setting

HEAD_SIZES = (64, 96, 128, 256)


def available() -> bool:
    """Whether this JAX has what the kernels are made of; imports nothing."""
    return jax.__version_info__ >= (0, 11)


def can(q_BTHK: Array, setting: Setting) -> bool:
    """Whether the kernels can do this, by types and static values alone, on a GPU that they are for."""
    half = jnp.dtype(q_BTHK.dtype) in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
    return available() and half and q_BTHK.shape[-1] in HEAD_SIZES and setting.places.keys.count == 1


def attend(q_BTHK: Array, k_BSHK: Array, v_BSHK: Array, setting: Setting) -> Array:
    """Attention of this device's heads, [B, T, H, K]."""
    raise NotImplementedError

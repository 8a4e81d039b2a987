"""Keys and values of the tokens that a model has read, so that a new token is one token's work.

All rows of a batch move in step: the prompts lie in the first slots, each from slot 0 on, and whatever follows them
takes the same slot in every row. The slots between a short prompt and those are never seen (`visible_slots`).
Letters: B batch, T query positions, S slots, C the three of query, key, value, H heads, K head size.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from megajax.backend import Backend
from megajax.models.attention import Attend, attend
from megajax.parallel.random import Dropout
from megajax.precision import at_least_fp32


class Cache(NamedTuple):
    """One layer's keys and values, of this device's rows and heads.

    Heads come before slots, as products take them: with slots first, the whole cache would be transposed for a token.
    """

    key_BHSK: Array
    value_BHSK: Array

    @classmethod
    def of(cls, qkv_BTCHK: Array, num_slots: int) -> "Cache":
        """The keys and values of T tokens in the first of `num_slots` slots."""
        free = [(0, 0), (0, 0), (0, num_slots - qkv_BTCHK.shape[1]), (0, 0)]
        return cls(*(jnp.pad(qkv_BTCHK[:, :, c].swapaxes(1, 2), free) for c in (1, 2)))

    def put(self, qkv_BTCHK: Array, slot: Array) -> "Cache":
        """With the keys and values of T tokens from `slot` on."""
        parts = (self.key_BHSK, qkv_BTCHK[:, :, 1]), (self.value_BHSK, qkv_BTCHK[:, :, 2])
        return Cache(*(lax.dynamic_update_slice_in_dim(old, new.swapaxes(1, 2), slot, axis=2) for old, new in parts))


def visible_slots(num_slots: int, length_B: Array, first_slot: Array, slot: Array) -> Array:
    """The slots that the token in `slot` sees: its prompt's, and those from `first_slot` up to its own. Bool [B, S]."""
    slot_S = jnp.arange(num_slots, dtype=jnp.int32)
    generated_S = (slot_S >= first_slot) & (slot_S <= slot)
    return (slot_S[None] < length_B[:, None]) | generated_S[None]


def reading(num_slots: int, backend: Backend) -> Attend:
    """Attention of whole prompts, which end anywhere, that remembers them in a cache of `num_slots` slots."""

    def read(qkv_BTCHK: Array) -> tuple[Array, Cache]:
        return attend(qkv_BTCHK, Dropout.off(), backend), Cache.of(qkv_BTCHK, num_slots)

    return read


def following(cache: Cache, slot: Array, visible_BS: Array) -> Attend:
    """Attention of one token per row to what is visible of a cache, after the token is put into `slot`."""

    def follow(qkv_BTCHK: Array) -> tuple[Array, Cache]:
        filled = cache.put(qkv_BTCHK, slot)
        product = partial(jnp.einsum, preferred_element_type=at_least_fp32(qkv_BTCHK.dtype))
        q_BHTK = qkv_BTCHK[:, :, 0].swapaxes(1, 2) * jnp.asarray(qkv_BTCHK.shape[-1] ** -0.5, qkv_BTCHK.dtype)
        scores_BHTS = product("BHTK,BHSK->BHTS", q_BHTK, filled.key_BHSK)
        lowest = jnp.asarray(-jnp.inf, scores_BHTS.dtype)
        scores_BHTS = jnp.where(visible_BS[:, None, None], scores_BHTS, lowest)
        weights_BHTS = jnp.exp(scores_BHTS - jnp.max(scores_BHTS, axis=-1, keepdims=True))
        total_BHT1 = jnp.sum(weights_BHTS, axis=-1, keepdims=True)
        weights_BHTS = (weights_BHTS / total_BHT1).astype(qkv_BTCHK.dtype)
        heads_BHTK = product("BHTS,BHSK->BHTK", weights_BHTS, filled.value_BHSK)
        return heads_BHTK.swapaxes(1, 2).astype(qkv_BTCHK.dtype), filled

    return follow

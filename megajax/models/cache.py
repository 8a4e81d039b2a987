"""Keys and values of the tokens that a model has read, so that a new token is one token's work.

All rows of a batch move in step: the prompts lie in the first slots, each from slot 0 on, and whatever follows them
takes the same slot in every row. The slots between a short prompt and those are never seen (`visible_slots`).
Letters: B batch, T query positions, S slots, H heads, K head size.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from megajax.backend import Backend
from megajax.models.attention import Attend, attend
from megajax.models.visibility import CAUSAL
from megajax.parallel.random import Dropout
from megajax.precision import at_least_fp32


class Cache(NamedTuple):
    """One layer's keys and values, of this device's rows and heads.

    Heads come before slots, as products take them: with slots first, the whole cache would be transposed for a token.
    """

    key_BHSK: Array
    value_BHSK: Array

    @classmethod
    def of(cls, k_BTHK: Array, v_BTHK: Array, num_slots: int) -> "Cache":
        """The keys and values of T tokens in the first of `num_slots` slots."""
        free = [(0, 0), (0, 0), (0, num_slots - k_BTHK.shape[1]), (0, 0)]
        return cls(*(jnp.pad(x_BTHK.swapaxes(1, 2), free) for x_BTHK in (k_BTHK, v_BTHK)))

    def put(self, k_BTHK: Array, v_BTHK: Array, slot: Array) -> "Cache":
        """With the keys and values of T tokens from `slot` on."""
        parts = (self.key_BHSK, k_BTHK), (self.value_BHSK, v_BTHK)
        return Cache(*(lax.dynamic_update_slice_in_dim(old, new.swapaxes(1, 2), slot, axis=2) for old, new in parts))


def visible_slots(num_slots: int, length_B: Array, first_slot: Array, slot: Array) -> Array:
    """The slots that the token in `slot` sees: its prompt's, and those from `first_slot` up to its own. Bool [B, S]."""
    slot_S = jnp.arange(num_slots, dtype=jnp.int32)
    generated_S = (slot_S >= first_slot) & (slot_S <= slot)
    return (slot_S[None] < length_B[:, None]) | generated_S[None]


def reading(num_slots: int, backend: Backend) -> Attend:
    """Attention of whole prompts, which end anywhere, that remembers them in a cache of `num_slots` slots."""

    def read(q_BTHK: Array, k_BSHK: Array, v_BSHK: Array) -> tuple[Array, Cache]:
        heads_BTHK = attend(q_BTHK, k_BSHK, v_BSHK, CAUSAL, Dropout.off(), backend)
        return heads_BTHK, Cache.of(k_BSHK, v_BSHK, num_slots)

    return read


def following(cache: Cache, slot: Array, visible_BS: Array) -> Attend:
    """Attention of one token per row to what is visible of a cache, after the token is put into `slot`."""

    def follow(q_BTHK: Array, k_BTHK: Array, v_BTHK: Array) -> tuple[Array, Cache]:
        filled = cache.put(k_BTHK, v_BTHK, slot)
        product = partial(jnp.einsum, preferred_element_type=at_least_fp32(q_BTHK.dtype))
        q_BHTK = q_BTHK.swapaxes(1, 2) * jnp.asarray(q_BTHK.shape[-1] ** -0.5, q_BTHK.dtype)
        scores_BHTS = product("BHTK,BHSK->BHTS", q_BHTK, filled.key_BHSK)
        lowest = jnp.asarray(-jnp.inf, scores_BHTS.dtype)
        scores_BHTS = jnp.where(visible_BS[:, None, None], scores_BHTS, lowest)
        weights_BHTS = jnp.exp(scores_BHTS - jnp.max(scores_BHTS, axis=-1, keepdims=True))
        total_BHT1 = jnp.sum(weights_BHTS, axis=-1, keepdims=True)
        weights_BHTS = (weights_BHTS / total_BHT1).astype(q_BTHK.dtype)
        heads_BHTK = product("BHTS,BHSK->BHTK", weights_BHTS, filled.value_BHSK)
        return heads_BHTK.swapaxes(1, 2).astype(q_BTHK.dtype), filled

    return follow

"""The KV cache: keys and values of the tokens that a model has processed.

All rows of a batch advance together. Prompts occupy the first slots, each starting at slot 0, and the tokens after them
take the same slot in every row. The slots between a short prompt and those are masked out (`slot_positions`).
Letters: B batch, T query positions, S slots, H key heads, K head size, G query heads per key head.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.core.backend import Backend
from megajax.core.models.attention import Attend, Aux, attend_in_context
from megajax.core.models.context import Context
from megajax.core.models.sinks import with_sinks
from megajax.core.parallel.collectives import TENSOR, axis_index
from megajax.core.precision import at_least_fp32


class Cache(NamedTuple):
    """One layer's keys and values for this device's rows and heads. In latent attention the latent of a token, with the
    shared key, is the key and the value of a single head, which every device of a tensor group has.

    Heads come before slots, as products need them: with slots first, each token would transpose the whole cache.
    """

    key_BHSK: Array
    value_BHSK: Array | None  # None: the keys are the values too

    @classmethod
    def of(cls, k_BTHK: Array, v_BTHK: Array | None, num_slots: int) -> "Cache":
        """A cache of `num_slots` slots with the keys and values of T tokens in the first ones."""
        free = [(0, 0), (0, 0), (0, num_slots - k_BTHK.shape[1]), (0, 0)]
        return jax.tree.map(lambda x_BTHK: jnp.pad(x_BTHK.swapaxes(1, 2), free), cls(k_BTHK, v_BTHK))

    def put(self, k_BTHK: Array, v_BTHK: Array | None, slot: Array) -> "Cache":
        """The cache with the keys and values of T tokens written from `slot` on."""

        def written(old_BHSK: Array, new_BTHK: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(old_BHSK, new_BTHK.swapaxes(1, 2), slot, axis=2)

        return jax.tree.map(written, self, Cache(k_BTHK, v_BTHK))


class State(NamedTuple):
    """What a layer of linear attention keeps instead, for this device's rows and heads: the last inputs of its
    convolutions, those of tokens that there never were being zeros, and its state."""

    before_BHWK: tuple[Array, ...]
    state_BHKV: Array


def slot_positions(num_slots: int, length_B: Array, first_slot: Array) -> Array:
    """The positions of the tokens in all slots, int32 [B, S]: first a prompt's, and from `first_slot` on those after
    it. Slots between them are further on than any token sees."""
    slot_1S, length_B1 = jnp.arange(num_slots, dtype=jnp.int32)[None], length_B[:, None]
    later_BS = jnp.where(slot_1S < first_slot, jnp.iinfo(jnp.int32).max, length_B1 + slot_1S - first_slot)
    return jnp.where(slot_1S < length_B1, slot_1S, later_BS)


def prefill(num_slots: int) -> Attend:
    """Attention over whole prompts, of any lengths; also returns their `cache` of `num_slots` slots, of the keys and
    values or of the `latent` that they come from."""

    def read(
        q_BTHK: Array,
        k_BSHK: Array,
        v_BSHK: Array,
        context: Context,
        backend: Backend,
        latent_BS1L: Array | None = None,
        sink_H: Array | None = None,
    ) -> tuple[Array, Aux]:
        heads_BTHK, aux = attend_in_context(q_BTHK, k_BSHK, v_BSHK, context, backend, sink_H)
        kept: tuple[Array, Array | None] = (k_BSHK, v_BSHK) if latent_BS1L is None else (latent_BS1L, None)
        return heads_BTHK, aux | {"cache": Cache.of(*kept, num_slots)}

    return read


def decode_step(cache: Cache, slot: Array, position_B1: Array, position_BS: Array) -> Attend:
    """Attention of one token per row, at `position_B1`, to the slots of a cache, at `position_BS`, after storing the
    token in `slot`; also returns the updated `cache`. `scale` is the factor of scores; None: that of the queries'
    size."""

    def follow(
        q_B1MK: Array,
        k_B1HK: Array,
        v_B1HK: Array | None,
        context: Context,
        backend: Backend,
        scale: float | None = None,
        sink_H: Array | None = None,
    ) -> tuple[Array, Aux]:
        filled = cache.put(k_B1HK, v_B1HK, slot)
        product = partial(jnp.einsum, preferred_element_type=at_least_fp32(q_B1MK.dtype))
        batch, _, num_heads, size = q_B1MK.shape
        q_BHGK = q_B1MK.reshape(batch, k_B1HK.shape[2], -1, size)
        q_BHGK = q_BHGK * jnp.asarray(scale or size**-0.5, q_B1MK.dtype)
        scores_BHGS = product("BHGK,BHSK->BHGS", q_BHGK, filled.key_BHSK)
        if context.visible.score is not None:
            head_M = axis_index(TENSOR) * num_heads + jnp.arange(num_heads, dtype=jnp.int32)
            at = position_B1[:, :, None, None], position_BS[:, None, None]
            scores_BHGS = context.visible.scored(scores_BHGS, *at, head_M.reshape(1, *scores_BHGS.shape[1:3], 1))
        lowest = jnp.asarray(-jnp.inf, scores_BHGS.dtype)
        seen_B1S = context.visible.mask(position_B1, position_BS)
        assert seen_B1S is not None
        scores_BHGS = jnp.where(seen_B1S[:, None], scores_BHGS, lowest)
        highest_BHG1 = jnp.max(scores_BHGS, axis=-1, keepdims=True)
        weights_BHGS = jnp.exp(scores_BHGS - highest_BHG1)
        total_BHG1 = jnp.sum(weights_BHGS, axis=-1, keepdims=True)
        weights_BHGS = (weights_BHGS / total_BHG1).astype(q_B1MK.dtype)
        value_BHSK = filled.key_BHSK if filled.value_BHSK is None else filled.value_BHSK
        heads_BHGK = product("BHGS,BHSK->BHGK", weights_BHGS, value_BHSK)
        if sink_H is not None:
            sink_1HG1 = sink_H.astype(total_BHG1.dtype).reshape(1, *total_BHG1.shape[1:3], 1)
            heads_BHGK = with_sinks(heads_BHGK, highest_BHG1, total_BHG1, sink_1HG1)[0]
        return heads_BHGK.reshape(batch, 1, num_heads, -1).astype(q_B1MK.dtype), {"cache": filled}

    return follow

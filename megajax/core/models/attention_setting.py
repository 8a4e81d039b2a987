"""What attention depends on besides queries, keys and values.

Letters: B batch, H heads.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from megajax.core.backend import Backend
from megajax.core.models.attention_mask import FROM_START, AttentionMask, Places
from megajax.core.parallel.collectives import TENSOR, Axes, axis_index
from megajax.core.parallel.random import Dropout


class KeyExchange(NamedTuple):
    """How a device gets the keys and values of all tokens, once for each pass."""

    gathered: Callable[[Array], Array] = lambda x_BSHK: x_BSHK
    scattered: Callable[[Array], Array] = lambda x_BSHK: x_BSHK  # its transpose


OWN = KeyExchange()  # it has them


class Setting(NamedTuple):
    """What attention depends on besides queries, keys and values."""

    visible: AttentionMask
    dropout: Dropout  # of the probabilities; for a query and a key the same on every device
    backend: Backend
    places: Places = FROM_START
    head_axes: Axes = TENSOR  # that heads are sharded over
    sink_H: Array | None = None  # a logit of each of this device's heads (`models/sinks.py`)

    def drop_of_heads(self, num_heads: int) -> Dropout:
        """Dropout for every sample and each of this device's heads, [B, H]."""
        if self.dropout.bits_B is None:
            return self.dropout
        return Dropout(self.dropout.rate, self.dropout.bits_B[:, None].fold(self._heads(num_heads)[None, :]))

    def visible_to_heads(self, batch: int, num_heads: int) -> AttentionMask:
        """What queries see, with the numbers of this device's heads if scores depend on them."""
        if self.visible.score is None:
            return self.visible
        head_BH = jnp.broadcast_to(self._heads(num_heads)[None, :], (batch, num_heads))
        return replace(self.visible, head_BH=head_BH)

    def _heads(self, num_heads: int) -> Array:
        return axis_index(self.head_axes) * num_heads + jnp.arange(num_heads, dtype=jnp.int32)

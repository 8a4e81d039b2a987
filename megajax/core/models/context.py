"""What the layers of a model receive for a microbatch besides their input."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from megajax.core.models.attention_mask import AttentionMask
from megajax.core.parallel.boundary import F_AND_G, RegionBoundary
from megajax.core.parallel.products import Factors
from megajax.core.parallel.random import Dropout

CacheUse = Literal["none", "new", "extended"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """The same for all layers, except for the dropout bits."""

    dropout: Dropout  # for the rows of the microbatch
    visible: AttentionMask  # what its tokens see
    # Positions of this context rank's tokens, int32, B possibly 1, for layers with rotary positions.
    position_BT: Array | None = None
    # Which tokens of the whole sequence belong to a document, record or prompt, bool; the others are padding, which
    # experts ignore. None in models without experts.
    real_BT: Array | None = None
    row_B: Array | None = None  # rows in the global batch, int32, for recording; None if nothing is recorded
    # The cotangent with which the backward pass of a layer's own loss of one sequence starts, a scalar; None: no loss.
    loss_weight: Array | None = None
    windowed: Array | bool | None = None  # whether the layer has the window, once `in_layer` knows it
    boundary: RegionBoundary = field(default=F_AND_G, metadata={"static": True})  # which device has which tokens
    # Whether attention stores its keys and values in a new cache, or adds them to one (`models/cache.py`).
    cache: CacheUse = field(default="none", metadata={"static": True})
    factors: Factors = None  # of deferred weight gradients (`parallel/products.py`)

    def in_layer(self, layer: Array | int, windowed: Sequence[bool]) -> "Context":
        """What layer number `layer` receives, if layers have the window as given."""
        own: Array | bool = windowed[0]
        if len({*windowed}) > 1:
            own = windowed[layer] if isinstance(layer, int) else jnp.asarray(windowed)[layer]
        return replace(self, dropout=self.dropout.fold(layer), visible=self.visible.in_layer(own), windowed=own)

"""What the layers of a model get of a microbatch beside their input."""

from dataclasses import dataclass, field

import jax
from jax import Array

from megajax.models.attention_mask import AttentionMask
from megajax.parallel.boundary import F_AND_G, RegionBoundary
from megajax.parallel.products import Factors
from megajax.parallel.random import Dropout


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """The same for all layers, but for the bits of dropout."""

    dropout: Dropout  # of the microbatch's rows
    visible: AttentionMask  # what its tokens see
    # Where this device's context tokens stand, int32, B possibly 1, for layers with rotary positions.
    position_BT: Array | None = None
    row_B: Array | None = None  # rows in the global batch, int32, for recording; None: nobody records
    # What the backward pass of a loss that a layer has of one sequence starts from, a scalar; None: there is none.
    loss_weight: Array | None = None
    boundary: RegionBoundary = field(default=F_AND_G, metadata={"static": True})  # who has which of its tokens
    factors: Factors = field(default_factory=dict)  # takes those of deferred weight gradients (`parallel/products.py`)

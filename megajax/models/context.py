"""What the layers of a model get of a microbatch beside their input."""

import dataclasses
from dataclasses import dataclass, field

import jax
from jax import Array

from megajax.models.attention_mask import AttentionMask
from megajax.parallel.deferred import Factors
from megajax.parallel.random import Dropout


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """The same for all layers, but for the bits of dropout.

    Attributes:
        dropout: of the microbatch's rows.
        visible: what its tokens see.
        position_BT: where its tokens stand, int32, B possibly 1, for layers that turn queries and keys by it.
        row_B: its rows in the global batch, int32, for recording; None: nobody records.
        factors: where products leave the factors of weight gradients that are deferred (`parallel/deferred.py`).
    """

    dropout: Dropout
    visible: AttentionMask
    position_BT: Array | None = None
    row_B: Array | None = None
    factors: Factors = field(default_factory=dict)

    def of_layer(self, layer: Array | int) -> "Context":
        """With the dropout of one layer."""
        return dataclasses.replace(self, dropout=self.dropout.fold(layer))

    def deferring_to(self, factors: Factors) -> "Context":
        """With a place for the factors of weight gradients."""
        return dataclasses.replace(self, factors=factors)

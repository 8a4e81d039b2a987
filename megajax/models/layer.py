"""The layer of a transformer: attention and MLP, each with a norm, dropout and a residual addition.

The paper's figure 7: the norm stands before each of the two, inside the residual branch ("pre", (b)), or after the
addition ("post", (a)). Letters: B batch, T tokens, D model.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.backend import Backend
from megajax.models.attention import Attend, Attention, attend
from megajax.models.attention_mask import AttentionMask
from megajax.models.config import ModelConfig
from megajax.models.mlp import MLP
from megajax.models.norms import norm_of
from megajax.parallel.boundary import RegionBoundary
from megajax.parallel.deferred import NO_DUMMIES, Dummies
from megajax.parallel.random import Dropout, NamedKey
from megajax.parallel.sites import site

EMBEDDING_SITE = 0xFFFF_FFFF  # of dropout: stands where the layers' own has their index
ATTENTION_WEIGHTS, ATTENTION_OUTPUT, MLP_OUTPUT = range(3)  # sites of dropout in a layer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """What the layers get beside their input.

    Attributes:
        dropout: of the microbatch.
        visible: what its tokens see.
        position_BT: where its tokens stand, int32, B possibly 1, for layers that turn queries and keys by it.
    """

    dropout: Dropout
    visible: AttentionMask
    position_BT: Array | None = None

    def of_layer(self, layer: Array | int) -> "Context":
        """With the dropout of one layer."""
        return dataclasses.replace(self, dropout=self.dropout.fold(layer))


class Block(nnx.Module):
    """One layer."""

    def __init__(self, config: ModelConfig, key: NamedKey, boundary: RegionBoundary, backend: Backend):
        self.boundary, self.backend, self.order = boundary, backend, config.layer_order
        self.attention_norm = norm_of(config)
        self.attention = Attention(config, key / "attention", boundary, backend)
        self.mlp_norm = norm_of(config)
        self.mlp = MLP(config, key / "mlp", boundary, backend)

    @property
    def products(self) -> dict[str, tuple]:
        """Its products with weights, by the names of their factors (`parallel/deferred.py`)."""
        return self.attention.products | self.mlp.products

    def __call__(self, x_BTD: Array, context: Context, layer: Array | int, dummies: Dummies = NO_DUMMIES) -> Array:
        """Layer number `layer` on all tokens of the sequence, or, with sequence parallelism, on this device's; with
        `dummies` its backward pass leaves the weights' gradients of its products for later."""
        own = context.of_layer(layer)

        def attend_to_visible(q_BTHK: Array, k_BSHK: Array, v_BSHK: Array) -> tuple[Array, None]:
            dropout = own.dropout.fold(ATTENTION_WEIGHTS)
            return attend(q_BTHK, k_BSHK, v_BSHK, own.visible, dropout, self.backend), None

        return self.run(x_BTD, own, attend_to_visible, dummies)[0]

    @jax.named_scope("layer")
    def run(self, x_BTD: Array, context: Context, attend: Attend, dummies: Dummies = NO_DUMMIES) -> tuple[Array, Any]:
        """The layer around any form of attention, with its own dropout; also returns what the attention remembers."""
        dropout, token_T = context.dropout, self.boundary.token_index(x_BTD)
        watched = partial(site, split=self.boundary.split)

        def attention(x_BTD: Array) -> tuple[Array, Any]:
            y_BTD, memory = self.attention(x_BTD, context.position_BT, attend, dummies)
            y_BTD = watched(checkpoint_name(y_BTD, "attention_output"), "attention_output")
            return watched(dropout.fold(ATTENTION_OUTPUT)(y_BTD, token_T), "attention_dropout"), memory

        def mlp(x_BTD: Array) -> Array:
            y_BTD = watched(self.mlp(x_BTD, dummies), "mlp_output")
            return watched(dropout.fold(MLP_OUTPUT)(y_BTD, token_T), "mlp_dropout")

        x_BTD = watched(x_BTD, "input")
        if self.order == "pre":
            y_BTD, memory = attention(watched(self.attention_norm(x_BTD), "attention_norm"))
            x_BTD = watched(x_BTD + y_BTD, "attention_residual")
            return watched(x_BTD + mlp(watched(self.mlp_norm(x_BTD), "mlp_norm")), "output"), memory
        y_BTD, memory = attention(x_BTD)
        x_BTD = watched(self.attention_norm(watched(x_BTD + y_BTD, "attention_residual")), "attention_norm")
        return watched(self.mlp_norm(watched(x_BTD + mlp(x_BTD), "mlp_residual")), "output"), memory

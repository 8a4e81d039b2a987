"""The layer of GPT-2: LayerNorm first, then attention or MLP, then dropout and the residual addition.

Letters: B batch, T tokens, D model.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.backend import Backend
from megajax.models.attention import Attend, Attention, attend
from megajax.models.config import ModelConfig
from megajax.models.transformer import MLP, LayerNorm
from megajax.models.visibility import Visibility
from megajax.parallel.borders import Borders
from megajax.parallel.random import Dropout, NamedKey

LAYER_NORM_EPSILON = 1e-5

ATTENTION_WEIGHTS, ATTENTION_OUTPUT, MLP_OUTPUT = range(3)  # sites of dropout in a layer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """What the layers get beside their input.

    Attributes:
        dropout: of the microbatch.
        visible: what its tokens see.
    """

    dropout: Dropout
    visible: Visibility

    def of_layer(self, layer: Array | int) -> "Context":
        """With the dropout of one layer."""
        return dataclasses.replace(self, dropout=self.dropout.fold(layer))


class Block(nnx.Module):
    """One pre-LayerNorm transformer layer."""

    def __init__(self, config: ModelConfig, key: NamedKey, borders: Borders, backend: Backend):
        self.borders, self.backend = borders, backend
        self.attention_norm = LayerNorm(config.hidden_size, LAYER_NORM_EPSILON)
        self.attention = Attention(config, key / "attention", borders, backend)
        self.mlp_norm = LayerNorm(config.hidden_size, LAYER_NORM_EPSILON)
        self.mlp = MLP(config, key / "mlp", borders, backend)

    def __call__(self, x_BTD: Array, context: Context, layer: Array | int) -> Array:
        """Layer number `layer` on all tokens of the sequence, or, with sequence parallelism, on this device's."""
        own = context.of_layer(layer)

        def attend_to_visible(q_BTHK: Array, k_BSHK: Array, v_BSHK: Array) -> tuple[Array, None]:
            dropout = own.dropout.fold(ATTENTION_WEIGHTS)
            return attend(q_BTHK, k_BSHK, v_BSHK, own.visible, dropout, self.backend), None

        return self.run(x_BTD, own.dropout, attend_to_visible)[0]

    def run(self, x_BTD: Array, dropout: Dropout, attend: Attend) -> tuple[Array, Any]:
        """The layer around any form of attention, with its own dropout; also returns what the attention remembers."""
        token_T = self.borders.token_index(x_BTD)
        y_BTD, memory = self.attention(self.attention_norm(x_BTD), attend)
        y_BTD = checkpoint_name(y_BTD, "attention_output")
        x_BTD = x_BTD + dropout.fold(ATTENTION_OUTPUT)(y_BTD, token_T)
        y_BTD = self.mlp(self.mlp_norm(x_BTD))
        return x_BTD + dropout.fold(MLP_OUTPUT)(y_BTD, token_T), memory

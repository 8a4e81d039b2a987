"""The layer of a transformer: attention and MLP, each with a LayerNorm, dropout and a residual addition.

The paper's figure 7: the LayerNorm stands before each of the two, inside the residual branch ("pre", (b)), or after the
addition ("post", (a)). Letters: B batch, T tokens, D model.
"""

import dataclasses
from collections.abc import Callable
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

EMBEDDING_SITE = 0xFFFF_FFFF  # of dropout: stands where the layers' own has their index
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


@dataclass(frozen=True)
class LayerForm:
    """What families differ in.

    Attributes:
        order: "pre" or "post".
        epsilon: of every LayerNorm.
        activation: of the MLP.
    """

    order: str
    epsilon: float
    activation: Callable[[Array], Array]


class Block(nnx.Module):
    """One layer."""

    def __init__(self, config: ModelConfig, form: LayerForm, key: NamedKey, borders: Borders, backend: Backend):
        self.borders, self.backend, self.order = borders, backend, form.order
        self.attention_norm = LayerNorm(config.hidden_size, form.epsilon)
        self.attention = Attention(config, key / "attention", borders, backend)
        self.mlp_norm = LayerNorm(config.hidden_size, form.epsilon)
        self.mlp = MLP(config, form.activation, key / "mlp", borders, backend)

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

        def attention(x_BTD: Array) -> tuple[Array, Any]:
            y_BTD, memory = self.attention(x_BTD, attend)
            return dropout.fold(ATTENTION_OUTPUT)(checkpoint_name(y_BTD, "attention_output"), token_T), memory

        def mlp(x_BTD: Array) -> Array:
            return dropout.fold(MLP_OUTPUT)(self.mlp(x_BTD), token_T)

        if self.order == "pre":
            y_BTD, memory = attention(self.attention_norm(x_BTD))
            x_BTD = x_BTD + y_BTD
            return x_BTD + mlp(self.mlp_norm(x_BTD)), memory
        y_BTD, memory = attention(x_BTD)
        x_BTD = self.attention_norm(x_BTD + y_BTD)
        return self.mlp_norm(x_BTD + mlp(x_BTD)), memory

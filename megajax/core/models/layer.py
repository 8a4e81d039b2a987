"""The layer of a transformer: attention and MLP, each with a norm, dropout and a residual addition.

As in the paper's figure 7, a norm comes before each of the two, inside the residual branch ("pre", (b)), or after the
addition ("post", (a)). Letters: B batch, T tokens, D model.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from megajax.core.backend import Backend
from megajax.core.models.attention import Attend, Attention, Aux, attend_in_context
from megajax.core.models.config import ModelConfig
from megajax.core.models.context import Context
from megajax.core.models.experts import Mixture
from megajax.core.models.mlp import MLP
from megajax.core.models.norms import norm_of
from megajax.core.parallel.boundary import RegionBoundary
from megajax.core.parallel.random import NamedKey
from megajax.core.parallel.sites import named

EMBEDDING_SITE = 0xFFFF_FFFF  # dropout in the embedding uses this in place of a layer index
DROPOUT_SITES = {"attention_dropout": 1, "mlp_dropout": 2}  # in a layer, besides `ATTENTION_WEIGHTS`


class Block(nnx.Module):
    """One layer, with experts in place of the MLP if the model has them, unless it is `dense`."""

    def __init__(
        self, config: ModelConfig, key: NamedKey, boundary: RegionBoundary, backend: Backend, *, dense: bool = False
    ):
        self.boundary, self.order, self.windowed = boundary, config.layer_order, config.windowed
        self.attention_norm = norm_of(config)
        self.attention = Attention(config, key / "attention", boundary, backend)
        self.mlp_norm = norm_of(config)
        self.mlp: MLP | Mixture
        if config.num_experts and not dense:
            self.mlp = Mixture(config, key / "mlp", boundary, backend)
        else:
            self.mlp = MLP(config, key / "mlp", boundary, backend)

    @property
    def products(self) -> dict[str, tuple]:
        """Its layers of `parallel/layers.py` by the names of their factors; layers with the same input share a name."""
        return self.attention.products | self.mlp.products

    @jax.named_scope("layer")
    def __call__(
        self, x_BTD: Array, context: Context, layer: Array | int, attend: Attend = attend_in_context
    ) -> tuple[Array, Aux]:
        """Layer number `layer`, over all tokens of the sequence, or this device's with sequence parallelism."""
        context = context.in_layer(layer, self.windowed)
        name, token_T = partial(named, split=self.boundary.split), self.boundary.token_index(x_BTD)

        def dropout(y_BTD: Array, site: str) -> Array:
            return name(context.dropout.fold(DROPOUT_SITES[site])(y_BTD, token_T), site)

        x_BTD = name(x_BTD, "input")
        if self.order == "pre":
            y_BTD, aux = self.attention(name(self.attention_norm(x_BTD), "attention_norm"), context, attend)
            x_BTD = name(x_BTD + dropout(y_BTD, "attention_dropout"), "attention_residual")
            y_BTD, figures = self.mlp(name(self.mlp_norm(x_BTD), "mlp_norm"), context, layer)
            return name(x_BTD + dropout(y_BTD, "mlp_dropout"), "output"), aux | figures
        y_BTD, aux = self.attention(x_BTD, context, attend)
        x_BTD = name(x_BTD + dropout(y_BTD, "attention_dropout"), "attention_residual")
        x_BTD = name(self.attention_norm(x_BTD), "attention_norm")
        y_BTD, figures = self.mlp(x_BTD, context, layer)
        x_BTD = name(x_BTD + dropout(y_BTD, "mlp_dropout"), "mlp_residual")
        return name(self.mlp_norm(x_BTD), "output"), aux | figures


def stacked(make: Callable[[Array], Block], num_layers: int) -> Any:
    """The layers `make(0)` … as one module, in which every weight has a leading dim `layers`."""
    layers = nnx.vmap(make, transform_metadata={nnx.PARTITION_NAME: "layers"})
    return layers(jnp.arange(num_layers, dtype=jnp.int32))

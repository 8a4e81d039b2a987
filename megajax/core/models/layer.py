"""The layer of a transformer: attention and MLP, each with a norm, dropout and a residual addition.

As in the paper's figure 7, a norm comes before each of the two, inside the residual branch ("pre", (b)), or after the
addition ("post", (a)). Others have one at the end of the branch, too ("sandwich", Gemma), or only there ("reordered",
OLMo 2), or there unless they have linear attention ("pre-reordered", OLMo hybrid). Letters: B batch, T tokens, D model.
"""

from collections.abc import Callable, Sequence
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
from megajax.core.models.delta import DeltaAttention
from megajax.core.models.experts import Mixture
from megajax.core.models.latent import LatentAttention
from megajax.core.models.mlp import MLP
from megajax.core.models.norms import LayerNorm, norm_of
from megajax.core.parallel.boundary import RegionBoundary
from megajax.core.parallel.random import NamedKey
from megajax.core.parallel.sites import named

EMBEDDING_SITE = 0xFFFF_FFFF  # dropout in the embedding uses this in place of a layer index
AFTER = {"sandwich": "output_norm", "reordered": "norm"}  # the norm at the end of a branch, by the order of the layer
DROPOUT_SITES = {"attention_dropout": 1, "mlp_dropout": 2}  # in a layer, besides `ATTENTION_WEIGHTS`


class Block(nnx.Module):
    """One layer, with experts in place of the MLP if the model has them, unless it is `dense`, and with `linear` or
    softmax attention."""

    def __init__(
        self,
        config: ModelConfig,
        key: NamedKey,
        boundary: RegionBoundary,
        backend: Backend,
        *,
        dense: bool = False,
        linear: bool = False,
    ):
        self.boundary, self.order, self.windowed = boundary, config.layer_order, config.windowed
        self.dropout = config.dropout
        if self.order == "pre-reordered":
            self.order = "pre" if linear else "reordered"
        self.attention_norm, self.mlp_norm = norm_of(config), norm_of(config)
        if self.order == "sandwich":
            self.attention_output_norm, self.mlp_output_norm = norm_of(config), norm_of(config)
        attention: Any = DeltaAttention if linear else LatentAttention if config.latent_size else Attention
        self.attention = attention(config, key / "attention", boundary, backend)
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

        def of_matrices(function: Callable[..., Array], *xs_BTD: Array) -> Array:
            """A function of rows, of matrices [B · T, D]: XLA for GPUs then adds a residual in the product before, does
            not copy it for that, and has cuDNN compute the LayerNorm behind it."""
            if self.boundary.split or self.dropout:  # the addition does not follow the product
                return function(*xs_BTD)
            return function(*(x_BTD.reshape(-1, x_BTD.shape[-1]) for x_BTD in xs_BTD)).reshape(xs_BTD[0].shape)

        def norm(x_BTD: Array, site: str, called: str = "") -> Array:
            run = getattr(self, site)
            return name(of_matrices(run, x_BTD) if isinstance(run, LayerNorm) else run(x_BTD), called or site)

        def branch(x_BTD: Array, part: str, run: Callable[[Array], tuple[Array, Aux]]) -> tuple[Array, Aux]:
            """A part of the layer with its norms, and dropout."""
            first = self.order in ("pre", "sandwich")
            y_BTD, aux = run(norm(x_BTD, f"{part}_norm") if first else x_BTD)
            if self.order in AFTER:
                y_BTD = norm(y_BTD, f"{part}_{AFTER[self.order]}")
            site = f"{part}_dropout"
            return name(context.dropout.fold(DROPOUT_SITES[site])(y_BTD, token_T), site), aux

        x_BTD = name(x_BTD, "input")
        y_BTD, aux = branch(x_BTD, "attention", lambda x_BTD: self.attention(x_BTD, context, attend))
        x_BTD = name(of_matrices(jnp.add, x_BTD, y_BTD), "attention_residual")
        if self.order == "post":
            x_BTD = norm(x_BTD, "attention_norm")
        y_BTD, figures = branch(x_BTD, "mlp", lambda x_BTD: self.mlp(x_BTD, context, layer))
        if self.order == "post":
            return norm(name(of_matrices(jnp.add, x_BTD, y_BTD), "mlp_residual"), "mlp_norm", "output"), aux | figures
        return name(of_matrices(jnp.add, x_BTD, y_BTD), "output"), aux | figures


class Kinds(nnx.Module):
    """Stacked layers of several kinds, each an attribute with the name of its kind."""

    def __init__(self, **kinds: nnx.Module):
        for kind, layers in kinds.items():
            setattr(self, kind, layers)


def stacked(make: Callable[[Array], nnx.Module], numbers: int | Sequence[int]) -> Any:
    """The layers `make(number)` as one module, in which every weight has a leading dim `layers`. Instead of the
    numbers of layers from 0 on, `numbers` can be how many there are."""
    layers = nnx.vmap(make, transform_metadata={nnx.PARTITION_NAME: "layers"})
    return layers(jnp.asarray(range(numbers) if isinstance(numbers, int) else numbers, jnp.int32))

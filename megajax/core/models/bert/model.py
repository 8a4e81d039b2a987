"""BERT: learned positions and token types, layers that attend to all tokens except padding, and a head for its
objective.

`model.layer_order` follows the paper's figure 7: "pre" (b) has a LayerNorm before attention and MLP and a final one,
none on the embedding; "post" (a), the original, has one after each residual addition and on the embedding. Letters:
B batch, C texts to choose from, T tokens, D model, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from megajax.core.backend import Backend
from megajax.core.batch import BatchSpec, choice_form, classes_form, most_masked, pairs_form, span_form
from megajax.core.models.attention_mask import AttentionMask
from megajax.core.models.bert.heads import ChoiceHead, ClassesHead, PretrainingHead, SpanHead
from megajax.core.models.config import ModelConfig
from megajax.core.models.context import Context
from megajax.core.models.family import Family, MatrixProduct
from megajax.core.models.flops import layer_products, weight_products
from megajax.core.models.layer import EMBEDDING_SITE, Block, stacked
from megajax.core.models.norms import LayerNorm
from megajax.core.parallel.boundary import RegionBoundary
from megajax.core.parallel.layers import normal, param
from megajax.core.parallel.random import Dropout, NamedKey
from megajax.core.parallel.sites import named
from megajax.core.parallel.vocabulary import embedding_lookup

TOKEN_TYPES = 2
HEADS = {"pretraining": PretrainingHead, "classes": ClassesHead, "span": SpanHead, "choice": ChoiceHead}


class Bert(nnx.Module):
    """The model; `blocks` holds all layers stacked along a leading dim `layers`."""

    def __init__(self, config: ModelConfig, key: NamedKey, boundary: RegionBoundary, backend: Backend):
        self.boundary, self.config = boundary, config
        hidden, length = config.hidden_size, config.sequence_length

        def table(name: str, rows: int, dim: str) -> nnx.Param:
            return param((rows, hidden), (dim, "embed"), normal(key / name, config.init_std))

        self.table = table("table", config.padded_vocab_size, "vocabulary")
        self.positions = table("positions", length, "position")
        self.token_types = table("token_types", TOKEN_TYPES, "token_type")
        self.norm = LayerNorm(hidden, config.norm_epsilon)  # after the embedding ("post") or the last layer ("pre")
        self.blocks = stacked(lambda n: Block(config, key / "blocks" / n, boundary, backend), config.num_layers)
        self.head: Any = HEADS[config.head](config, key, boundary, backend)

    def context(self, batch: Mapping[str, Array], dropout: Dropout) -> Context:
        """See `FamilyModel`. Tokens see all but padding; in a choice every text is a sequence of its own."""
        length = batch["length"]
        if length.ndim == 2:
            dropout = dropout.of_parts(length.shape[1])
        visible = AttentionMask.of_model(self.config, batch["tokens"].shape[-1]).padded(length.reshape(-1))
        return Context(dropout, visible, boundary=self.boundary)

    def embed(self, batch: Mapping[str, Array], context: Context) -> Array:
        """Embeddings of tokens, positions and token types, with dropout, [B, T, D], or [B C, T, D] for a choice; with
        sequence parallelism only this device's tokens. As in transformers, padding embeddings are not trained."""
        tokens_BT, types_BT = (batch[name].reshape(-1, batch[name].shape[-1]) for name in ("tokens", "token_types"))
        own_BT = self.boundary.context_tokens(tokens_BT)
        x_BTD = embedding_lookup(self.table[...], own_BT, self.boundary)
        if isinstance(self.head, SpanHead):  # it scores padding too; with other heads padding has no gradient anyway
            padding_BT = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None] >= batch["length"][:, None]
            own_BT1 = self.boundary.own_tokens(padding_BT)[..., None]
            x_BTD = jnp.where(own_BT1, jax.lax.stop_gradient(x_BTD), x_BTD)
        x_BTD += self.boundary.own_tokens(self.positions[...][: tokens_BT.shape[1]], 0)[None]
        x_BTD += jnp.take(self.token_types[...], self.boundary.own_tokens(types_BT), axis=0, mode="clip")
        if self.config.layer_order == "post":
            x_BTD = self.norm(x_BTD)
        return context.dropout.fold(EMBEDDING_SITE)(x_BTD, self.boundary.token_index(x_BTD))

    def finished(self, x_BTD: Array) -> Array:
        """The input of the head, from the last layer's output."""
        return named(self.norm(x_BTD), "final_norm", self.boundary.split) if self.config.layer_order == "pre" else x_BTD

    def logits(self, x_BTD: Array) -> tuple[Array, Array]:
        """In pretraining: this device's columns of every token's logits, and the logits of the order."""
        return self.head.logits(self.finished(x_BTD), self.table[...])

    def losses(self, x_BTD: Array, batch: Mapping[str, Array], context: Context) -> dict[str, Array]:
        """See `FamilyModel`."""
        return self.head.losses(self.finished(x_BTD), self.table[...], batch, context)

    def scores(self, x_BTD: Array, batch: Mapping[str, Array]) -> dict[str, tuple[Array, Array]]:
        """See `FamilyModel`."""
        return self.head.scores(self.finished(x_BTD), self.table[...], batch)

    def task_logits(self, x_BTD: Array, batch: Mapping[str, Array]) -> Array:
        """See `FamilyModel`."""
        return self.head.task_logits(self.finished(x_BTD), batch)


def _form(model: ModelConfig) -> BatchSpec:
    if model.head == "choice":
        return choice_form(model.num_classes)
    return {"pretraining": pairs_form, "classes": classes_form, "span": span_form}[model.head]()


def _products(model: ModelConfig, sequences: int, query_block: int) -> list[MatrixProduct]:
    """All products of a step, except those of heads with few outputs."""
    if model.head != "pretraining":
        texts = sequences * (model.num_classes if model.head == "choice" else 1)
        return list(layer_products(model, texts, query_block))
    size, masked = model.hidden_size, most_masked(model.sequence_length)
    heads = {"head": (size, model.padded_vocab_size), "head, dense layer": (size, size)}
    layers = layer_products(model, sequences, query_block)
    return [*layers, *weight_products(sequences * masked, heads)]


FAMILY = Family(
    model=Bert,
    form=_form,
    products=_products,
    linear_embedding=lambda config: config.layer_order == "pre" and config.head != "span",
)

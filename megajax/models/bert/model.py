"""BERT: learned positions and token types, layers that attend to all tokens but padding, and two heads, one for masked
tokens and one for the order of two segments.

`model.layer_order` is the paper's figure 7: "pre" (b) has a LayerNorm before attention and MLP and a final one, none on
the embedding; "post" (a), the original, has one after each residual addition and on the embedding. Letters: B batch,
T tokens, M masked tokens, D model, V vocabulary.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from flax import nnx
from jax import Array

from megajax.backend import Backend
from megajax.batch import IGNORED
from megajax.models.bert.heads import MaskedHead, OrderHead, classified
from megajax.models.config import ModelConfig
from megajax.models.layer import EMBEDDING_SITE, Block, Context, LayerForm
from megajax.models.stack import layer_of, stacked
from megajax.models.transformer import LayerNorm, gelu
from megajax.models.visibility import Visibility
from megajax.parallel.borders import Borders
from megajax.parallel.layers import normal, param
from megajax.parallel.random import Dropout, NamedKey
from megajax.parallel.vocabulary import cross_entropy, embedding_lookup, greedy_ids

LAYER_NORM_EPSILON = 1e-12
TOKEN_TYPES = 2


class Bert(nnx.Module):
    """The model; `blocks` holds all layers stacked along a leading dim `layers`."""

    def __init__(self, config: ModelConfig, key: NamedKey, borders: Borders, backend: Backend):
        self.num_layers, self.borders, self.backend = config.num_layers, borders, backend
        hidden, length = config.hidden_size, config.sequence_length

        def table(name: str, rows: int, dim: str) -> nnx.Param:
            return param((rows, hidden), (dim, "embed"), normal(key / name, config.init_std))

        self.table = table("table", config.padded_vocab_size, "vocabulary")
        self.positions = table("positions", length, "position")
        self.token_types = table("token_types", TOKEN_TYPES, "token_type")
        self.norm = LayerNorm(hidden, LAYER_NORM_EPSILON)  # of the embedding ("post"), or of the last layer ("pre")
        self.order = config.layer_order
        form = LayerForm(self.order, LAYER_NORM_EPSILON, gelu)
        self.blocks = stacked(lambda n: Block(config, form, key / "blocks" / n, borders, backend), self.num_layers)
        self.masked = MaskedHead(config, LAYER_NORM_EPSILON, key / "masked", backend)
        self.pair = OrderHead(config, key / "pair", backend)

    def __call__(self, batch: Mapping[str, Array], dropout: Dropout) -> tuple[Array, Array]:
        """From a batch (`pairs_form`) to the logits of both heads: this device's columns of those of every token, [B,
        T, V / devices of the vocabulary], and those of the order, [B, 2]."""
        context = self.context(batch, dropout)
        x_BTD = self.embed(batch, context)
        for n in range(self.num_layers):
            x_BTD = layer_of(self.blocks, n)(x_BTD, context, n)
        return self.logits(x_BTD)

    def context(self, batch: Mapping[str, Array], dropout: Dropout) -> Context:
        """What every layer gets of a batch: its dropout, and what its tokens see, all but padding."""
        return Context(dropout, Visibility.of_padded(batch["length"]))

    def embed(self, batch: Mapping[str, Array], context: Context) -> Array:
        """Token, position and token-type embedding with dropout, [B, T, D]; with sequence parallelism of this device's
        tokens."""
        x_BTD = embedding_lookup(self.table[...], batch["tokens"], self.borders)
        x_BTD += self.borders.own_tokens(self.positions[...][: batch["tokens"].shape[1]], 0)[None]
        own_BT = self.borders.own_tokens(batch["token_types"])
        x_BTD += jnp.take(self.token_types[...], own_BT, axis=0, mode="clip")
        if self.order == "post":
            x_BTD = self.norm(x_BTD)
        return context.dropout.fold(EMBEDDING_SITE)(x_BTD, self.borders.token_index(x_BTD))

    def finished(self, x_BTD: Array) -> Array:
        """What the heads get, from the last layer's output."""
        return self.norm(x_BTD) if self.order == "pre" else x_BTD

    def logits(self, x_BTD: Array) -> tuple[Array, Array]:
        """Those of both heads, from the last layer's output."""
        x_BTD = self.finished(x_BTD)
        return self.masked(x_BTD, self.table[...], self.borders), self.pair(x_BTD)

    def masked_logits(self, x_BTD: Array, places_BM: Array) -> Array:
        """This device's columns of the logits of the tokens at these places, [B, M, V / devices of the vocabulary]:
        nothing is predicted elsewhere."""
        chosen_BMD = self.borders.at_places(x_BTD, places_BM)
        return self.masked(chosen_BMD, self.table[...], self.borders.of_chosen)

    def losses(self, x_BTD: Array, batch: Mapping[str, Array]) -> dict[str, Array]:
        """Sums, scalars: of the cross-entropy over the masked tokens, over the samples of two segments, and how many of
        those samples' orders are found."""
        x_BTD = self.finished(x_BTD)
        logits_BMV = self.masked_logits(x_BTD, batch["places"])
        masked_BM = cross_entropy(logits_BMV, batch["targets"], self.borders.vocabulary)
        order_B, hit_B = classified(self.pair(x_BTD), batch["order"])
        found = jnp.sum(jnp.maximum(hit_B, 0)).astype(order_B.dtype)
        order, found = self.borders.of_first_token((jnp.sum(order_B), found))
        return {"masked_lm": jnp.sum(masked_BM), "sentence_order": order, "accuracy/sentence_order": found}

    def scores(self, x_BTD: Array, batch: Mapping[str, Array]) -> dict[str, tuple[Array, Array]]:
        """For both losses by name: cross-entropy of every target, and whether it is the most probable one: 1 or 0,
        int32; [B, M] of the masked tokens, [B] of the order. Where the target is `IGNORED` they are 0 and `IGNORED`.
        """
        x_BTD = self.finished(x_BTD)
        logits_BMV, targets_BM = self.masked_logits(x_BTD, batch["places"]), batch["targets"]
        axes = self.borders.vocabulary
        hit_BM = (greedy_ids(logits_BMV, axes) == targets_BM).astype(jnp.int32)
        masked = cross_entropy(logits_BMV, targets_BM, axes), jnp.where(targets_BM == IGNORED, IGNORED, hit_BM)
        return {"masked_lm": masked, "sentence_order": classified(self.pair(x_BTD), batch["order"])}

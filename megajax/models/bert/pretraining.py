"""What BERT is pretrained on: the masked tokens' ids, and whether two segments are in order.

Letters: B batch, T tokens, M masked tokens, D model, V vocabulary, C classes.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from flax import nnx
from jax import Array

from megajax.backend import Backend
from megajax.models.bert.heads import Pooler, classified, sums
from megajax.models.config import ModelConfig
from megajax.models.mlp import gelu
from megajax.models.norms import LayerNorm
from megajax.parallel.boundary import RegionBoundary
from megajax.parallel.layers import Linear, normal, param
from megajax.parallel.random import Dropout, NamedKey
from megajax.parallel.sites import named
from megajax.parallel.vocabulary import cross_entropy, output_logits, target_scores


class MaskedHead(nnx.Module):
    """Dense layer, GeLU, LayerNorm, all duplicated on the devices of a tensor group, and the output product tied to the
    embedding, with a bias of its own."""

    def __init__(self, config: ModelConfig, key: NamedKey, backend: Backend):
        self.vocab_size, self.backend = config.vocab_size, backend
        size = config.hidden_size
        self.dense = Linear(normal(key / "dense", config.init_std), size, size, backend)
        self.norm = LayerNorm(size, config.norm_epsilon)
        self.bias = param((config.padded_vocab_size,), ("vocabulary",), jnp.zeros)

    def __call__(self, x_BTD: Array, table_VD: Array, boundary: RegionBoundary) -> Array:
        """This device's columns of the logits of tokens between these boundary."""
        x_BTD = self.norm(gelu(self.dense(x_BTD)))
        return output_logits(x_BTD, table_VD, self.vocab_size, boundary, self.backend, self.bias[...])


class PretrainingHead(nnx.Module):
    """Both: the logits of masked tokens, and, of the pooled first token, those of the order."""

    def __init__(self, config: ModelConfig, key: NamedKey, boundary: RegionBoundary, backend: Backend):
        self.boundary = boundary
        self.masked = MaskedHead(config, key / "masked", backend)
        self.pooler = Pooler(config, key, backend)
        self.order = Linear(normal(key / "pair" / "output", config.init_std), config.hidden_size, 2, backend)

    def logits(self, x_BTD: Array, table_VD: Array) -> tuple[Array, Array]:
        """This device's columns of those of every token, and those of the order."""
        return self.masked(x_BTD, table_VD, self.boundary), self._order(x_BTD)

    def losses(self, x_BTD: Array, table_VD: Array, batch: Mapping[str, Array], dropout: Dropout) -> dict[str, Array]:
        """Sums, scalars: of the cross-entropy over the masked tokens, over the samples of two segments, and how many of
        those samples' orders are found. Nothing is dropped."""
        axes = self.boundary.vocabulary
        logits_BMV = named(self._masked(x_BTD, table_VD, batch["places"]), "logits", 2, axes)
        masked_BM = named(cross_entropy(logits_BMV, batch["targets"], axes), "losses")
        order, found = self.boundary.of_first_token(sums(*classified(self._order(x_BTD), batch["order"])))
        return {"masked_lm": jnp.sum(masked_BM), "sentence_order": order, "accuracy/sentence_order": found}

    def scores(self, x_BTD: Array, table_VD: Array, batch: Mapping[str, Array]) -> dict[str, tuple[Array, Array]]:
        """See `Model`; [B, M] of the masked tokens, [B] of the order."""
        logits_BMV = self._masked(x_BTD, table_VD, batch["places"])
        masked = target_scores(logits_BMV, batch["targets"], self.boundary.vocabulary)
        return {"masked_lm": masked, "sentence_order": classified(self._order(x_BTD), batch["order"])}

    def _masked(self, x_BTD: Array, table_VD: Array, places_BM: Array) -> Array:
        """This device's columns of the logits at these places, [B, M, V / devices of the vocabulary]: nothing is
        predicted elsewhere."""
        return self.masked(self.boundary.at_places(x_BTD, places_BM), table_VD, self.boundary.of_chosen)

    def _order(self, x_BTD: Array) -> Array:
        return self.order(self.pooler(x_BTD))[:, 0]

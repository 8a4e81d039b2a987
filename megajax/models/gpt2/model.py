"""GPT-2: learned positions, a stack of pre-LayerNorm blocks, a final LayerNorm, and an output head tied to the
embedding.

`GPT2.__call__` is the model as a whole. Whoever distributes the layers calls its pieces instead (`models/family.py`),
inside the one `shard_map` region. Letters: B batch, T tokens, D model, V vocabulary, L layers.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from flax import nnx
from jax import Array

from megajax.backend import Backend
from megajax.batch import IGNORED
from megajax.models.config import ModelConfig
from megajax.models.layer import EMBEDDING_SITE, Block, Context, LayerForm
from megajax.models.stack import layer_of, stacked
from megajax.models.transformer import LayerNorm, gelu_tanh
from megajax.models.visibility import CAUSAL, Visibility
from megajax.parallel.borders import Borders
from megajax.parallel.layers import normal, param
from megajax.parallel.random import Dropout, NamedKey
from megajax.parallel.vocabulary import cross_entropy, embedding_lookup, greedy_ids, output_logits

LAYER_NORM_EPSILON = 1e-5
LAYER = LayerForm("pre", LAYER_NORM_EPSILON, gelu_tanh)


class GPT2(nnx.Module):
    """The model; `blocks` holds all layers stacked along a leading dim `layers`."""

    def __init__(self, config: ModelConfig, key: NamedKey, borders: Borders, backend: Backend):
        self.num_layers, self.vocab_size = config.num_layers, config.vocab_size
        self.borders, self.backend = borders, backend
        hidden, std = config.hidden_size, config.init_std
        self.table = param((config.padded_vocab_size, hidden), ("vocabulary", "embed"), normal(key / "table", std))
        self.positions = param((config.sequence_length, hidden), ("position", "embed"), normal(key / "positions", std))
        self.final_norm = LayerNorm(hidden, LAYER_NORM_EPSILON)
        self.blocks = stacked(lambda n: Block(config, LAYER, key / "blocks" / n, borders, backend), config.num_layers)

    def __call__(self, batch: Mapping[str, Array], dropout: Dropout) -> Array:
        """From a batch (`text_form`) to this device's columns of the logits, [B, T, V / devices of the vocabulary]."""
        context = self.context(batch, dropout)
        x_BTD = self.embed(batch, context)
        for n in range(self.num_layers):
            x_BTD = layer_of(self.blocks, n)(x_BTD, context, n)
        return self.logits(x_BTD)

    def context(self, batch: Mapping[str, Array], dropout: Dropout) -> Context:
        """What every layer gets of a batch: its dropout, and what its tokens see."""
        documents = "positions" in batch
        return Context(dropout, Visibility.of_documents(batch["positions"]) if documents else CAUSAL)

    def embed(self, batch: Mapping[str, Array], context: Context) -> Array:
        """Token plus position embedding with dropout, [B, T, D]; with sequence parallelism of this device's tokens.

        The positions are those in the sequence, or those in the documents where the batch has them.
        """
        x_BTD = embedding_lookup(self.table[...], batch["tokens"], self.borders)
        if "positions" in batch:
            own_BT = self.borders.own_tokens(batch["positions"])
            x_BTD += jnp.take(self.positions[...], own_BT, axis=0, mode="clip")
        else:
            x_BTD += self.borders.own_tokens(self.positions[...][: batch["tokens"].shape[1]], 0)[None]
        return context.dropout.fold(EMBEDDING_SITE)(x_BTD, self.borders.token_index(x_BTD))

    def logits(self, x_BTD: Array) -> Array:
        """This device's columns of the logits, from the last layer's output."""
        return output_logits(self.final_norm(x_BTD), self.table[...], self.vocab_size, self.borders, self.backend)

    def losses(self, x_BTD: Array, batch: Mapping[str, Array], context: Context) -> dict[str, Array]:
        """Sum of the cross-entropy over the targets that are not `IGNORED`, a scalar."""
        losses_BT = cross_entropy(self.logits(x_BTD), batch["targets"], self.borders.vocabulary)
        return {"next_token": jnp.sum(losses_BT)}

    def scores(self, x_BTD: Array, batch: Mapping[str, Array]) -> dict[str, tuple[Array, Array]]:
        """Cross-entropy of every target, and whether it is the most probable id: 1 or 0, int32. Both [B, T].

        Where the target is `IGNORED` they are 0 and `IGNORED`.
        """
        logits_BTV, targets_BT, axes = self.logits(x_BTD), batch["targets"], self.borders.vocabulary
        hit_BT = (greedy_ids(logits_BTV, axes) == targets_BT).astype(jnp.int32)
        loss_BT = cross_entropy(logits_BTV, targets_BT, axes)
        return {"next_token": (loss_BT, jnp.where(targets_BT == IGNORED, IGNORED, hit_BT))}

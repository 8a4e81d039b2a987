"""What BERT predicts from its last layer's output. For a task: a class, a span or a choice, as in Hugging Face's
`BertFor…` classes and Megatron-LM's tasks. In pretraining: the masked tokens' ids, and the order of two
segments.

Letters: B batch, C classes or texts to choose from, T tokens, M masked tokens, D model, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from megajax.core.backend import Backend
from megajax.core.batch import IGNORED
from megajax.core.models.config import ModelConfig
from megajax.core.models.context import Context
from megajax.core.models.mlp import gelu
from megajax.core.models.norms import LayerNorm
from megajax.core.parallel.boundary import RegionBoundary
from megajax.core.parallel.collectives import CONTEXT
from megajax.core.parallel.layers import Linear, normal, param
from megajax.core.parallel.products import product
from megajax.core.parallel.random import Dropout, NamedKey
from megajax.core.parallel.sites import named
from megajax.core.parallel.vocabulary import cross_entropy, output_logits, target_scores
from megajax.core.precision import at_least_fp32

_SITE = 0xFFFF_FFFE  # dropout in the head uses this in place of a layer index


class Pooler(nnx.Module):
    """A dense layer and tanh on the sequence's first token; pretrained to predict the order of two segments."""

    def __init__(self, config: ModelConfig, key: NamedKey, backend: Backend):
        size = config.hidden_size
        self.dense = Linear(normal(key / "pair" / "pooler", config.init_std), size, size, backend)

    def __call__(self, x_BTD: Array) -> Array:
        """[B, 1, D], from the first token that this device has (`TokenShares.of_first_token`)."""
        return jnp.tanh(self.dense(x_BTD[:, :1]))

    def dropped(self, x_BTD: Array, dropout: Dropout) -> Array:
        """The same followed by dropout, as a classifier needs it."""
        return dropout.fold(_SITE)(self(x_BTD), jnp.zeros(1, jnp.int32))


class Scorer(Linear):
    """A product whose outputs are only compared with each other, so a bias that they share changes nothing. The bias is
    frozen: its true gradient is zero, and Adam would amplify rounding."""

    def __call__(self, x_BTD: Array) -> Array:
        bias = jax.lax.stop_gradient(self.bias[...])
        return product(x_BTD, self.weight[...], 1, self.backend) + bias[None, None]


class ClassesHead(nnx.Module):
    """The class of a text, from its first token: pooler, dropout, and a product."""

    name = "classes"

    def __init__(self, config: ModelConfig, key: NamedKey, boundary: RegionBoundary, backend: Backend):
        self.boundary, self.pooler = boundary, Pooler(config, key, backend)
        self.output = Linear(normal(key / self.name, config.init_std), config.hidden_size, config.num_classes, backend)

    def losses(self, x_BTD: Array, table_VD: Array, batch: Mapping[str, Array], context: Context) -> dict[str, Array]:
        """Sums over the rows, scalars: the cross-entropy, and the number of correct rows."""
        loss, right = self._summed(sums(*self._classified(x_BTD, batch, context.dropout)))
        return {self.name: loss, f"accuracy/{self.name}": right}

    def scores(self, x_BTD: Array, table_VD: Array, batch: Mapping[str, Array]) -> dict[str, tuple[Array, Array]]:
        """Every row's cross-entropy, and whether its most probable class is right (`classified`)."""
        return {self.name: self._summed(self._classified(x_BTD, batch, Dropout.off()))}

    def task_logits(self, x_BTD: Array, batch: Mapping[str, Array]) -> Array:
        """See `FamilyModel.task_logits`; in at least fp32."""
        return self._summed(self._logits(x_BTD, batch, Dropout.off()))

    def _classified(self, x_BTD: Array, batch: Mapping[str, Array], dropout: Dropout) -> tuple[Array, Array]:
        return classified(self._logits(x_BTD, batch, dropout), batch["label"])

    def _summed(self, values: Any) -> Any:
        """Values computed from the first token, as terms of the sum over the devices that share a sequence."""
        return self.boundary.of_first_token(values)

    def _logits(self, x_BTD: Array, batch: Mapping[str, Array], dropout: Dropout) -> Array:
        return _wide(self.output(self.pooler.dropped(x_BTD, dropout))[:, 0])


class ChoiceHead(ClassesHead):
    """The right one of several texts, each of which is a sequence of its own in x_BTD: one score per text."""

    name = "choice"

    def __init__(self, config: ModelConfig, key: NamedKey, boundary: RegionBoundary, backend: Backend):
        self.boundary, self.pooler = boundary, Pooler(config, key, backend)
        self.output = Scorer(normal(key / self.name, config.init_std), config.hidden_size, 1, backend)

    def _logits(self, x_BTD: Array, batch: Mapping[str, Array], dropout: Dropout) -> Array:
        """A text that does not exist gets the lowest finite score."""
        there_BC = batch["length"] > 0
        logits_BC = _wide(self.output(self.pooler.dropped(x_BTD, dropout))).reshape(there_BC.shape)
        return jnp.where(there_BC, logits_BC, jnp.finfo(logits_BC.dtype).min)


class SpanHead(ClassesHead):
    """Where a span begins and ends: two scores per token, padding included, as in the original BERT. A row's
    cross-entropy is the mean of both, and it is right if both ends are. There is no dropout."""

    name = "span"

    def __init__(self, config: ModelConfig, key: NamedKey, boundary: RegionBoundary, backend: Backend):
        self.boundary = boundary
        self.output = Scorer(normal(key / self.name, config.init_std), config.hidden_size, 2, backend)

    def _classified(self, x_BTD: Array, batch: Mapping[str, Array], dropout: Dropout) -> tuple[Array, Array]:
        logits_BT2 = self._logits(x_BTD, batch, dropout)
        start_B, start_hit_B = classified(logits_BT2[..., 0], batch["start"])
        end_B, end_hit_B = classified(logits_BT2[..., 1], batch["end"])
        return (start_B + end_B) / 2, jnp.minimum(start_hit_B, end_hit_B)

    def _summed(self, values: Any) -> Any:
        return self.boundary.once(values)  # computed from all tokens' logits, which every device has

    def _logits(self, x_BTD: Array, batch: Mapping[str, Array], dropout: Dropout) -> Array:
        return self.boundary.of_all_tokens(_wide(self.output(x_BTD)))


class MaskedHead(nnx.Module):
    """Dense layer, GeLU and LayerNorm, all replicated over a tensor group, then the output product tied to the
    embedding, with its own bias."""

    def __init__(self, config: ModelConfig, key: NamedKey, backend: Backend):
        self.vocab_size, self.backend = config.vocab_size, backend
        size = config.hidden_size
        self.dense = Linear(normal(key / "dense", config.init_std), size, size, backend)
        self.norm = LayerNorm(size, config.norm_epsilon)
        self.bias = param((config.padded_vocab_size,), ("vocabulary",), jnp.zeros)

    def __call__(self, x_BTD: Array, table_VD: Array, boundary: RegionBoundary) -> Array:
        """This device's columns of the logits, for tokens between these tensor-parallel regions."""
        x_BTD = self.norm(gelu(self.dense(x_BTD)))
        return output_logits(x_BTD, table_VD, self.vocab_size, boundary, self.backend, self.bias[...])


class PretrainingHead(nnx.Module):
    """The logits of masked tokens, and, from the pooled first token, the logits of the order of two segments."""

    def __init__(self, config: ModelConfig, key: NamedKey, boundary: RegionBoundary, backend: Backend):
        self.boundary = boundary
        self.masked = MaskedHead(config, key / "masked", backend)
        self.pooler = Pooler(config, key, backend)
        self.order = Linear(normal(key / "pair" / "output", config.init_std), config.hidden_size, 2, backend)

    def logits(self, x_BTD: Array, table_VD: Array) -> tuple[Array, Array]:
        """This device's columns of every token's logits, and the logits of the order."""
        return self.masked(x_BTD, table_VD, self.boundary), self._order(x_BTD)

    def losses(self, x_BTD: Array, table_VD: Array, batch: Mapping[str, Array], context: Context) -> dict[str, Array]:
        """Sums, scalars: the cross-entropy over masked tokens, the cross-entropy over samples with two segments, and
        how many of these samples' orders are predicted correctly. There is no dropout."""
        axes = self.boundary.vocabulary
        # All devices of a context group compute all of them, but each counts only those of its own tokens.
        logits_BMV = self._masked(x_BTD, table_VD, batch["places"])
        logits_BMV = named(logits_BMV, "logits", 2, axes=axes, partial=(CONTEXT,))
        masked_BM = named(cross_entropy(logits_BMV, batch["targets"], axes), "losses", partial=(CONTEXT,))
        masked_BM = self._counted_here(masked_BM, batch)
        order, found = self.boundary.of_first_token(sums(*classified(self._order(x_BTD), batch["order"])))
        return {"masked_lm": jnp.sum(masked_BM), "sentence_order": order, "accuracy/sentence_order": found}

    def scores(self, x_BTD: Array, table_VD: Array, batch: Mapping[str, Array]) -> dict[str, tuple[Array, Array]]:
        """See `FamilyModel`; [B, M] for masked tokens, [B] for the order."""
        logits_BMV = self._masked(x_BTD, table_VD, batch["places"])
        masked = target_scores(logits_BMV, batch["targets"], self.boundary.vocabulary)
        loss_BM, hit_BM = (self._counted_here(numbers_BM, batch) for numbers_BM in masked)
        order = self.boundary.of_first_token(classified(self._order(x_BTD), batch["order"]))
        return {"masked_lm": (loss_BM, hit_BM), "sentence_order": order}

    def _masked(self, x_BTD: Array, table_VD: Array, places_BM: Array) -> Array:
        """This device's columns of the logits at these places, [B, M, V / devices of the vocabulary]; nothing else is
        predicted."""
        return self.masked(self.boundary.at_places(x_BTD, places_BM), table_VD, self.boundary.of_chosen)

    def _counted_here(self, numbers_BM: Array, batch: Mapping[str, Array]) -> Array:
        return self.boundary.counted_here(numbers_BM, batch["places"], batch["tokens"].shape[1])

    def _order(self, x_BTD: Array) -> Array:
        return self.order(self.pooler(x_BTD))[:, 0]


def classified(logits_BC: Array, class_B: Array) -> tuple[Array, Array]:
    """Cross-entropy of every sample, in at least fp32, and whether its class is the most probable one, int32, both [B].
    Where the class is `IGNORED` they are 0 and `IGNORED`."""
    wide_BC, counted_B = _wide(logits_BC), class_B != IGNORED
    log_BC, place_B1 = jax.nn.log_softmax(wide_BC, axis=-1), jnp.maximum(class_B, 0)[:, None]
    picked_B1 = jnp.take_along_axis(log_BC, place_B1, axis=-1, mode="clip")
    hit_B = (jnp.argmax(logits_BC, axis=-1).astype(jnp.int32) == class_B).astype(jnp.int32)
    loss_B = jnp.where(counted_B, -picked_B1[:, 0], jnp.zeros((), wide_BC.dtype))
    return loss_B, jnp.where(counted_B, hit_B, IGNORED)


def sums(loss_B: Array, hit_B: Array) -> tuple[Array, Array]:
    """The sum of losses and the number of hits, both in the dtype of the losses."""
    return jnp.sum(loss_B), jnp.sum(jnp.maximum(hit_B, 0)).astype(loss_B.dtype)


def _wide(x: Array) -> Array:
    return x.astype(at_least_fp32(x.dtype))

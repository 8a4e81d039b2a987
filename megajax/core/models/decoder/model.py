"""The decoder family: the embedding, with or without learned positions, a stack of blocks whose tokens see the tokens
before them, a final norm, and an output product with the embedding table or a table of its own.

Letters: B batch, T tokens, D model, V vocabulary.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from megajax.core.backend import Backend
from megajax.core.batch import IGNORED, text_form
from megajax.core.models.attention_mask import AttentionMask
from megajax.core.models.config import ModelConfig
from megajax.core.models.context import Context
from megajax.core.models.family import Family, MatrixProduct
from megajax.core.models.flops import layer_products, weight_products
from megajax.core.models.freeze import PREDICTION
from megajax.core.models.layer import EMBEDDING_SITE, Block, Kinds, stacked
from megajax.core.models.norms import norm_of
from megajax.core.models.prediction import PredictionModule, ahead, prediction_losses, real_ahead
from megajax.core.parallel.boundary import RegionBoundary
from megajax.core.parallel.layers import normal, param
from megajax.core.parallel.random import Dropout, NamedKey
from megajax.core.parallel.sites import at, named
from megajax.core.parallel.vocabulary import cross_entropy, embedding_lookup, output_logits, target_scores


class TransformerDecoder(nnx.Module):
    """The model. `blocks` holds the layers stacked along a leading dim `layers`, each kind by itself, except the first
    dense layers of a mixture: these are `dense_blocks`, part of the embedding; and those of prediction modules, part of
    the head."""

    def __init__(
        self,
        config: ModelConfig,
        key: NamedKey,
        boundary: RegionBoundary,
        backend: Backend,
        block: Callable[..., nnx.Module] = Block,
    ):
        """`block(config, key, boundary, backend)` makes a layer."""
        self.vocab_size = config.vocab_size
        self.boundary, self.backend, self.config = boundary, backend, config
        self.has_experts = config.num_experts > 0

        def table(name: str, rows: int, dim: str) -> nnx.Param:
            return param((rows, config.hidden_size), (dim, "embed"), normal(key / name, config.init_std))

        self.table = table("table", config.padded_vocab_size, "vocabulary")
        learned = config.positions == "learned"
        self.positions = table("positions", config.sequence_length, "position") if learned else None
        self.final_norm = norm_of(config)
        self.output = None if config.tied_embedding else table("output", config.padded_vocab_size, "vocabulary")

        def layers(kind: str, numbers: tuple[int, ...]) -> Any:
            make = partial(block, linear=True) if config.is_linear(kind) else block
            return stacked(lambda n: make(config, key / "blocks" / n, boundary, backend), numbers)

        kinds = {kind: layers(kind, numbers) for kind, numbers in config.kinds.items()}
        self.blocks = Kinds(**kinds) if len(kinds) > 1 else kinds[""]

        def dense(n: Array) -> Block:
            return Block(config, key / "dense_blocks" / n, boundary, backend, dense=True, linear=config.linear[0])

        self.dense_blocks = stacked(dense, config.dense_layers) if config.dense_layers else None

        def module(n: Array) -> PredictionModule:
            return PredictionModule(config, key / PREDICTION / n, boundary, backend)

        self.prediction = stacked(module, config.prediction_modules) if config.prediction_modules else None
        # The layers' randomness depends on these indices; those of `blocks` begin with 0, and the modules' follow.
        first = config.num_blocks + config.num_predicting
        self.dense_index = tuple(range(first, first + config.dense_layers))

    def context(self, batch: Mapping[str, Array], dropout: Dropout) -> Context:
        """See `FamilyModel`. If the batch has documents, tokens see only their own, and positions restart in each."""
        length, position_BT = batch["tokens"].shape[1], batch.get("positions")
        visible = AttentionMask.of_model(self.config, length)
        if position_BT is None:
            position_BT = jnp.arange(length, dtype=jnp.int32)[None]
        else:
            visible = visible.in_documents(position_BT)
        rotary_BT = self.boundary.context_tokens(position_BT) if self.positions is None else None
        real_BT = real_tokens(batch) if self.has_experts else None
        return Context(dropout, visible, rotary_BT, real_BT, boundary=self.boundary)

    def embed(self, batch: Mapping[str, Array], context: Context) -> Array:
        """The embedding after the first dense layers, [B, T, D]; with sequence parallelism only this device's
        tokens."""
        x_BTD = self.embedding(batch, context)
        if self.dense_blocks is None:
            return x_BTD
        graph, weights = nnx.split(self.dense_blocks, nnx.Param)

        def layer(x_BTD: Array, numbered: tuple[Array, nnx.State]) -> tuple[Array, None]:
            number, own = numbered
            return nnx.merge(graph, own)(x_BTD, context, number)[0], None

        return lax.scan(layer, x_BTD, (jnp.asarray(self.dense_index, jnp.int32), weights))[0]

    def first_blocks(self) -> list[Block]:
        """The dense layers, one by one."""
        return [] if self.dense_blocks is None else _one_by_one(self.dense_blocks, len(self.dense_index))

    def embedding(self, batch: Mapping[str, Array], context: Context) -> Array:
        """The embedding of tokens and learned positions, with dropout."""
        x_BTD = self._of_tokens(batch["tokens"])
        if self.positions is not None:
            if "positions" in batch:
                own_BT = self.boundary.own_tokens(batch["positions"])
                x_BTD += jnp.take(self.positions[...], own_BT, axis=0, mode="clip")
            else:
                x_BTD += self.boundary.own_tokens(self.positions[...][: batch["tokens"].shape[1]], 0)[None]
        return context.dropout.fold(EMBEDDING_SITE)(x_BTD, self.boundary.token_index(x_BTD))

    def _of_tokens(self, tokens_BT: Array) -> Array:
        x_BTD = embedding_lookup(self.table[...], self.boundary.context_tokens(tokens_BT), self.boundary)
        if self.config.scaled_embedding:
            x_BTD *= jnp.asarray(self.config.hidden_size**0.5, x_BTD.dtype)
        return x_BTD

    def logits(self, x_BTD: Array) -> Array:
        """This device's columns, computed from the last layer's output."""
        return self._logits(self.final_norm(x_BTD))

    def _logits(self, x_BTD: Array) -> Array:
        """The same from what a final norm returns."""
        table_VD = (self.table if self.output is None else self.output)[...]
        x_BTD = named(x_BTD, "final_norm", self.boundary.split)
        return output_logits(x_BTD, table_VD, self.vocab_size, self.boundary, self.backend)

    def losses(self, x_BTD: Array, batch: Mapping[str, Array], context: Context) -> dict[str, Array]:
        """The sum of the cross-entropy over targets that are not `IGNORED`, a scalar."""
        return {"next_token": self._loss(self.logits(x_BTD), batch)}

    def _loss(self, logits_BTV: Array, batch: Mapping[str, Array]) -> Array:
        axes = self.boundary.vocabulary
        logits_BTV = named(logits_BTV, "logits", 2, axes=axes)
        losses_BT = named(cross_entropy(logits_BTV, self.boundary.context_tokens(batch["targets"]), axes), "losses")
        return jnp.sum(losses_BT)

    def predictions(
        self, x_BTD: Array, batch: Mapping[str, Array], context: Context
    ) -> tuple[dict[str, Array], dict[str, Any]]:
        """See `FamilyModel`. While recording, a module's activations are those of its layer."""
        losses, figures, x_BTD = dict[str, Array](), dict[str, Any](), self.final_norm(x_BTD)
        token_T = self.boundary.context_tokens(jnp.arange(batch["tokens"].shape[1], dtype=jnp.int32), 0)
        modules = _one_by_one(self.prediction, self.config.num_predicting)
        for number, (name, module) in enumerate(zip(prediction_losses(self.config), modules, strict=True), start=1):
            layer, further, own = self.config.num_blocks + number - 1, ahead(batch, number), context
            if context.real_BT is not None:
                own = dataclasses.replace(context, real_BT=real_ahead(batch, context.real_BT, number))
            with at(layer, context.row_B, token_T):
                embedded_BTD = self._of_tokens(further["tokens"])
                dropout = context.dropout.fold(layer).fold(EMBEDDING_SITE)
                embedded_BTD = dropout(embedded_BTD, self.boundary.token_index(embedded_BTD))
                x_BTD, found = module(x_BTD, embedded_BTD, own, layer)
                losses[name] = self._loss(self._logits(x_BTD), further)
            figures = jax.tree.map(jnp.add, figures, found) if figures else found
        return losses, figures

    def scores(self, x_BTD: Array, batch: Mapping[str, Array]) -> dict[str, tuple[Array, Array]]:
        """See `FamilyModel`; both [B, T]."""
        targets_BT = self.boundary.context_tokens(batch["targets"])
        loss_BT, hit_BT = target_scores(self.logits(x_BTD), targets_BT, self.boundary.vocabulary)
        return {"next_token": (self.boundary.in_places(loss_BT), self.boundary.in_places(hit_BT))}


def _one_by_one(modules: Any, number: int) -> list[Any]:
    """The first of stacked modules."""
    graph, weights = nnx.split(modules, nnx.Param)
    return [nnx.merge(graph, jax.tree.map(lambda weight, n=n: weight[n], weights)) for n in range(number)]


def real_tokens(batch: Mapping[str, Array]) -> Array:
    """Which tokens of a batch of text belong to a document, record or prompt, bool [B, T]; the others are padding. If
    the batch has positions, padding is what is alone in its document and has no target; otherwise it is what follows a
    row's last target. A batch without targets has no padding."""
    if "targets" not in batch:
        return jnp.ones(batch["tokens"].shape, bool)
    target_BT = batch["targets"] != IGNORED
    if "positions" in batch:
        begin_BT = batch["positions"] == 0
        alone_BT = begin_BT & jnp.pad(begin_BT[:, 1:], ((0, 0), (0, 1)), constant_values=True)
        return target_BT | ~alone_BT
    place_1T = jnp.arange(target_BT.shape[1], dtype=jnp.int32)[None]
    return place_1T <= jnp.max(jnp.where(target_BT, place_1T, -1), axis=1, keepdims=True)


def _products(model: ModelConfig, sequences: int, query_block: int) -> list[MatrixProduct]:
    hidden, tokens, number = model.hidden_size, sequences * model.sequence_length, model.num_predicting
    head = weight_products(tokens, {"head": (hidden, model.padded_vocab_size)}, 1 + number)
    projections = weight_products(tokens, {"prediction": (2 * hidden, hidden)}, number) if number else ()
    return [*layer_products(model, sequences, query_block), *head, *projections]


FAMILY = Family(
    model=TransformerDecoder,
    form=lambda _: text_form(),
    products=_products,
    reset_form=text_form(with_positions=True),
    linear_embedding=lambda config: config.dense_layers == 0,
)

"""Multi-token prediction (DeepSeek-AI, arXiv 2412.19437, section 2.2): after the last layer, modules with a layer each
predict further tokens, by the model's embedding and output product.

Module k = 1, 2, … has for token i the output of the module before it, at first the model's, both after a final norm,
and token i + k; it predicts token i + k + 1. The report leaves open whether that norm comes before, and writes the
projection's two inputs in the other order: here both are as where transformers runs the published weights.

Every device has the numbers of a whole sequence's tokens, so shifting them is local.

Letters: B batch, T tokens, D model.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from megajax.core.backend import Backend
from megajax.core.batch import IGNORED
from megajax.core.models.config import ModelConfig
from megajax.core.models.context import Context
from megajax.core.models.freeze import PREDICTION
from megajax.core.models.layer import Block
from megajax.core.models.norms import norm_of
from megajax.core.parallel.boundary import NO_BOUNDARY, RegionBoundary
from megajax.core.parallel.layers import ReplicatedLinear, column_parallel, normal
from megajax.core.parallel.random import NamedKey


class PredictionModule(nnx.Module):
    """One module, without embedding and output product."""

    def __init__(self, config: ModelConfig, key: NamedKey, boundary: RegionBoundary, backend: Backend):
        self.embedding_norm, self.hidden_norm, self.final_norm = (norm_of(config) for _ in range(3))
        initial, shape = normal(key / "projection", config.init_std), (2 * config.hidden_size, config.hidden_size)
        self.projection = ReplicatedLinear(initial, NO_BOUNDARY, shape, ("features", "embed"), backend, bias=False)
        self.block = Block(config, key, boundary, backend)

    def __call__(self, x_BTD: Array, embedded_BTD: Array, context: Context, layer: int) -> tuple[Array, dict[str, Any]]:
        """The output, and the figures of its layer, which has this number."""
        both_BTC = jnp.concatenate([self.embedding_norm(embedded_BTD), self.hidden_norm(x_BTD)], axis=-1)
        (x_BTD,) = column_parallel(both_BTC, self.projection)
        x_BTD, figures = self.block(x_BTD, context, layer)
        return self.final_norm(x_BTD), figures

    def freeze(self) -> None:
        """Freeze the weights of its products, so that their gradients are not computed."""
        for linears in ((self.projection,), *self.block.products.values()):
            for linear in linears:
                linear.freeze(1.0)


def prediction_losses(config: ModelConfig) -> list[str]:
    """The names of the modules' losses."""
    return [f"{PREDICTION}/loss_{number}" for number in range(1, config.num_predicting + 1)]


def prediction_counts(config: ModelConfig, batch: Mapping[str, Array]) -> dict[str, Array]:
    """How many targets every module has in a batch."""
    counted = enumerate(prediction_losses(config), start=1)
    return {name: (ahead(batch, number)["targets"] != IGNORED).sum() for number, name in counted}


def ahead(batch: Mapping[str, Array], number: int) -> dict[str, Array]:
    """The tokens and targets so many places further on in every row, `IGNORED` where that is in another document."""
    tokens_BT, targets_BT = (_shifted(batch[name], number) for name in ("tokens", "targets"))
    return {"tokens": tokens_BT, "targets": jnp.where(same_document(batch, number), targets_BT, IGNORED)}


def same_document(batch: Mapping[str, Array], number: int) -> Array:
    """Whether the token so many places after each one is in the same document, or in the same row if attention crosses
    documents, bool [B, T]."""
    if "positions" in batch:
        return _shifted(batch["positions"], number) == batch["positions"] + number
    length = batch["tokens"].shape[1]
    return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None] < length - number, batch["tokens"].shape)


def real_ahead(batch: Mapping[str, Array], real_BT: Array, number: int) -> Array:
    """Which tokens a module computes with: real ones that have another one so many places after them."""
    return real_BT & _shifted(real_BT, number) & same_document(batch, number)


def _shifted(x_BT: Array, number: int) -> Array:
    return jnp.pad(x_BT[:, number:], ((0, 0), (0, number)))

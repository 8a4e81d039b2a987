"""Distillation (Hinton et al., arXiv 1503.02531): a model learns the distributions of a teacher that has the same
vocabulary, by the ids that this one finds most probable.

Letters: B rows, T tokens, K ids for each token.
"""

from functools import partial

import jax.numpy as jnp
from jax import Array

from megajax.core.batch import IGNORED, BatchArray
from megajax.core.models.own_loss import Batch, Logits, Loss


def distillation(choices: int = 32, temperature: float = 1.0, share: float = 1.0) -> Loss:
    """A `share` of the divergence of the model from its teacher, of which a batch has the `choices` most probable ids
    and their log-probabilities, and for the rest the cross-entropy of the targets.

    The gradient of the divergence, at a temperature, is as large as at 1. Of a teacher with more ids, the probability
    of those that the model lacks is divided among the others.
    """

    def distilled(logits: Logits, batch: Batch) -> dict[str, Array]:
        ids_BTK = batch["teacher_ids"]
        log_p_BTK = logits.at_temperature(temperature).log_probabilities(ids_BTK)
        teacher_BTK = batch["teacher_log_p"].astype(log_p_BTK.dtype)
        total = partial(jnp.sum, jnp.exp(teacher_BTK), axis=-1, keepdims=True)
        shared_BTK = (ids_BTK >= 0) & (ids_BTK < logits.vocab_size)
        least = jnp.finfo(log_p_BTK.dtype).tiny  # where nothing is shared
        teacher_BTK += jnp.log(total(where=ids_BTK != IGNORED) / jnp.maximum(total(where=shared_BTK), least))
        apart_BT = jnp.sum(jnp.exp(teacher_BTK) * (teacher_BTK - log_p_BTK), axis=-1, where=shared_BTK)
        loss_BT = share * temperature**2 * apart_BT + (1 - share) * logits.cross_entropy(batch["targets"])
        return {"loss": loss_BT, "divergence": apart_BT}

    dims = ("tokens", "choices")
    arrays = (("teacher_ids", BatchArray(dims, IGNORED)), ("teacher_log_p", BatchArray(dims, dtype="float32")))
    return Loss(distilled, measures=("divergence",), arrays=arrays, sizes=(("choices", choices),))

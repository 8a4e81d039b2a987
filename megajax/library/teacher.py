"""Batches with what a teacher thinks of their tokens, for `distillation`."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from megajax.core.errors import UserError, brief
from megajax.library.model import Model
from megajax.training.batches import Given, batch_of
from megajax.training.own_data import Batches, TaughtBatches


@brief
def with_teacher(
    batches: Batches,
    teacher: Model,
    *,
    choices: int = 32,
    temperature: float = 1.0,
) -> Callable[[int], Iterator[Mapping[str, Any]]]:
    """The batches with each token's `teacher_ids`, the ids that a teacher finds most probable, and their
    `teacher_log_p`, for a model with the loss `distillation`, whose arguments are the same.

    Args:
        batches: as for `Model.train`.
        teacher: a model of any size on any mesh, with the tokenizer of the one that is trained.
    """
    if not 1 <= choices <= teacher.config.model.vocab_size:
        raise UserError(f"with_teacher: choices {choices}; valid: 1 to {teacher.config.model.vocab_size}")

    @jax.jit
    def best(logits_BTV: Any) -> tuple[Any, Any]:
        found, ids = jax.lax.top_k(logits_BTV.astype("float32") / temperature, choices)
        return jax.nn.log_softmax(found), ids

    def add(batch: Given) -> Mapping[str, Any]:
        arrays = batch_of(teacher.config, teacher.program.form, batch)
        log_p, ids = best(teacher.logits(arrays))
        return {**arrays, "teacher_ids": np.asarray(ids), "teacher_log_p": np.asarray(log_p)}

    return TaughtBatches(batches, add, teacher.tokenizer)

"""What runs forward only: scores of targets, the logits of a task's answers, and those of a next token. Letters: B
batch, T tokens, V vocabulary."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.stages import Wrapped

from megajax.axes import ROW_AXES
from megajax.models.family import Scores
from megajax.parallel.collectives import complete, gather_shards
from megajax.program.bind import forward_pipeline
from megajax.program.program import BATCH, Batch, Program, vocabulary_axes

Tree = Any


def scores(program: Program) -> Wrapped:
    """(params, batch) -> for every loss by name the cross-entropy of every target and whether it is the most probable
    one (`Model.scores`), on every device; dropout off. Sequences may have any length that the model has positions for.
    """
    return program.compiled(_scores, (program.layout.specs.params, BATCH), PartitionSpec())


def task_logits(program: Program) -> Wrapped:
    """(params, batch) -> the logits that a task is answered by (`Model.task_logits`), [B, …] on every device; dropout
    off."""
    return program.compiled(_answers, (program.layout.specs.params, BATCH), PartitionSpec())


def logits(program: Program) -> Wrapped:
    """(params, batch) -> logits [B, T, V] of every token, padded columns included, of a model of text or of BERT's
    masked tokens; dropout off."""
    specs = (program.layout.specs.params, BATCH)
    return program.compiled(_logits, specs, PartitionSpec(ROW_AXES, None, vocabulary_axes(program.config)))


def next_logits(program: Program) -> Wrapped:
    """(params, batch, place) -> logits [B, V] of the token after the one at `place`, padded columns included; dropout
    off."""
    specs = (program.layout.specs.params, BATCH, PartitionSpec())
    return program.compiled(_next_logits, specs, PartitionSpec(ROW_AXES, vocabulary_axes(program.config)))


def _scores(program: Program, params: Tree, batch: Batch) -> Scores:
    return _of_rows(program, params, batch, lambda ends, x_BTD, rows: ends.scores(x_BTD, rows))


def _answers(program: Program, params: Tree, batch: Batch) -> Array:
    return _of_rows(program, params, batch, lambda ends, x_BTD, rows: ends.task_logits(x_BTD, rows))


def _of_rows(program: Program, params: Tree, batch: Batch, function: Callable[[Any, Array, Batch], Tree]) -> Tree:
    """What `function` makes of the ends, the last layer's output and the rows of a microbatch, of all rows on every
    device."""
    pipeline = forward_pipeline(program, params, batch)

    def finish(x_BTD: Array, own: Batch) -> Tree:
        return function(program.unsharded_model.ends(pipeline.ends.weights()), x_BTD, own)

    found = pipeline.forward(program.forward_schedule, finish)
    found = complete(found, jax.tree.map(lambda _: PartitionSpec(None, ROW_AXES), found))
    return jax.tree.map(lambda x: gather_shards(x.reshape(-1, *x.shape[2:]), 0, ROW_AXES, invariant=True), found)


def _logits(program: Program, params: Tree, batch: Batch) -> Array:
    pipeline = forward_pipeline(program, params, batch)

    def finish(x_BTD: Array, _: Batch) -> Array:
        found = program.unsharded_model.ends(pipeline.ends.weights()).logits(x_BTD)
        return found[0] if isinstance(found, tuple) else found  # BERT's are beside those of the order

    local_spec = PartitionSpec(None, ROW_AXES, None, vocabulary_axes(program.config))
    found = complete(pipeline.forward(program.forward_schedule, finish), local_spec)
    return found.reshape(-1, *found.shape[2:])


def _next_logits(program: Program, params: Tree, batch: Batch, place: Array) -> Array:
    pipeline = forward_pipeline(program, params, batch)

    def finish(x_BTD: Array, _: Batch) -> Array:
        last_BTD = lax.dynamic_slice_in_dim(x_BTD, place, 1, axis=1)
        return program.unsharded_model.ends(pipeline.ends.weights()).logits(last_BTD)[:, 0]

    local_spec = PartitionSpec(None, ROW_AXES, vocabulary_axes(program.config))
    logits = complete(pipeline.forward(program.forward_schedule, finish), local_spec)
    return logits.reshape(-1, logits.shape[-1])

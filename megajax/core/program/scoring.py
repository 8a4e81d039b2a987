"""Forward-only programs, without dropout: scores of targets, logits that answer a task, and logits of the next token.
Letters: B batch, T tokens, D model, V vocabulary."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.stages import Wrapped

from megajax.core.axes import ROW_AXES
from megajax.core.models.staged import StagedModel
from megajax.core.parallel.collectives import complete, gather_shards
from megajax.core.parallel.tokens import once
from megajax.core.program.bind import forward_pipeline
from megajax.core.program.program import BATCH, Batch, Program, vocabulary_axes
from megajax.core.trees import Tree


def scores(program: Program) -> Wrapped:
    """(params, batch) -> for every loss by name, each target's cross-entropy and whether it is the most probable one
    (`FamilyModel.scores`), on every device. Sequences may have any length that the model has positions for."""
    return program.compiled(_answers, (program.layout.computed_specs, BATCH), PartitionSpec(), "scores")


def task_logits(program: Program) -> Wrapped:
    """(params, batch) -> the logits that answer a task (`FamilyModel.task_logits`), [B, …] on every device."""
    return program.compiled(_answers, (program.layout.computed_specs, BATCH), PartitionSpec(), "task_logits")


def logits(program: Program) -> Wrapped:
    """(params, batch) -> logits [B, T, V] of every token, including padded columns, for language models and BERT's
    masked tokens."""
    specs = (program.layout.computed_specs, BATCH)
    return program.compiled(logits_of_rows, specs, PartitionSpec(ROW_AXES, None, vocabulary_axes(program.config)))


def next_logits(program: Program) -> Wrapped:
    """(params, batch, place) -> logits [B, V] for the token after the one at `place`, including padded columns."""
    specs = (program.layout.computed_specs, BATCH, PartitionSpec())
    return program.compiled(_next_logits, specs, PartitionSpec(ROW_AXES, vocabulary_axes(program.config)))


def _answers(program: Program, method: str, params: Tree, batch: Batch) -> Tree:
    """Call a method of the model on the last layer's output and each microbatch's rows; every device gets the results
    of all rows."""
    length = batch["tokens"].shape[-1]
    model = program.forward_model(length)
    results = _forward(program, params, batch, lambda ends, x_BTD, rows: getattr(ends, method)(x_BTD, rows), model)
    results = complete(results, jax.tree.map(lambda _: PartitionSpec(None, ROW_AXES), results))
    return jax.tree.map(lambda x: gather_shards(x.reshape(-1, *x.shape[2:]), 0, ROW_AXES, invariant=True), results)


def logits_of_rows(program: Program, params: Tree, batch: Batch) -> Array:
    def head(ends: Any, x_BTD: Array, _: Batch) -> Array:
        result = ends.logits(x_BTD)
        return result[0] if isinstance(result, tuple) else result  # BERT also returns the logits of the order

    return _columns(program, params, batch, head)


def _next_logits(program: Program, params: Tree, batch: Batch, place: Array) -> Array:
    def head(ends: Any, x_BTD: Array, _: Batch) -> Array:
        return ends.logits(lax.dynamic_slice_in_dim(x_BTD, place, 1, axis=1))[:, 0]

    return _columns(program, params, batch, head)


def _columns(program: Program, params: Tree, batch: Batch, head: Callable[[Any, Array, Batch], Array]) -> Array:
    """This device's columns of logits, [B, …], without what tells padding from prompts: those of any token may be
    wanted."""
    batch = {name: array for name, array in batch.items() if name not in program.form.targets.values()}
    result = _forward(program, params, batch, head, columns=True)
    between = [None] * (result.ndim - 3)
    result = complete(result, PartitionSpec(None, ROW_AXES, *between, vocabulary_axes(program.config)))
    return result.reshape(-1, *result.shape[2:])


def _forward(
    program: Program,
    params: Tree,
    batch: Batch,
    function: Callable[[Any, Array, Batch], Tree],
    model: StagedModel | None = None,
    *,
    columns: bool = False,
) -> Tree:
    """Results of `function`, called with the ends, the last layer's output and the rows of each microbatch, stacked by
    microbatch, as terms of a sum over a context group. `model` defaults to the one for whole sequences; for `columns`
    see `LoopModel.with_ends`."""
    model = model or program.forward_model()
    pipeline = forward_pipeline(program, model, params, batch)

    def finish(x_BTD: Array, rows: Batch) -> Tree:
        ends = pipeline.ends
        return ends.model.with_ends(function, ends.weights(), x_BTD, rows, columns=columns)

    results = pipeline.forward(program.forward_schedule, finish)
    return once(results) if model.boundary.context == "none" else results

"""One stage's entries for one tick of a schedule's table, as the executor reads them.

Entries that are the same in every tick are Python numbers or bools, so branches are resolved while tracing. The others
are scalars from the rows that the loop scans over.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.core.parallel.collectives import at_place
from megajax.core.pipeline.table import IDLE, Deferral, Pass, Schedule

Number = Array | int
Predicate = Array | bool


class Work(NamedTuple):
    """What a stage runs in one direction, if anything; slots as in `Pass`, with a spare slot in place of `IDLE`."""

    runs: Predicate
    microbatch: Number
    chunk: Number
    slot: Number
    arrival: Number
    source: Number
    factor_slot: Number = 0  # where the backward stores the factors of its deferred weight gradients


class Turns(NamedTuple):
    """Which of a stage's deferred weight gradients run in this tick: `number` of them, from number `first` on."""

    first: Number
    number: Number


class End(NamedTuple):
    """Whether a pass reaches an end of the model on this stage, or on any stage, and with which microbatch."""

    here: Predicate
    anywhere: Predicate
    microbatch: Number


class Row(NamedTuple):
    """One stage's work in one tick."""

    forward: Work
    backward: Work
    embed: End  # before the first layer's forward
    finish: End  # after the last layer's forward
    head: End  # before the last layer's backward
    embed_backward: End  # after the first layer's backward
    early: Turns | None = None  # weight gradients before the forward; None if there are never any
    late: Turns | None = None  # weight gradients after the backward


def rows_of(
    schedule: Schedule, stage: Array, ticks: slice = slice(None)
) -> tuple[list[Array], Callable[[list[Array]], Row]]:
    """The values in `stage`'s table that change from tick to tick, to scan over, and a function that makes a row from
    one tick's values; of all ticks, or of some."""
    up, down, last, deferral = schedule.forward, schedule.backward, schedule.num_virtual - 1, schedule.deferral
    slot = 0 if deferral is None else ((down.active.cumsum(0) - 1) % deferral.num_slots).astype(np.int32)
    tables = Row(
        forward=_work(up),
        backward=_work(down, factor_slot=slot),
        embed=_end(schedule, up, 0),
        finish=_end(schedule, up, last),
        head=_end(schedule, down, last),
        embed_backward=_end(schedule, down, 0),
        **_turns(deferral),
    )
    leaves, structure = jax.tree.flatten(tables)
    columns = [_column(table if isinstance(table, int) else table[ticks], stage) for table in leaves]
    changing = [column for column in columns if isinstance(column, Array)]

    def row(values: list[Array]) -> Row:
        now = iter(values)
        return jax.tree.unflatten(structure, [next(now) if isinstance(column, Array) else column for column in columns])

    return changing, row


def _work(table: Pass, factor_slot: Any = 0) -> Any:
    """`Work` with whole tables [ticks, stages] in place of one tick's values."""
    spare = table.inbox_depth
    return Work(
        runs=table.active,  # type: ignore[arg-type]
        microbatch=table.microbatch,  # type: ignore[arg-type]
        chunk=np.maximum(table.chunk, 0),
        slot=table.slot,  # type: ignore[arg-type]
        arrival=np.where(table.arrival == IDLE, spare, table.arrival),  # type: ignore[arg-type]
        source=np.where(table.source == IDLE, spare, table.source),  # type: ignore[arg-type]
        factor_slot=factor_slot,
    )


def _turns(deferral: Deferral | None) -> dict[str, Any]:
    """Tables of the deferred weight gradients, early and late, leaving out those that never run."""
    if deferral is None:
        return {}
    before = (deferral.early + deferral.late).cumsum(0) - deferral.early - deferral.late
    turns: dict[str, Any] = {"early": (before, deferral.early), "late": (before + deferral.early, deferral.late)}
    return {name: Turns(first.astype(np.int32), count) for name, (first, count) in turns.items() if count.any()}


def _end(schedule: Schedule, table: Pass, virtual_stage: int) -> Any:
    """`End` with whole tables [ticks, stages] and [ticks] in place of one tick's values."""
    here = schedule.at_virtual(table, virtual_stage)
    microbatch = np.where(here, table.microbatch, IDLE).max(axis=1)
    return End(here=here, anywhere=here.max(axis=1), microbatch=microbatch)  # type: ignore[arg-type]


def _column(table: np.ndarray | int, stage: Array) -> Array | bool | int:
    """A stage's column of a table [ticks, stages], or a table [ticks]; a Python scalar if all values are equal."""
    if isinstance(table, int):
        return table
    if (table == table.flat[0]).all():
        return table.flat[0].item()
    column = jnp.asarray(table)
    return column if table.ndim == 1 else at_place(column, stage, 1)

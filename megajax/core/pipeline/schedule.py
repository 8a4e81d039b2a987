"""Pipeline schedules as data: what every stage runs forward and backward in every tick. No JAX here.

A tick is at most one forward and one backward per stage, forward first, then transfers between neighbours; what is sent
in one tick can be used from the next one on. Every stage holds `chunks` pieces of the model, so a microbatch passes
through the pipe that many times: through the virtual stages `k = chunk · stages + stage`, up forward, down backward.

To add a schedule, write a function `(stages, microbatches, chunks) -> Ticks` and decorate it with its name; `arrange`
turns these into the table that the executor runs, buffers included.
"""

import dataclasses
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from megajax.core.errors import UserError
from megajax.core.pipeline.deferral import PassTimes, place
from megajax.core.pipeline.table import IDLE, Deferral, Pass, Schedule, check, check_deferral, most_kept


@dataclass(frozen=True)
class Ticks:
    """When every stage runs every chunk of every microbatch; int arrays [microbatches, chunks, stages]."""

    forward: np.ndarray  # tick of the forward pass
    backward: np.ndarray | None = None  # tick of the backward pass; None for evaluation


@dataclass(frozen=True)
class ScheduleKind:
    """A way to schedule a step."""

    ticks: Callable[[int, int, int], Ticks]  # (stages, microbatches, chunks) -> when everything runs
    chunked: bool = False  # takes two or more chunks; otherwise exactly one


SCHEDULES: dict[str, ScheduleKind] = {}


def named(name: str, *, chunked: bool = False) -> Callable:
    """Register a schedule under a name, for flags, commands and tests."""

    def enter(function: Callable[[int, int, int], Ticks]) -> Callable[[int, int, int], Ticks]:
        SCHEDULES[name] = ScheduleKind(function, chunked)
        return function

    return enter


def schedule_names(*, chunked: bool) -> list[str]:
    """Names of the schedules that take several chunks, or of those that take only one."""
    return sorted(name for name, kind in SCHEDULES.items() if kind.chunked == chunked)


@named("1f1b")
@named("interleaved", chunked=True)
def one_forward_one_backward(num_stages: int, num_microbatches: int, num_chunks: int) -> Ticks:
    """Eager 1F1B: as soon as the first microbatch is through, every tick is one forward and one backward.

    One chunk: `m + 2(p-1)` ticks, at most `2(p-1-s) + 1` microbatches in flight at stage s, whatever m is. More
    chunks: the interleaved order of Megatron-LM (arXiv 2104.04473, §2.2), in which groups of p microbatches pass
    through chunk after chunk. If p does not divide m, groups have near-equal sizes of p or more; the time stays
    minimal, but the first stage needs a deeper inbox.
    """
    microbatch, chunk, stage = np.ogrid[:num_microbatches, :num_chunks, :num_stages]
    num_groups = max(1, num_microbatches // num_stages)
    sizes = np.array([len(part) for part in np.array_split(np.arange(num_microbatches), num_groups)])
    group = np.repeat(np.arange(num_groups), sizes)
    first = (np.cumsum(sizes) - sizes)[group].reshape(microbatch.shape)
    size = np.maximum(sizes, num_stages)[group].reshape(microbatch.shape)
    entered = first * num_chunks + (microbatch - first)
    turn = (num_chunks - 1) * size.max() + num_stages - 1  # the first microbatch leaves the last stage and turns round
    return Ticks(
        forward=entered + chunk * size + stage,
        backward=turn + entered + (num_chunks - 1 - chunk) * size + (num_stages - 1 - stage),
    )


@named("gpipe")
def gpipe(num_stages: int, num_microbatches: int, num_chunks: int) -> Ticks:
    """GPipe: all forwards, then all backwards, last microbatch first; all microbatches are in flight together.

    On one stage there is no bubble, so the microbatches run one by one without buffers.
    """
    if num_stages == 1:
        return one_forward_one_backward(num_stages, num_microbatches, num_chunks)
    microbatch, _, stage = np.ogrid[:num_microbatches, :num_chunks, :num_stages]
    turn, in_reverse = num_microbatches + num_stages - 1, num_microbatches - 1 - microbatch
    return Ticks(forward=microbatch + stage, backward=turn + in_reverse + (num_stages - 1 - stage))


def make_schedule(
    name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1, deferring: PassTimes | None = None
) -> Schedule:
    """The schedule called `name`, checked. `deferring` are the times by which it places deferred weight gradients, if
    they are deferred; a single stage is never idle and defers none. `settings/pipeline_checks.py` says which numbers
    are valid. An unknown name raises `UserError`."""
    if name not in SCHEDULES:
        raise UserError(f"schedule {name!r}; valid: {', '.join(SCHEDULES)}")
    schedule = arrange(SCHEDULES[name].ticks(num_stages, num_microbatches, num_chunks))
    return schedule if deferring is None or num_stages == 1 else with_deferral(schedule, deferring)


def forward_only(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """A checked schedule of forward passes only, for evaluation."""
    return arrange(Ticks(one_forward_one_backward(num_stages, num_microbatches, num_chunks).forward))


def arrange(ticks: Ticks) -> Schedule:
    """The checked table for `ticks`, with the smallest possible buffers."""
    num_microbatches, num_chunks, num_stages = ticks.forward.shape
    assert ticks.backward is None or (ticks.forward <= ticks.backward).all(), "a backward before its forward"
    fused = num_stages == 1 and ticks.backward is not None and bool((ticks.forward == ticks.backward).all())
    num_ticks = 1 + int(max(ticks.forward.max(), -1 if ticks.backward is None else ticks.backward.max()))
    indices = np.indices(ticks.forward.shape)
    microbatch, chunk, stage = indices[0], indices[1], indices[2]

    def table(tick: np.ndarray, values: np.ndarray, where: Any = ...) -> np.ndarray:
        cells = np.full((num_ticks, num_stages), IDLE, np.int32)
        cells[tick[where], stage[where]] = values[where]
        return cells

    def direction(tick: np.ndarray, slot: np.ndarray, upstream: int) -> Pass:
        by_virtual = tick.reshape(num_microbatches, -1)  # [microbatches, virtual stages]
        sent = np.roll(by_virtual, -upstream, axis=1)
        sent[:, 0 if upstream < 0 else -1] = IDLE  # the virtual stage where this direction begins
        sent = sent.reshape(tick.shape)
        receives = sent != IDLE
        assert (sent[receives] < tick[receives]).all(), "something is used before it was sent"
        inbox, depth = _slots(sent + 1, tick, stage, receives)
        cells = table(tick, microbatch)
        assert np.count_nonzero(cells != IDLE) == tick.size, "two microbatches in one tick of a stage"
        stored, read = table(sent + 1, inbox, receives), table(tick, inbox, receives)
        return Pass(cells, table(tick, chunk), table(tick, slot), stored, read, depth)

    if ticks.backward is None:
        slot, num_slots = np.full(ticks.forward.shape, IDLE), 0
        idle = np.full((num_ticks, num_stages), IDLE, np.int32)
        backward = Pass(idle, idle, idle, idle, idle, inbox_depth=0)
    else:
        slot, num_slots = _slots(ticks.forward, ticks.backward, stage, np.full(ticks.forward.shape, not fused))
        backward = direction(ticks.backward, slot, upstream=+1)
    forward = direction(ticks.forward, slot, upstream=-1)
    schedule = Schedule(forward, backward, num_chunks, num_microbatches, num_slots, fused)
    check(schedule)
    return schedule


def with_deferral(schedule: Schedule, times: PassTimes) -> Schedule:
    """A valid `schedule` with weight gradients deferred, checked."""
    active = schedule.forward.active, schedule.backward.active
    early, late = place(*active, times, ring=schedule.num_chunks > 1)
    backward = schedule.backward
    tick, stage = np.nonzero(backward.active.T)[::-1]  # stage by stage, in the order of the ticks
    microbatch, chunk = (
        table[tick, stage].reshape(schedule.num_stages, -1).T for table in (backward.microbatch, backward.chunk)
    )
    deferral = Deferral(early, late, microbatch, chunk, num_slots=int(most_kept(backward.active, early, late).max()))
    deferred = dataclasses.replace(schedule, deferral=deferral)
    check_deferral(deferred, deferral)
    return deferred


def _slots(first: np.ndarray, last: np.ndarray, stage: np.ndarray, where: np.ndarray) -> tuple[np.ndarray, int]:
    """Assign a buffer slot to everything that its stage holds from tick `first` through tick `last`. Returns the slots
    and their number."""
    slots = np.full(first.shape, IDLE)
    used = 0
    for s in range(int(stage.max()) + 1):
        items = np.argwhere(where & (stage == s))
        occupied: list[tuple[int, int]] = []  # (last tick, slot)
        free: list[int] = []
        size = 0
        for item in sorted(map(tuple, items), key=lambda item: first[item]):
            while occupied and occupied[0][0] < first[item]:
                free.append(heapq.heappop(occupied)[1])
            if not free:
                free.append(size)
                size += 1
            slots[item] = free.pop()
            heapq.heappush(occupied, (int(last[item]), int(slots[item])))
        used = max(used, size)
    return slots, used

"""The table of a step: what every stage runs in every tick, and the buffer slots it uses. No JAX here.

`check` executes a table symbolically.
"""

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megajax.core.options import counted

IDLE = -1


class Cell(NamedTuple):
    """What a stage runs in a tick, in this order, as pairs of microbatch and chunk: deferred weight gradients, at most
    one forward, at most one backward, and more deferred weight gradients."""

    early: list[tuple[int, int]]
    forward: list[tuple[int, int]]
    backward: list[tuple[int, int]]
    late: list[tuple[int, int]]


@dataclass(frozen=True)
class Pass:
    """One direction of a schedule. Tables are int32 [ticks, stages], with `IDLE` where there is nothing."""

    microbatch: np.ndarray
    chunk: np.ndarray
    slot: np.ndarray  # in the stage's ring buffer of residuals: the forward writes it, the backward reads it
    arrival: np.ndarray  # inbox slot for what the neighbour sent in the previous tick
    source: np.ndarray  # inbox slot of the input; `IDLE` at the virtual stage where the direction begins
    inbox_depth: int  # number of inbox slots

    @property
    def active(self) -> np.ndarray:
        """Where something runs, bool [ticks, stages]."""
        return self.microbatch != IDLE

    @property
    def direct(self) -> bool:
        """Whether everything is used in the tick in which it arrives, so no inbox is needed."""
        return bool((self.arrival == self.source).all())


@dataclass(frozen=True)
class Deferral:
    """When deferred weight gradients run. Every stage runs them in the order of its backwards, which compute only the
    input gradient. Tables are int32."""

    early: np.ndarray  # how many run in a tick before the forward is sent, [ticks, stages]
    late: np.ndarray  # how many run after the backward
    microbatch: np.ndarray  # of a stage's n-th backward and n-th weight gradient, [microbatches · chunks, stages]
    chunk: np.ndarray
    num_slots: int  # in the ring buffer of factors; the n-th backward writes slot n mod num_slots


@dataclass(frozen=True)
class Schedule:
    """The table of a step."""

    forward: Pass
    backward: Pass  # empty in a forward-only schedule
    num_chunks: int  # per stage
    num_microbatches: int
    num_slots: int  # in the ring buffer of residuals
    # A single stage runs a microbatch's backward in the tick of its forward, without buffering residuals. (The last
    # stage of a pipe could not: its forward would wait for the other stages' forwards of the tick, and their backwards
    # for it.)
    fused: bool
    deferral: Deferral | None = None

    @property
    def num_ticks(self) -> int:
        return self.forward.microbatch.shape[0]

    @property
    def num_stages(self) -> int:
        return self.forward.microbatch.shape[1]

    @property
    def num_factor_slots(self) -> int:
        return 0 if self.deferral is None else self.deferral.num_slots

    @property
    def num_virtual(self) -> int:
        return self.num_chunks * self.num_stages

    @property
    def size(self) -> str:
        """Stages, chunks and microbatches, as text."""
        chunks = f" x {self.num_chunks} chunks" if self.num_chunks > 1 else ""
        return f"{counted(self.num_stages, 'stage')}{chunks}, {counted(self.num_microbatches, 'microbatch')}"

    def cells(self) -> list[list[Cell]]:
        """What runs in each tick, on each stage."""
        rows = [[Cell([], [], [], []) for _ in range(self.num_stages)] for _ in range(self.num_ticks)]
        for name, table in (("forward", self.forward), ("backward", self.backward)):
            where = np.nonzero(table.active)
            found = *where, table.microbatch[where], table.chunk[where]
            for tick, s, *pair in zip(*(array.tolist() for array in found), strict=True):
                getattr(rows[tick][s], name).append(tuple(pair))
        deferral = self.deferral
        if deferral is not None:
            for s in range(self.num_stages):
                order = zip(deferral.microbatch[:, s].tolist(), deferral.chunk[:, s].tolist(), strict=True)
                counts = zip(deferral.early[:, s].tolist(), deferral.late[:, s].tolist(), strict=True)
                for row, (early, late) in zip(rows, counts, strict=True):
                    row[s].early.extend(itertools.islice(order, early))
                    row[s].late.extend(itertools.islice(order, late))
        return rows

    @property
    def turns_at_once(self) -> bool:
        """Whether the last virtual stage runs every microbatch's backward in the tick of its forward."""
        last = self.num_virtual - 1
        here, there = self.at_virtual(self.forward, last), self.at_virtual(self.backward, last)
        return bool((here == there).all() and (self.forward.microbatch == self.backward.microbatch)[here].all())

    def at_virtual(self, table: Pass, k: int) -> np.ndarray:
        """Where `table` runs virtual stage `k`, bool [ticks, stages]."""
        chunk, stage = divmod(k, self.num_stages)
        return np.logical_and(table.chunk == chunk, np.arange(self.num_stages) == stage)


def most_kept(begun: np.ndarray, ended: np.ndarray | int, last: np.ndarray | int) -> np.ndarray:
    """The most entries that each stage holds at once, [stages]. Arguments count entries per tick, [ticks, stages]:
    `begun` ones start in the tick, `ended` ones end before these start, and `last` ones end with the tick."""
    return (begun.cumsum(0) - np.cumsum(np.broadcast_to(ended + last, begun.shape), 0) + last).max(0)


def check(schedule: Schedule) -> None:
    """Assert that a table can be run, whatever made it.

    Every stage runs every chunk of every microbatch forward once and backward once; its input is in its inbox and is
    the right one; nothing in an inbox or ring buffer is overwritten before it is read, and nothing is left over.
    """
    p, num_virtual = schedule.num_stages, schedule.num_virtual
    for table in (schedule.forward, schedule.backward):
        for array in (table.microbatch, table.chunk, table.slot, table.arrival, table.source):
            assert array.shape == (schedule.num_ticks, p), array.shape
    buffers: list[dict] = [{} for _ in range(p)]
    keeps = bool(schedule.backward.active.any())
    directions: list[Any] = []
    for table, step, end in ((schedule.forward, 1, num_virtual - 1), (schedule.backward, -1, 0)):
        inboxes: list[dict] = [{} for _ in range(p)]
        directions.append((table, step, end, inboxes, set(), [None] * p))
    for tick in range(schedule.num_ticks):
        for table, step, end, inboxes, ran, wires in directions:
            arrived, wires[:] = list(wires), [None] * p
            for s in range(p):
                if arrived[s] is not None:
                    slot = int(table.arrival[tick, s])
                    assert 0 <= slot < table.inbox_depth and slot not in inboxes[s], ("inbox", tick, s)
                    inboxes[s][slot] = arrived[s]
                else:
                    assert table.arrival[tick, s] == IDLE, ("nothing arrives", tick, s)
                microbatch, chunk = int(table.microbatch[tick, s]), int(table.chunk[tick, s])
                if microbatch == IDLE:
                    assert chunk == IDLE, ("a chunk of nothing", tick, s)
                    continue
                k = chunk * p + s
                assert 0 <= microbatch < schedule.num_microbatches and 0 <= chunk < schedule.num_chunks, (tick, s)
                assert (microbatch, k) not in ran, ("twice", tick, s)
                ran.add((microbatch, k))
                if k != (0 if step > 0 else num_virtual - 1):
                    assert inboxes[s].pop(int(table.source[tick, s]), None) == (microbatch, k), ("input", tick, s)
                if k != end:
                    wires[(s + step) % p] = (microbatch, k + step)
                slot = int(table.slot[tick, s])
                if schedule.fused:
                    other = schedule.backward if step > 0 else schedule.forward
                    assert (other.microbatch[tick, s], other.chunk[tick, s]) == (microbatch, chunk), ("fused", tick)
                elif step < 0:
                    assert buffers[s].pop(slot, None) == (microbatch, k), ("saved", tick, s)
                elif keeps:
                    assert 0 <= slot < schedule.num_slots and slot not in buffers[s], ("slot", tick, s)
                    buffers[s][slot] = (microbatch, k)
    for table, _, _, inboxes, ran, wires in directions:
        expected = schedule.num_microbatches * num_virtual if table.active.any() else 0
        assert len(ran) == expected, "something was not run"
        assert not any(inboxes) and not any(wires), "something was not used"
    assert schedule.forward.active.any() and not any(buffers)
    assert keeps or schedule.num_slots == 0, "kept for a backward that never comes"
    if schedule.deferral is not None:
        check_deferral(schedule, schedule.deferral)


def check_deferral(schedule: Schedule, deferral: Deferral) -> None:
    """Assert, for a table that is otherwise sound, that every weight gradient runs exactly once, after its backward,
    and from factors that have not been overwritten."""
    p, backward = schedule.num_stages, schedule.backward
    for array in (deferral.early, deferral.late):
        assert array.shape == (schedule.num_ticks, p) and (array >= 0).all(), array.shape
    assert deferral.num_slots > 0 and not schedule.fused
    for s in range(p):
        order = list(zip(deferral.microbatch[:, s].tolist(), deferral.chunk[:, s].tolist(), strict=True))
        factors: list[tuple[int, int] | None] = [None] * deferral.num_slots
        begun = ended = 0

        def run(count: int, s: int = s, order: list = order, factors: list = factors) -> None:
            nonlocal ended
            for n in range(ended, ended + count):
                slot = n % len(factors)
                assert n < len(order) and factors[slot] == order[n], ("factors", n, s)
                factors[slot] = None
            ended += count

        tables = deferral.early, backward.microbatch, backward.chunk, deferral.late
        for early, microbatch, chunk, late in zip(*(table[:, s].tolist() for table in tables), strict=True):
            run(early)
            if microbatch != IDLE:
                assert factors[begun % len(factors)] is None, ("overwritten", begun, s)
                factors[begun % len(factors)] = microbatch, chunk
                begun += 1
            run(late)
        assert ended == begun == len(order) and not any(factors), "a weight gradient was not run"

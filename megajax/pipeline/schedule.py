"""Pipeline schedules as data: what every stage runs forward and backward in every tick. No JAX here.

A tick is at most one forward and one backward per stage, forward first, then a hand-over to the neighbours; what is
sent in one tick can be used from the next one on. Every stage holds `chunks` pieces of the model, so that a microbatch
goes round the pipe as often: through the virtual stages `k = chunk · stages + stage`, up forward, down backward.

A new schedule is one more function `(stages, microbatches, chunks) -> Ticks` with its name above it. From the ticks
alone `arrange` makes the table that the executor runs, buffers included, and `check` runs it with symbols in place of
arrays.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

IDLE = -1


@dataclass(frozen=True)
class Ticks:
    """When every stage runs every chunk of every microbatch; int arrays [microbatches, chunks, stages].

    Attributes:
        forward: tick of the forward pass.
        backward: tick of the backward pass; None where there is none (evaluation).
    """

    forward: np.ndarray
    backward: np.ndarray | None = None


@dataclass(frozen=True)
class Pass:
    """One direction of a schedule. Tables are int32 [ticks, stages], `IDLE` where there is nothing.

    Attributes:
        microbatch, chunk: what runs.
        slot: slot of the stage's ring buffer for what the backward needs: written by the forward, read by the backward.
        arrival: inbox slot for what the neighbour sent in the tick before.
        source: inbox slot of the input; none at the virtual stage where the direction begins.
        inbox_depth: number of inbox slots.
    """

    microbatch: np.ndarray
    chunk: np.ndarray
    slot: np.ndarray
    arrival: np.ndarray
    source: np.ndarray
    inbox_depth: int

    @property
    def active(self) -> np.ndarray:
        """Where something runs, bool [ticks, stages]."""
        return self.microbatch != IDLE

    @property
    def direct(self) -> bool:
        """Everything that arrives is used in the very next tick: no inbox is needed."""
        return bool((self.arrival == self.source).all())


@dataclass(frozen=True)
class Schedule:
    """The table of a step.

    Attributes:
        forward, backward: the two directions; a forward-only schedule has an empty `backward`.
        num_chunks, num_microbatches: of every stage, of a step.
        num_slots: size of the ring buffer.
        fused: a single stage that runs a microbatch backward in the tick of its forward: what the backward needs does
        not pass through a buffer. (In a pipe it does also on the last stage: run as one, its forward would wait for the
        other stages' forwards of the tick, and their backwards for it.)
    """

    forward: Pass
    backward: Pass
    num_chunks: int
    num_microbatches: int
    num_slots: int
    fused: bool

    @property
    def num_ticks(self) -> int:
        return self.forward.microbatch.shape[0]

    @property
    def num_stages(self) -> int:
        return self.forward.microbatch.shape[1]

    @property
    def num_virtual(self) -> int:
        return self.num_chunks * self.num_stages

    @property
    def turns_at_once(self) -> bool:
        """Every microbatch leaves the last virtual stage in the tick in which it came there."""
        last = self.num_virtual - 1
        here, there = self.at_virtual(self.forward, last), self.at_virtual(self.backward, last)
        return bool((here == there).all() and (self.forward.microbatch == self.backward.microbatch)[here].all())

    def at_virtual(self, table: Pass, k: int) -> np.ndarray:
        """Where `table` runs virtual stage `k`, bool [ticks, stages]."""
        chunk, stage = divmod(k, self.num_stages)
        return np.logical_and(table.chunk == chunk, np.arange(self.num_stages) == stage)


@dataclass(frozen=True)
class ScheduleKind:
    """A way to schedule a step.

    Attributes:
        ticks: (stages, microbatches, chunks) -> when everything runs.
        chunked: takes two or more chunks; else one.
    """

    ticks: Callable[[int, int, int], Ticks]
    chunked: bool = False


SCHEDULES: dict[str, ScheduleKind] = {}


def named(name: str, *, chunked: bool = False) -> Callable:
    """Enter a function into the schedules that flags, commands and tests know."""

    def enter(function: Callable[[int, int, int], Ticks]) -> Callable[[int, int, int], Ticks]:
        SCHEDULES[name] = ScheduleKind(function, chunked)
        return function

    return enter


def schedule_names(*, chunked: bool) -> list[str]:
    """The names of the schedules that take several chunks, or of those that take one."""
    return sorted(name for name, kind in SCHEDULES.items() if kind.chunked == chunked)


@named("1f1b")
@named("interleaved", chunked=True)
def one_forward_one_backward(num_stages: int, num_microbatches: int, num_chunks: int) -> Ticks:
    """Eager 1F1B: as soon as the first microbatch is through, every tick is one forward and one backward.

    One chunk: `m + 2(p-1)` ticks, at most `2(p-1-s) + 1` microbatches in flight at stage s, whatever their number. More
    chunks: the interleaved order of Megatron-LM (arXiv 2104.04473, §2.2), groups of p microbatches going through chunk
    after chunk. Where p does not divide m, the groups are stretched to near-equal sizes of p or more; the time stays
    minimal, and what waits longer at the first stage for the next chunk needs a deeper inbox.
    """
    microbatch, chunk, stage = np.ogrid[:num_microbatches, :num_chunks, :num_stages]
    num_groups = max(1, num_microbatches // num_stages)
    sizes = np.array([len(part) for part in np.array_split(np.arange(num_microbatches), num_groups)])
    group = np.repeat(np.arange(num_groups), sizes)
    first = (np.cumsum(sizes) - sizes)[group].reshape(microbatch.shape)
    size = np.maximum(sizes, num_stages)[group].reshape(microbatch.shape)
    entered = first * num_chunks + (microbatch - first)
    turn = (num_chunks - 1) * size.max() + num_stages - 1  # the first microbatch is through: it turns round
    return Ticks(
        forward=entered + chunk * size + stage,
        backward=turn + entered + (num_chunks - 1 - chunk) * size + (num_stages - 1 - stage),
    )


@named("gpipe")
def gpipe(num_stages: int, num_microbatches: int, num_chunks: int) -> Ticks:
    """GPipe: all forwards, then all backwards, last microbatch first; all microbatches are in flight at once.

    On one stage there is nothing to fill, so the microbatches run one by one and none is kept.
    """
    if num_stages == 1:
        return one_forward_one_backward(num_stages, num_microbatches, num_chunks)
    microbatch, _, stage = np.ogrid[:num_microbatches, :num_chunks, :num_stages]
    turn, in_reverse = num_microbatches + num_stages - 1, num_microbatches - 1 - microbatch
    return Ticks(forward=microbatch + stage, backward=turn + in_reverse + (num_stages - 1 - stage))


def make_schedule(name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """The schedule called `name`, checked.

    Raises:
        ValueError: unknown name, no stage or no microbatch, or a number of chunks that the schedule does not take.
    """
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}: choose one of {', '.join(sorted(SCHEDULES))}")
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError(f"a schedule needs at least 1 stage and 1 microbatch, not {num_stages} and {num_microbatches}")
    chunked = SCHEDULES[name].chunked
    if (num_chunks > 1) != chunked or num_chunks < 1:
        raise ValueError(f"{name} takes {'2 or more chunks' if chunked else '1 chunk'}, not {num_chunks}")
    if num_chunks > 1 and num_stages == 1:
        raise ValueError(f"{name} needs at least 2 stages")
    return arrange(SCHEDULES[name].ticks(num_stages, num_microbatches, num_chunks))


def forward_only(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Forward passes alone, for evaluation, checked."""
    return arrange(Ticks(one_forward_one_backward(num_stages, num_microbatches, num_chunks).forward))


def arrange(ticks: Ticks) -> Schedule:
    """The table of `ticks`, checked, every buffer as small as it can be."""
    num_microbatches, num_chunks, num_stages = ticks.forward.shape
    assert ticks.backward is None or (ticks.forward <= ticks.backward).all(), "a backward before its forward"
    fused = num_stages == 1 and ticks.backward is not None and bool((ticks.forward == ticks.backward).all())
    num_ticks = 1 + int(max(ticks.forward.max(), -1 if ticks.backward is None else ticks.backward.max()))
    indices = np.indices(ticks.forward.shape)
    microbatch, chunk, stage = indices[0], indices[1], indices[2]

    def table(tick: np.ndarray, values: np.ndarray, where: np.ndarray | None = None) -> np.ndarray:
        cells = np.full((num_ticks, num_stages), IDLE, np.int32)
        where = np.ones(tick.shape, bool) if where is None else where
        cells[tick[where], stage[where]] = values[where]
        return cells

    def direction(tick: np.ndarray, slot: np.ndarray, upstream: int) -> Pass:
        by_virtual = tick.reshape(num_microbatches, -1)  # [microbatches, virtual stages]
        sent = np.roll(by_virtual, -upstream, axis=1)
        sent[:, 0 if upstream < 0 else -1] = IDLE  # the virtual stage where the direction begins
        sent = sent.reshape(tick.shape)
        receives = sent != IDLE
        assert (sent[receives] < tick[receives]).all(), "something is used before it was sent"
        inbox, depth = _slots(sent + 1, tick, stage, receives)
        cells = table(tick, microbatch)
        assert np.count_nonzero(cells != IDLE) == tick.size, "two microbatches in one tick of a stage"
        return Pass(
            cells, table(tick, chunk), table(tick, slot),
            table(sent + 1, inbox, receives), table(tick, inbox, receives), depth,
        )  # fmt: skip

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


def _slots(first: np.ndarray, last: np.ndarray, stage: np.ndarray, where: np.ndarray) -> tuple[np.ndarray, int]:
    """A buffer slot for everything that is kept on its stage from tick `first` to tick `last`, both included."""
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


def check(schedule: Schedule) -> None:
    """Assert that a table can be run, independently of how it was made: run it with symbols in place of arrays.

    Every stage runs every chunk of every microbatch forward once and backward once; its input has arrived in its inbox
    and is the right one; nothing is overwritten before it was read, in inbox or ring buffer, and nothing is left over.
    """
    p, num_virtual = schedule.num_stages, schedule.num_virtual
    for table in (schedule.forward, schedule.backward):
        for array in (table.microbatch, table.chunk, table.slot, table.arrival, table.source):
            assert array.shape == (schedule.num_ticks, p), array.shape
    buffers: list[dict] = [{} for _ in range(p)]
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
                elif schedule.backward.active.any():
                    assert 0 <= slot < schedule.num_slots and slot not in buffers[s], ("slot", tick, s)
                    buffers[s][slot] = (microbatch, k)
    for table, _, _, inboxes, ran, wires in directions:
        expected = schedule.num_microbatches * num_virtual if table.active.any() else 0
        assert len(ran) == expected, "something was not run"
        assert not any(inboxes) and not any(wires), "something was not used"
    assert schedule.forward.active.any() and not any(buffers)
    assert schedule.backward.active.any() or schedule.num_slots == 0, "kept for a backward that never comes"

"""Pipeline schedules as data: which microbatch every stage runs forward and backward in every tick. No JAX here.

A tick is at most one forward and one backward per stage, forward first, then a hand-over to the neighbours; what a
stage receives in one tick it uses in the next. A new schedule is one more function that places forwards and backwards
in ticks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

IDLE = -1


@dataclass(frozen=True)
class Schedule:
    """A table of ticks × stages.

    Attributes:
        forward: microbatch each stage runs forward in each tick, or `IDLE`; int32 [ticks, stages].
        backward: likewise for the backward pass. A microbatch in both columns of one tick runs forward, then backward.
        forward_slot, backward_slot: the slot of the stage's ring buffer where the forward leaves what the backward
        needs. num_slots: size of the ring buffer; 0 if no microbatch outlives its tick anywhere.
    """

    forward: np.ndarray
    backward: np.ndarray
    forward_slot: np.ndarray
    backward_slot: np.ndarray
    num_slots: int

    @property
    def num_ticks(self) -> int:
        return self.forward.shape[0]

    @property
    def num_stages(self) -> int:
        return self.forward.shape[1]

    @property
    def num_microbatches(self) -> int:
        return int(self.forward.max()) + 1


def eager_1f1b(num_stages: int, num_microbatches: int) -> Schedule:
    """Eager 1F1B: forward of microbatch i at stage s in tick i + s, backward in tick i + 2(p-1) - s.

    m + 2(p-1) ticks; at most 2(p-1-s)+1 microbatches in flight at stage s, whatever their number. The last stage runs a
    microbatch backward in the tick of its forward.
    """

    def place(microbatch: int, stage: int) -> tuple[int, int]:
        return microbatch + stage, microbatch + 2 * (num_stages - 1) - stage

    return _table(num_stages, num_microbatches, place)


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """GPipe: all forwards, then all backwards, last microbatch first; all microbatches are in flight at once.

    On one stage there is nothing to fill, so the microbatches run one by one and none is kept.
    """
    if num_stages == 1:
        return eager_1f1b(num_stages, num_microbatches)

    def place(microbatch: int, stage: int) -> tuple[int, int]:
        reverse = num_microbatches - 1 - microbatch
        first_backward = num_microbatches + num_stages - 1
        return microbatch + stage, first_backward + reverse + (num_stages - 1 - stage)

    return _table(num_stages, num_microbatches, place)


def forward_only(num_stages: int, num_microbatches: int) -> np.ndarray:
    """Forward passes alone, for evaluation: microbatch or `IDLE`, int32 [ticks, stages]."""
    ticks = np.arange(num_microbatches + num_stages - 1)[:, None]
    microbatch = ticks - np.arange(num_stages)[None, :]
    return np.where((microbatch >= 0) & (microbatch < num_microbatches), microbatch, IDLE).astype(np.int32)


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {"1f1b": eager_1f1b, "gpipe": gpipe}


def make_schedule(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """The schedule called `name`, validated.

    Raises:
        ValueError: unknown name, or no stage or no microbatch.
    """
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}: choose one of {', '.join(sorted(SCHEDULES))}")
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError(f"a schedule needs at least 1 stage and 1 microbatch, not {num_stages} and {num_microbatches}")
    schedule = SCHEDULES[name](num_stages, num_microbatches)
    check(schedule)
    return schedule


def _table(num_stages: int, num_microbatches: int, place: Callable[[int, int], tuple[int, int]]) -> Schedule:
    """Fill the table from the tick of each forward and backward, and give every microbatch in flight a buffer slot."""
    ticks = [[place(i, s) for s in range(num_stages)] for i in range(num_microbatches)]
    num_ticks = 1 + max(backward for row in ticks for _, backward in row)
    forward, backward, forward_slot, backward_slot = (
        np.full((num_ticks, num_stages), IDLE, np.int32) for _ in range(4)
    )
    for microbatch, row in enumerate(ticks):
        for stage, (forward_tick, backward_tick) in enumerate(row):
            forward[forward_tick, stage] = microbatch
            backward[backward_tick, stage] = microbatch
    num_slots = 0
    for stage in range(num_stages):
        slot_of: dict[int, int] = {}
        free: list[int] = []
        for tick in range(num_ticks):
            entering, leaving = int(forward[tick, stage]), int(backward[tick, stage])
            if entering == leaving:
                continue
            if entering != IDLE:
                slot = free.pop() if free else len(slot_of)
                slot_of[entering] = forward_slot[tick, stage] = slot
                num_slots = max(num_slots, len(slot_of))
            if leaving != IDLE:
                backward_slot[tick, stage] = slot_of.pop(leaving)
                free.append(int(backward_slot[tick, stage]))
    return Schedule(forward, backward, forward_slot, backward_slot, num_slots)


def check(schedule: Schedule) -> None:
    """Assert that a table can be run, independently of how it was made.

    Every stage runs every microbatch forward once and backward once, what it uses arrived from its neighbour in the
    tick before, and no buffer slot is overwritten before it was read. Both passes of a microbatch share a tick on the
    last stage for all microbatches or for none, and on no other stage.
    """
    num_microbatches = schedule.num_microbatches
    together = ((schedule.forward == schedule.backward) & (schedule.forward != IDLE)).sum(axis=0)
    assert not together[:-1].any() and together[-1] in (0, num_microbatches), together
    for table, upstream in ((schedule.forward, -1), (schedule.backward, +1)):
        for stage in range(schedule.num_stages):
            ran = table[:, stage]
            assert sorted(ran[ran != IDLE].tolist()) == list(range(num_microbatches)), (stage, ran)
            if 0 <= stage + upstream < schedule.num_stages:
                for tick in np.flatnonzero(ran != IDLE):
                    assert tick > 0 and table[tick - 1, stage + upstream] == ran[tick], (stage, tick)
    for stage in range(schedule.num_stages):
        live: dict[int, int] = {}
        for now in range(schedule.num_ticks):
            entering, leaving = int(schedule.forward[now, stage]), int(schedule.backward[now, stage])
            if entering == leaving:
                continue
            if entering != IDLE:
                slot = int(schedule.forward_slot[now, stage])
                assert slot not in live and 0 <= slot < schedule.num_slots, (stage, now)
                live[slot] = entering
            if leaving != IDLE:
                assert live.pop(int(schedule.backward_slot[now, stage]), IDLE) == leaving, (stage, now)
        assert not live, (stage, live)

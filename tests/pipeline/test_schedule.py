"""Schedules: tables that a simulated pipe can run, and broken ones that `check` rejects. When: test_timing.py.

Letters: p stages, m microbatches, v chunks of each stage; microbatch i, stage s, chunk c, virtual stage k = c·p + s.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megajax.pipeline.schedule import SCHEDULES, ScheduleKind, Ticks, arrange, forward_only, make_schedule
from megajax.pipeline.table import IDLE, Pass, Schedule, check
from megajax.pipeline.timing import in_flight

TABLES = ["microbatch", "chunk", "slot", "arrival", "source"]
all_arguments = st.one_of(
    st.tuples(st.sampled_from(["1f1b", "gpipe"]), st.integers(1, 8), st.integers(1, 20), st.just(1)),
    st.tuples(st.just("interleaved"), st.integers(2, 8), st.integers(1, 20), st.integers(2, 4)),
)


class Slots(list):
    """Memory of some slots; each is written, read once, and then free."""

    def __init__(self, size: int):
        super().__init__([None] * size)
        self.peak = 0

    def put(self, slot: int, token: tuple) -> None:
        assert 0 <= slot < len(self), "no such slot"
        assert self[slot] is None, "overwritten before it was read"
        self[slot] = token
        self.peak = max(self.peak, self.used)

    def take(self, slot: int) -> tuple:
        assert 0 <= slot < len(self), "no such slot"
        token, self[slot] = self[slot], None
        assert token is not None, "nothing is there"
        return token

    @property
    def used(self) -> int:
        return len(self) - self.count(None)


class Stage:
    """One stage of a simulated pipe: its memory, what lies on its wires, and what it has run, as (microbatch, k)."""

    def __init__(self, schedule: Schedule):
        self.saved = Slots(schedule.num_slots)
        self.inboxes = Slots(schedule.forward.inbox_depth), Slots(schedule.backward.inbox_depth)
        self.wires: list[tuple | None] = [None, None]
        self.forward_done: list[tuple[int, int]] = []
        self.backward_done: list[tuple[int, int]] = []
        self.peak = 0  # of what it has run forward and not yet backward

    def receive(self, direction: int, table: Pass, slot: int) -> tuple:
        token = self.inboxes[direction].take(slot)
        assert not table.direct or token is self.wires[direction], "it came earlier, and there is no inbox"
        return token


def simulate(schedule: Schedule) -> list[Stage]:
    """Run the table as hardware would: (microbatch, route) tokens are sent, stored and read where the table says.

    An activation carries the virtual stages that it went through up, a gradient those that it came through down.
    """
    p, last = schedule.num_stages, schedule.num_stages * schedule.num_chunks - 1
    keeps = (schedule.backward.microbatch != IDLE).any()
    pipe = [Stage(schedule) for _ in range(p)]
    assert p == 1 or not schedule.fused, "the stages of a pipe hand over between forward and backward"
    for tick in range(schedule.num_ticks):
        sent: tuple[list, list] = [None] * p, [None] * p
        for s, stage in enumerate(pipe):
            for direction, table in enumerate((schedule.forward, schedule.backward)):
                arrived, slot = stage.wires[direction], int(table.arrival[tick, s])
                assert (arrived is None) == (slot == IDLE), "stored without an arrival, or arrived and not stored"
                if arrived is not None:
                    stage.inboxes[direction].put(slot, arrived)
            up, down = (
                {name: int(getattr(table, name)[tick, s]) for name in TABLES}
                for table in (schedule.forward, schedule.backward)
            )
            handed = None  # from forward to backward where both are one
            if up["microbatch"] != IDLE:
                i, k = up["microbatch"], up["chunk"] * p + s
                x = (i, ()) if k == 0 else stage.receive(0, schedule.forward, up["source"])
                assert x == (i, tuple(range(k))), "the input is not there"
                y = (i, (*x[1], k))
                stage.forward_done.append((i, k))
                if k != last:
                    sent[0][(s + 1) % p] = y
                if schedule.fused and k == last:
                    handed = y
                elif keeps:
                    stage.saved.put(up["slot"], y)
            stage.peak = max(stage.peak, stage.saved.used + (handed is not None))
            if down["microbatch"] != IDLE:
                i, k = down["microbatch"], down["chunk"] * p + s
                kept = handed if schedule.fused and k == last else stage.saved.take(down["slot"])
                assert kept == (i, tuple(range(k + 1))), "what was saved is another's"
                gradient = (i, ()) if k == last else stage.receive(1, schedule.backward, down["source"])
                assert gradient == (i, tuple(range(last, k, -1))), "the gradient is not there"
                stage.backward_done.append((i, k))
                if k != 0:
                    sent[1][(s - 1) % p] = (i, (*gradient[1], k))
        for s, stage in enumerate(pipe):
            stage.wires = [sent[0][s], sent[1][s]]
    for s, stage in enumerate(pipe):
        work = sorted((i, c * p + s) for i in range(schedule.num_microbatches) for c in range(schedule.num_chunks))
        assert sorted(stage.forward_done) == work, "not every forward once"
        assert sorted(stage.backward_done) == (work if keeps else []), "not every backward once"
        assert not any((*stage.saved, *stage.inboxes[0], *stage.inboxes[1], *stage.wires)), "something is left over"
    return pipe


def run(schedule: Schedule) -> None:
    """Everything arrives, nothing is overwritten, all runs once, and no memory is larger than it must be."""
    pipe = simulate(schedule)
    assert [stage.peak for stage in pipe] == in_flight(schedule)
    assert schedule.num_slots == max(stage.saved.peak for stage in pipe)
    for direction, table in enumerate((schedule.forward, schedule.backward)):
        assert table.inbox_depth == max(stage.inboxes[direction].peak for stage in pipe)


@given(all_arguments)
def test_a_simulated_pipe_runs_the_table(arguments):
    """Of every schedule, for any number of stages, microbatches and chunks; and its forwards alone."""
    schedule = make_schedule(*arguments)
    assert (schedule.num_stages, schedule.num_microbatches, schedule.num_chunks) == arguments[1:]
    run(schedule)
    simulate(forward_only(*arguments[1:]))


@given(all_arguments, st.integers(0, 2**32 - 1), st.integers(0, 4))
def test_a_simulated_pipe_runs_any_ticks(arguments, seed, pause):
    """`arrange` needs only ticks in which the input is there and the stage is free: here random ones."""
    _, p, m, v = arguments
    rng, taken = np.random.default_rng(seed), set()
    ticks = np.zeros((2, m, v * p), int)  # forward, backward
    for i in range(m):
        ready = 0
        for direction, k in [(0, k) for k in range(v * p)] + [(1, k) for k in reversed(range(v * p))]:
            tick = ready + int(rng.integers(0, pause + 1))
            while (direction, tick, k % p) in taken:
                tick += 1
            taken.add((direction, tick, k % p))
            ticks[direction, i, k] = tick
            ready = tick + (direction == 1 or k < v * p - 1)
    schedule = arrange(Ticks(*ticks.reshape(2, m, v, p)))
    check(schedule)
    run(schedule)


@pytest.mark.parametrize(("direction", "where"), [(0, (1, 0, 0)), (1, (slice(None), 0, 1))])
def test_a_wrong_schedule_is_not_made(monkeypatch, direction, where):
    """The table of any function in `SCHEDULES` is checked: two in one cell; a stage ahead of its gradients."""
    ticks = [table.copy() for table in dataclasses.astuple(SCHEDULES["1f1b"].ticks(4, 6, 1))]
    ticks[direction][where] -= 1
    monkeypatch.setitem(SCHEDULES, "wrong", ScheduleKind(lambda *_: Ticks(*ticks)))
    with pytest.raises(AssertionError):
        make_schedule("wrong", 4, 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f2b", 2, 2), "unknown schedule '1f2b': choose one of 1f1b, gpipe, interleaved"),
        (("", 1, 1), "unknown schedule ''"),
        (("1f1b", 0, 2), "at least 1 stage and 1 microbatch, not 0 and 2"),
        (("gpipe", 2, 0), "at least 1 stage and 1 microbatch, not 2 and 0"),
        (("interleaved", 4, 4), "interleaved takes 2 or more chunks, not 1"),
        (("interleaved", 4, 4, 0), "interleaved takes 2 or more chunks, not 0"),
        (("interleaved", 1, 4, 2), "interleaved needs at least 2 stages"),
        (("1f1b", 4, 4, 2), "1f1b takes 1 chunk, not 2"),
        (("gpipe", 4, 4, 0), "gpipe takes 1 chunk, not 0"),
    ],
)
def test_what_no_schedule_can_be_is_refused(arguments, message):
    """With an error that says what there is."""
    with pytest.raises(ValueError, match=message):
        make_schedule(*arguments)

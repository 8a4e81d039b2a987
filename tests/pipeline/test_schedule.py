"""Schedules: tables that a simulated pipe can run, and broken ones that `check` rejects. When: test_timing.py.

Letters: p stages, m microbatches, v chunks of each stage; microbatch i, stage s, chunk c, virtual stage k = c·p + s.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator import all_arguments, simulate

from megajax.pipeline.schedule import SCHEDULES, ScheduleKind, Ticks, arrange, forward_only, make_schedule
from megajax.pipeline.table import Schedule, check
from megajax.pipeline.timing import in_flight


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

"""Schedules: ticks and microbatches in flight as their closed forms say, and tables that a simulated pipe can run."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megajax.pipeline.schedule import IDLE, SCHEDULES, Schedule, check, forward_only, make_schedule

names = st.sampled_from(sorted(SCHEDULES))
stages = st.integers(1, 9)
microbatches = st.integers(1, 24)
POINTS = [(1, 1), (1, 6), (2, 1), (4, 2), (4, 4), (4, 10), (4, 16), (8, 3)]  # m < p, m = p, p not dividing m, p = 1


class Stage:
    """One stage of a simulated pipe: its inboxes, its ring buffer, and the microbatches it has run."""

    def __init__(self, num_slots: int):
        self.slots: list = [None] * num_slots
        self.activation = self.gradient = None  # what the neighbours sent at the end of the last tick
        self.forward_done: list[int] = []
        self.backward_done: list[int] = []
        self.peak = 0


def simulate(schedule: Schedule) -> list[Stage]:
    """Run the table as hardware would: (microbatch, route) tokens are sent, stored and read where the table says.

    An activation carries the stages that it went through up, a gradient those that it came through down.
    """
    last = schedule.num_stages - 1
    pipe = [Stage(schedule.num_slots) for _ in range(schedule.num_stages)]
    for tick in range(schedule.num_ticks):
        sent_up, sent_down = [None] * (last + 1), [None] * (last + 1)
        for s, stage in enumerate(pipe):
            up, down = int(schedule.forward[tick, s]), int(schedule.backward[tick, s])
            kept = None
            if up != IDLE:
                route = (up, ()) if s == 0 else stage.activation
                assert route == (up, tuple(range(s))), "the input is not there"
                kept = sent_up[s] = (up, (*route[1], s))
                stage.forward_done.append(up)
                if up != down:
                    slot = schedule.forward_slot[tick, s]
                    assert slot >= 0 and stage.slots[slot] is None, "overwritten before it was read"
                    stage.slots[slot] = kept
            stage.peak = max(stage.peak, sum(slot is not None for slot in stage.slots) + (IDLE != up == down))
            if down != IDLE:
                if up != down:
                    slot = schedule.backward_slot[tick, s]
                    assert slot >= 0
                    kept, stage.slots[slot] = stage.slots[slot], None
                assert kept == (down, tuple(range(s + 1))), "the saved activations are another's"
                route = (down, ()) if s == last else stage.gradient
                assert route == (down, tuple(range(last, s, -1))), "the gradient is not there"
                sent_down[s] = (down, (*route[1], s))
                stage.backward_done.append(down)
        for s, stage in enumerate(pipe):
            stage.activation = sent_up[s - 1] if s > 0 else None
            stage.gradient = sent_down[s + 1] if s < last else None
    for stage in pipe:
        assert all(slot is None for slot in stage.slots)
    return pipe


@given(names, stages, microbatches)
def test_a_simulated_pipe_runs_the_table(name, p, m):
    """Everything arrives, nothing is overwritten, every stage runs every microbatch forward and backward once."""
    for stage in simulate(make_schedule(name, p, m)):
        assert sorted(stage.forward_done) == sorted(stage.backward_done) == list(range(m))


@given(stages, microbatches)
def test_1f1b_is_its_closed_form(p, m):
    """Forward of i at stage s in tick i + s, backward in tick i + 2(p-1) - s, m + 2(p-1) ticks in all."""
    schedule = make_schedule("1f1b", p, m)
    assert schedule.num_ticks == m + 2 * (p - 1)
    for s in range(p):
        assert [int(np.flatnonzero(schedule.forward[:, s] == i)[0]) - i for i in range(m)] == [s] * m
        assert [int(np.flatnonzero(schedule.backward[:, s] == i)[0]) - i for i in range(m)] == [2 * (p - 1) - s] * m


@given(stages, microbatches)
def test_1f1b_bounds_what_is_in_flight(p, m):
    """At most 2(p-1-s) + 1 microbatches at stage s however many there are; a pipe of one keeps none in a buffer."""
    schedule = make_schedule("1f1b", p, m)
    assert [stage.peak for stage in simulate(schedule)] == [min(m, 2 * (p - 1 - s) + 1) for s in range(p)]
    assert schedule.num_slots == (0 if p == 1 else min(m, 2 * (p - 1) + 1))


@given(stages, microbatches)
def test_gpipe_runs_all_forwards_first(p, m):
    """2(m + p - 1) ticks, the last backward first, all in flight at once; a pipe of one runs them one by one."""
    schedule = make_schedule("gpipe", p, m)
    pipe = simulate(schedule)
    if p == 1:
        assert schedule.num_slots == 0 and schedule.num_ticks == m
        return
    assert schedule.num_ticks == 2 * (m + p - 1) and schedule.num_slots == m
    assert np.argwhere(schedule.forward != IDLE)[:, 0].max() < np.argwhere(schedule.backward != IDLE)[:, 0].min()
    for stage in pipe:
        assert stage.backward_done == stage.forward_done[::-1] == list(range(m))[::-1]
        assert stage.peak == m


@given(stages, microbatches)
def test_forward_only_takes_m_plus_p_minus_1_ticks(p, m):
    """Microbatch i at stage s in tick i + s, nothing else."""
    table = forward_only(p, m)
    assert table.shape == (m + p - 1, p) and (table != IDLE).sum() == m * p
    assert all(table[i + s, s] == i for i in range(m) for s in range(p))


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize(("p", "m"), POINTS)
def test_check_accepts_what_is_right(name, p, m):
    """The library's own check agrees with the simulator."""
    schedule = make_schedule(name, p, m)
    check(schedule)
    simulate(schedule)


def changed(schedule: Schedule, table: str, edit) -> Schedule:
    """`schedule` with one of its tables edited in place."""
    array = getattr(schedule, table).copy()
    edit(array)
    return dataclasses.replace(schedule, **{table: array})


def cell(table: np.ndarray, microbatch: int, stage: int) -> tuple[int, int]:
    return int(np.flatnonzero(table[:, stage] == microbatch)[0]), stage


def swap(microbatch: int, other: int, stage: int):
    def edit(table):
        here, there = cell(table, microbatch, stage), cell(table, other, stage)
        table[here], table[there] = other, microbatch

    return edit


def put(microbatch: int, stage: int, value: int):
    """In the cell of a microbatch, another value."""

    def edit(table):
        table[cell(table, microbatch, stage)] = value

    return edit


def delay(stage: int):
    """Everything of one stage a tick later."""

    def edit(table):
        table[:, stage] = np.roll(table[:, stage], 1)

    return edit


BREAKS = {
    "two microbatches swapped": ("forward", swap(1, 2, 1)),
    "two backwards swapped": ("backward", swap(1, 2, 2)),
    "a forward missing": ("forward", put(2, 1, IDLE)),
    "a backward missing": ("backward", put(2, 0, IDLE)),
    "a microbatch run twice": ("forward", put(2, 3, 1)),
    "one that does not exist": ("backward", put(2, 0, 9)),
    "a stage one tick late": ("forward", delay(2)),
    "gradients one tick late": ("backward", delay(1)),
    "gradients one tick early": ("backward", lambda table: table.__setitem__(slice(None), np.roll(table, -1, 0))),
}


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("what", BREAKS)
def test_check_rejects_a_broken_order(name, what):
    """Anything out of order, missing, repeated or unknown; the simulator agrees."""
    broken = changed(make_schedule(name, 4, 6), *BREAKS[what])
    with pytest.raises(AssertionError):
        check(broken)
    with pytest.raises((AssertionError, TypeError)):
        for stage in simulate(broken):
            assert sorted(stage.forward_done) == sorted(stage.backward_done) == list(range(6))


@pytest.mark.parametrize("table", ["forward", "backward"])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_check_rejects_what_only_the_neighbours_see(name, table):
    """A stage that exchanges two microbatches together with their slots is sound in itself, but gets others' inputs."""
    schedule = make_schedule(name, 4, 6)
    first, second = (cell(getattr(schedule, table), microbatch, 1) for microbatch in (1, 2))

    def exchange(array):
        array[first], array[second] = array[second], array[first]

    with pytest.raises(AssertionError):
        check(changed(changed(schedule, table, exchange), f"{table}_slot", exchange))


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_check_rejects_a_microbatch_that_nobody_runs(name):
    """Left out by every stage in both directions."""

    def leave_out(table):
        table[table == 2] = IDLE

    schedule = make_schedule(name, 4, 6)
    with pytest.raises(AssertionError):
        check(changed(changed(schedule, "forward", leave_out), "backward", leave_out))


def first_used(table: np.ndarray, stage: int, above: int = -1) -> tuple[int, int]:
    return int(np.flatnonzero(table[:, stage] > above)[0]), stage


def reuse_a_slot(table):
    """The second microbatch goes where the first still lies."""
    second = np.flatnonzero(table[:, 0] != IDLE)[1]
    table[second, 0] = table[first_used(table, 0)]


def exchange_reads(table):
    """Two microbatches at the end read each other's slot, when nothing is written any more."""
    *_, before, last = np.flatnonzero(table[:, 0] != IDLE)
    table[before, 0], table[last, 0] = table[last, 0], table[before, 0]


SLOT_BREAKS = {
    "overwritten before it was read": ("forward_slot", reuse_a_slot),
    "beyond the buffer": ("forward_slot", lambda table: table.__setitem__(first_used(table, 1), 99)),
    "none at all": ("forward_slot", lambda table: table.__setitem__(first_used(table, 1), IDLE)),
    "another's read": ("backward_slot", lambda table: table.__setitem__(first_used(table, 0), 4)),
    "two reads exchanged": ("backward_slot", exchange_reads),
    "none read": ("backward_slot", lambda table: table.__setitem__(first_used(table, 0), IDLE)),
}


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("what", SLOT_BREAKS)
def test_check_rejects_a_broken_buffer(name, what):
    """Slots that are overwritten, outside the buffer, or read for the wrong microbatch; a buffer one slot short."""
    schedule = make_schedule(name, 4, 6)
    with pytest.raises(AssertionError):
        check(changed(schedule, *SLOT_BREAKS[what]))
    with pytest.raises(AssertionError):
        check(dataclasses.replace(schedule, num_slots=schedule.num_slots - 1))


@pytest.mark.parametrize(("name", "p", "m"), [("1f2b", 2, 2), ("1f1b", 0, 2), ("gpipe", 2, 0), ("", 1, 1)])
def test_unknown_schedules_are_refused(name, p, m):
    """With an error that says what there is."""
    with pytest.raises(ValueError, match=r"1f1b, gpipe|at least 1"):
        make_schedule(name, p, m)

"""Weight gradients that wait: what bubble is left and what is kept, as formulas and the literature say.

Letters: p stages, m microbatches, v chunks of each stage; tF, tB, tW the times of a stage's forward, input gradient and
weight gradient of a microbatch, of a chunk a v-th of it.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator import all_arguments
from tiny import full

from megajax.core.pipeline.deferral import PassTimes
from megajax.core.pipeline.schedule import make_schedule
from megajax.core.pipeline.table import IDLE, Deferral, Schedule, check
from megajax.core.pipeline.timing import (
    StageTimes,
    in_flight,
    kept_entries,
    pending_weights,
    step_time,
    timeline,
    wall_time,
)
from megajax.plan.published import deferred_bubble, published_zero_bubble

LAYERS = [PassTimes(1, 1, 1), PassTimes(28, 32, 24), PassTimes(1, 2, 1)]  # tW at most tF and tB
LONG = [PassTimes(*times) for times in ((1, 1, 1.5), (1, 1, 3), (28, 32, 30), (2, 1, 1.5), (1, 2, 3), (10, 12, 11))]
USUAL = [*LAYERS[:2], full(LAYERS[2])]
GRID = [(p, v) for p in (2, 4, 8) for v in (1, 2, 4)]


def total(times: PassTimes) -> float:
    return times.forward + times.input_gradient + times.weight_gradient


def one_f_one_b(p: int, m: int, v: int, times: PassTimes) -> Schedule:
    return make_schedule("1f1b" if v == 1 else "interleaved", p, m, v, times)


def idle(schedule: Schedule, times: PassTimes) -> float:
    """Bubble as a time."""
    return step_time(schedule, StageTimes.equal(schedule, times)).bubble * schedule.num_microbatches * total(times)


def idle_by_ticks(schedule: Schedule, times: PassTimes) -> float:
    """Every tick as long as its slowest stage."""
    d, v = schedule.deferral, schedule.num_chunks
    weights = schedule.backward.active if d is None else d.early + d.late
    runs = schedule.forward.active, schedule.backward.active, weights
    work = sum(np.multiply(run, time) for run, time in zip(runs, dataclasses.astuple(times), strict=True))
    return float(np.max(work, axis=1).sum() / v) - schedule.num_microbatches * total(times)


@pytest.mark.parametrize("times", USUAL, ids=str)
@pytest.mark.parametrize(("p", "v"), GRID)
def test_the_bubble_is_the_closed_form(p, v, times):
    """(p-1)(tF + tB - tW)/v for every m from 2p on, by the timeline and by ticks."""
    formula = (p - 1) * (times.forward + times.input_gradient - times.weight_gradient) / v
    for m in (2 * p, 2 * p + 1, 3 * p, 4 * p - 1):
        schedule = one_f_one_b(p, m, v, times)
        assert idle(schedule, times) == pytest.approx(formula)
        assert idle_by_ticks(schedule, times) == pytest.approx(formula)
        name = "1f1b" if v == 1 else "interleaved"
        assert deferred_bubble(name, p, m, v, times) == pytest.approx(formula)


@pytest.mark.parametrize("times", USUAL, ids=str)
@pytest.mark.parametrize(("p", "v"), GRID)
def test_few_microbatches(p, v, times):
    """From p on at most 1 + 1/v of a microbatch's whole work above the closed form; below p never more than today."""
    formula = (p - 1) * (times.forward + times.input_gradient - times.weight_gradient) / v
    for m in {p, p + 1, 2 * p - 1}:
        schedule = one_f_one_b(p, m, v, times)
        most = formula + (1 + 1 / v) * total(times)
        assert idle(schedule, times) <= most * (1 + 1e-12) >= idle_by_ticks(schedule, times)
        assert deferred_bubble("1f1b", p, m, v, times) is None
    for m in {1, p - 1}:
        today = make_schedule("1f1b" if v == 1 else "interleaved", p, m, v)
        assert idle(one_f_one_b(p, m, v, times), times) < idle(today, times)


@pytest.mark.parametrize("times", [*LAYERS, *LONG], ids=str)
@pytest.mark.parametrize("p", [2, 4, 8])
def test_gpipe_runs_weight_gradients_while_it_fills(p, times):
    """(p-1)(tF + tB) is left, p-1 waiting are enough."""
    schedule = make_schedule("gpipe", p, 2 * p, 1, times)
    assert idle(schedule, times) == pytest.approx((p - 1) * (times.forward + times.input_gradient))
    assert deferred_bubble("gpipe", p, 2 * p, 1, times) == pytest.approx(idle(schedule, times))
    if times in LAYERS:
        assert max(pending_weights(schedule)) == p - 1


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "enough"), [("interleaved", 6, 5, 3, 5), ("interleaved", 4, 4, 2, 3), ("gpipe", 5, 6, 1, 4)]
)
def test_no_more_wait_than_help(name, p, m, v, enough, monkeypatch):
    """With few microbatches, too; one less takes longer."""
    schedule = make_schedule(name, p, m, v, PassTimes())
    assert max(pending_weights(schedule)) == enough and schedule.deferral.num_slots == enough + 1
    monkeypatch.setattr("megajax.core.pipeline.deferral.most_pending", lambda num_stages: enough - 1)
    fewer = make_schedule(name, p, m, v, PassTimes())
    assert idle(fewer, PassTimes()) > idle(schedule, PassTimes())


@pytest.mark.parametrize("times", [*LONG[::2], *map(full, LONG[1::2])], ids=str)
@pytest.mark.parametrize(("p", "v"), [(2, 1), (4, 1), (8, 1), (4, 2), (8, 2)])
def test_long_weight_gradients(p, v, times):
    """The second rule: max(tF, tW) + max(tB, tW) - tW, or tF + tB where that is less; (p-1)/v times."""
    forward, backward, weight = dataclasses.astuple(times)
    formula = (p - 1) / v * min(forward + backward, max(forward, weight) + max(backward, weight) - weight)
    for m in (2 * p, 3 * p - 1):
        schedule = one_f_one_b(p, m, v, times)
        assert idle(schedule, times) == pytest.approx(formula)
        assert deferred_bubble("1f1b", p, m, v, times) == pytest.approx(formula)
    assert deferred_bubble("mine", p, 2 * p, v, times) is None


KEPT = {(2, 8, 1): (3, 4), (4, 12, 1): (7, 10), (8, 32, 1): (15, 22), (4, 8, 2): (11, 14), (8, 32, 2): (23, 30)}


@pytest.mark.parametrize(("p", "m", "v"), KEPT)
def test_what_is_kept(p, m, v):
    """A stage keeps p-1 chunks more at most; the buffer of factors has one slot more than may wait."""
    schedule = one_f_one_b(p, m, v, PassTimes())
    assert (max(in_flight(schedule)), max(kept_entries(schedule))) == KEPT[p, m, v]
    assert schedule.deferral.num_slots == 2 * (p - 1) + 1
    larger = one_f_one_b(p, 2 * m, v, PassTimes())
    assert kept_entries(larger) == kept_entries(schedule)


def test_published():
    """arXiv 2401.10241, table 2: no bubble where a weight gradient takes as long as half of forward and backward."""
    assert published_zero_bubble(4, PassTimes(1, 1, 1)) == {"ZB-H1": (3, 4), "ZB-H2": (0, 7)}
    assert published_zero_bubble(8, PassTimes(28, 32, 24)) == {"ZB-H1": (7 * 36, 8), "ZB-H2": (7 * 12, 15)}


def test_a_timeline_by_hand():
    """1F1B, two stages, two microbatches: the first weight gradient of each stage in the place of a forward, a
    backward."""
    schedule = one_f_one_b(2, 2, 1, PassTimes())
    spans = [
        (x.stage, "FBW"[x.part] + str(x.microbatch), x.start) for x in timeline(schedule, StageTimes.equal(schedule))[1]
    ]
    assert sorted(spans) == [
        (0, "B0", 3), (0, "B1", 5), (0, "F0", 0), (0, "F1", 1), (0, "W0", 4), (0, "W1", 6),
        (1, "B0", 2), (1, "B1", 4), (1, "F0", 1), (1, "F1", 3), (1, "W0", 5), (1, "W1", 6),
    ]  # fmt: skip


times_of_passes = st.builds(PassTimes, *[st.sampled_from([0.25, 1, 1.5, 2, 7])] * 3)


@given(all_arguments, times_of_passes)
def test_any_table_can_be_run_and_is_never_slower(arguments, times):
    """Every weight gradient once, in the order of the backwards and none before its own; no more wait than may."""
    today, schedule = make_schedule(*arguments), make_schedule(*arguments, times)
    p = schedule.num_stages
    assert (schedule.deferral is None) == (p == 1)
    if p == 1:
        return
    deferral, backward = schedule.deferral, schedule.backward
    assert not deferral.early[schedule.forward.active].any()  # they stand in the place of one
    for s in range(p):
        waiting: list[tuple[int, int]] = []
        ran: list[tuple[int, int]] = []
        kept = 0
        for tick, row in enumerate(schedule.cells()):
            early, late = row[s].early, row[s].late
            for cell in early:
                assert cell == waiting.pop(0)
            if backward.microbatch[tick, s] != IDLE:
                waiting.append((int(backward.microbatch[tick, s]), int(backward.chunk[tick, s])))
            kept = max(kept, len(waiting))
            for cell in late:
                assert cell == waiting.pop(0)
            ran += early + late
            assert len(waiting) <= 2 * (p - 1)
            assert (len(early), len(late)) == (deferral.early[tick, s], deferral.late[tick, s])
        assert not waiting and len(set(ran)) == len(ran) == schedule.num_microbatches * schedule.num_chunks
        assert kept <= deferral.num_slots
    walls = [wall_time(each, StageTimes.equal(each, times)) for each in (schedule, today)]
    assert walls[0] <= walls[1] * (1 + 1e-12)
    assert idle_by_ticks(schedule, times) <= idle_by_ticks(today, times) + 1e-9 * walls[1]
    assert len(timeline(schedule, StageTimes.equal(schedule))[1]) == 3 * p * len(deferral.microbatch)


def edited(edit: Callable[[Deferral], None]) -> Schedule:
    """The table of a small pipe with its deferral edited in place."""
    schedule = one_f_one_b(3, 6, 1, PassTimes())
    names = "early", "late", "microbatch", "chunk"
    copy = dataclasses.replace(schedule.deferral, **{name: getattr(schedule.deferral, name).copy() for name in names})
    edit(copy)
    return dataclasses.replace(schedule, deferral=copy)


def move(table: np.ndarray, s: int, to: Callable[[int], int]) -> None:
    """One weight gradient of stage s from the first tick that has one to another."""
    tick = int(np.flatnonzero(table[:, s])[0])
    table[tick, s] -= 1
    table[to(tick), s] += 1


def swap(d: Deferral) -> None:
    d.microbatch[[1, 2], 0] = d.microbatch[[2, 1], 0]


BREAKS: dict[str, Callable[[Deferral], None]] = {
    "before its backward": lambda d: move(d.late, 2, lambda tick: 0),
    "in the tick of its backward, before it": lambda d: np.copyto(d.early[:, 0], np.eye(len(d.early), dtype=int)[4]),
    "one missing": lambda d: np.subtract(d.late[-1], 1, out=d.late[-1]),
    "one twice": lambda d: np.add(d.late[-1], 1, out=d.late[-1]),
    "two in the other order": swap,
    "of another chunk": lambda d: np.add(d.chunk[3:4], 1, out=d.chunk[3:4]),
    "so late that its slot is taken": lambda d: move(d.late, 2, lambda tick: -1),
    "fewer than none": lambda d: np.copyto(d.early[0], -1),
}


@pytest.mark.parametrize("what", BREAKS)
def test_check_rejects_a_broken_deferral(what):
    """A weight gradient at a wrong time or not at all, or factors that are gone."""
    check(edited(lambda d: None))
    with pytest.raises(AssertionError):
        check(edited(BREAKS[what]))


def test_check_rejects_too_few_slots():
    """Or none, or one row of the table too few, or what is kept of a backward that runs in the tick of its forward."""
    schedule = one_f_one_b(3, 6, 1, PassTimes())
    d = schedule.deferral
    fewer = [dataclasses.replace(d, num_slots=slots) for slots in (0, d.num_slots - 1)]
    shorter = dataclasses.replace(d, early=d.early[:-1])
    broken = [dataclasses.replace(schedule, deferral=deferral) for deferral in (*fewer, shorter)]
    single = make_schedule("1f1b", 1, 3)
    counts = np.ones((3, 1), np.int32)
    order = np.arange(3, dtype=np.int32)[:, None]
    broken.append(dataclasses.replace(single, deferral=Deferral(0 * counts, counts, order, 0 * order, 1)))
    for each in broken:
        with pytest.raises(AssertionError):
            check(each)

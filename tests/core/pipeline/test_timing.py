"""When a schedule runs what, how long it takes and what it holds: as closed forms, hand and the literature say.

Letters: p stages, m microbatches, v chunks of each stage; microbatch i, stage s, chunk c, virtual stage k = c·p + s.
"""

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator import TABLES, all_arguments

from megajax.core.pipeline.deferral import PassTimes
from megajax.core.pipeline.schedule import forward_only, make_schedule
from megajax.core.pipeline.table import IDLE, Pass, Schedule
from megajax.core.pipeline.timing import StageTimes, in_flight, step_time, timeline, wall_time
from megajax.plan.published import published_bubble, published_in_flight

stages, microbatches = st.integers(1, 8), st.integers(1, 20)
pipes, chunks = st.integers(2, 8), st.integers(2, 4)  # of the interleaved schedule
GRID = [(name, p, v) for p in (2, 4, 8) for name, v in
        (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 4))]  # fmt: skip


def ticks(schedule: Schedule, table: Pass) -> list:
    """When each thing runs, [m, v, p]."""
    found = np.full((schedule.num_microbatches, schedule.num_chunks, schedule.num_stages), IDLE)
    for tick, s in np.argwhere(table.microbatch != IDLE):
        found[table.microbatch[tick, s], table.chunk[tick, s], s] = tick
    return found.tolist()


def closed_form(p: int, m: int, v: int, tick: Callable[[int, int, int], int]) -> list:
    return [[[tick(i, c, s) for s in range(p)] for c in range(v)] for i in range(m)]


@given(stages, microbatches)
def test_1f1b_is_its_closed_form(p, m):
    """Forward of i at stage s in tick i + s, backward in tick i + 2(p-1) - s; at most 2(p-1-s) + 1 in flight."""
    schedule = make_schedule("1f1b", p, m)
    assert schedule.num_ticks == m + 2 * (p - 1)
    assert ticks(schedule, schedule.forward) == closed_form(p, m, 1, lambda i, c, s: i + s)
    assert ticks(schedule, schedule.backward) == closed_form(p, m, 1, lambda i, c, s: i + 2 * (p - 1) - s)
    assert in_flight(schedule) == [min(m, 2 * (p - 1 - s) + 1) for s in range(p)]
    assert schedule.num_slots == (0 if p == 1 else min(m, 2 * (p - 1) + 1))
    assert schedule.forward.direct and schedule.backward.direct


@given(stages, microbatches)
def test_gpipe_runs_all_forwards_first(p, m):
    """2(m + p - 1) ticks, the last backward first, all in flight at once; a pipe of one runs them one by one."""
    schedule = make_schedule("gpipe", p, m)
    turn = 0 if p == 1 else 2 * (m + p - 1) - 1
    assert ticks(schedule, schedule.forward) == closed_form(p, m, 1, lambda i, c, s: i + s)
    assert ticks(schedule, schedule.backward) == closed_form(p, m, 1, lambda i, c, s: turn - i - s if turn else i)
    assert in_flight(schedule) == ([1] if p == 1 else [m] * p)
    assert schedule.num_slots == (0 if p == 1 else m)


@given(pipes, st.integers(0, 4), st.integers(1, 8), chunks)
def test_interleaved_is_its_closed_form(p, full_groups, part, v):
    """Full groups of p microbatches, or one that is not full: nothing waits in an inbox."""
    m = full_groups * p or min(part, p)
    schedule = make_schedule("interleaved", p, m, v)

    def forward(i, c, s):
        return i // p * p * v + c * p + i % p + s

    def backward(i, c, s):
        return i // p * p * v + (v - 1 - c) * p + i % p + (p - 1 - s) + (v * p - 1)

    assert ticks(schedule, schedule.forward) == closed_form(p, m, v, forward)
    assert ticks(schedule, schedule.backward) == closed_form(p, m, v, backward)
    assert schedule.forward.direct and schedule.backward.direct
    bound = [min(m * v, v * p + p - 1 - 2 * s) for s in range(p)]
    if full_groups:
        assert schedule.num_ticks == m * v + p * (v + 1) - 2
        assert in_flight(schedule) == bound
    assert all(found <= most for found, most in zip(in_flight(schedule), bound, strict=True))


@given(pipes, st.integers(0, 24), chunks)
def test_interleaved_stretches_its_groups(p, more, v):
    """floor(m/p) near-equal groups go through chunk after chunk, and no stage pauses from its first to its last."""
    m = p + more
    schedule = make_schedule("interleaved", p, m, v)
    size = -(-m // (m // p))  # of the largest group
    for table, turn, order in ((schedule.forward, 0, 1), (schedule.backward, (v - 1) * size + p - 1, -1)):
        for s in range(p):
            runs = np.flatnonzero(table.microbatch[:, s] != IDLE)
            first = turn + (s if table is schedule.forward else p - 1 - s)
            assert runs.tolist() == list(range(first, first + m * v))
            cells = zip(table.chunk[runs, s].tolist(), table.microbatch[runs, s].tolist(), strict=True)
            parts = [(c, [i for _, i in part]) for c, part in itertools.groupby(cells, key=lambda cell: cell[0])]
            groups = [group for _, group in parts[::v]]
            assert parts == [(c, group) for group in groups for c in range(v)[::order]]
            assert list(itertools.chain(*groups)) == list(range(m)) and len(groups) == m // p
            assert {len(group) for group in groups} <= {size - 1, size} and min(map(len, groups)) >= p
    assert max(in_flight(schedule)) <= (v - 1) * size + 2 * p - 1
    for table in (schedule.forward, schedule.backward):
        assert 1 <= table.inbox_depth <= size - p + 1
        assert table.direct == (size == p)  # else the microbatches wait for their next chunk at one of the ends


@given(all_arguments)
def test_forward_only_is_the_forward_part(arguments):
    """The forwards of the schedule, in the same ticks, and nothing else."""
    schedule, evaluation = make_schedule(*arguments), forward_only(*arguments[1:])
    whole, part = schedule.forward, evaluation.forward
    for name in set(TABLES) - {"slot"}:
        table = getattr(whole, name)
        assert (getattr(part, name) == table[: evaluation.num_ticks]).all()
        assert (table[evaluation.num_ticks :] == IDLE).all()
    assert part.active[-1].any() and part.inbox_depth == whole.inbox_depth
    assert evaluation.num_slots == 0 and not evaluation.fused and not evaluation.turns_at_once
    assert (part.slot == IDLE).all() and all((getattr(evaluation.backward, name) == IDLE).all() for name in TABLES)


@given(all_arguments)
def test_where_the_last_virtual_stage_turns_at_once(arguments):
    """Always in 1F1B, in GPipe only in a pipe of one, interleaved if all groups are equal. All that is kept passes
    through the buffer, but for a single stage that runs a microbatch backward at once."""
    name, p, m, _ = arguments
    schedule = make_schedule(*arguments)
    expected = {"1f1b": True, "gpipe": p == 1, "interleaved": m < p or m % (m // p) == 0}[name]
    assert schedule.turns_at_once == expected and schedule.fused == (p == 1)
    for table in (schedule.forward, schedule.backward):
        assert ((table.slot != IDLE) == ((table.microbatch != IDLE) & (not schedule.fused))).all()


@pytest.mark.parametrize(("name", "p", "v"), GRID)
def test_the_bubble_is_the_published_one(name, p, v):
    """(p-1)/(v·m) of the ideal time for m from p on, whether p divides it or not; also if tB is not 2 tF."""
    for m in {p, p + 1, 2 * p - 1, 2 * p, 3 * p, 3 * p + 2, 4 * p + 1}:
        schedule = make_schedule(name, p, m, v)
        assert step_time(schedule).bubble == pytest.approx((p - 1) / (v * m), rel=1e-12)
        assert published_bubble(name, p, m, v) == (p - 1) / (v * m)
        assert wall_time(schedule, StageTimes.equal(schedule)) == pytest.approx(3 * (m + (p - 1) / v), rel=1e-12)
        times = StageTimes.equal(schedule, PassTimes(5, 2, 2))
        assert wall_time(schedule, times) == pytest.approx(9 * (m + (p - 1) / v), rel=1e-12)


def test_literature():
    """arXiv 2104.04473, §2.2: bubbles, and in flight the warm-up forwards and one more."""
    assert published_bubble("1f1b", 4, 8, 1) == 3 / 8 and published_bubble("interleaved", 4, 8, 2) == 3 / 16
    assert published_bubble("gpipe", 1, 8, 1) == 0
    assert published_in_flight("interleaved", 4, 6, 2) is None  # Megatron-LM refuses it
    assert published_bubble("mine", 4, 8, 1) is None is published_in_flight("mine", 4, 8, 1)
    assert published_in_flight("gpipe", 4, 8, 1) == [8, 8, 8, 8]
    assert published_in_flight("1f1b", 4, 8, 1) == [4, 3, 2, 1]  # at most p, at the first stage
    assert published_in_flight("1f1b", 4, 2, 1) == [2, 2, 2, 1]
    assert published_in_flight("interleaved", 4, 8, 2) == [11, 9, 7, 5]  # warm-up of 2·3 + 4, 2·2 + 4, …
    assert published_in_flight("interleaved", 2, 4, 3) == [7, 5]
    assert published_in_flight("interleaved", 4, 4, 2) == [8, 8, 8, 8]  # all forwards are warm-up where m = p
    for p, m, v in [(4, 8, 2), (2, 6, 4), (8, 16, 2)]:  # where p divides m we hold no more than Megatron-LM
        assert in_flight(make_schedule("interleaved", p, m, v)) == published_in_flight("interleaved", p, m, v)


def test_equal_stages_share_the_work():
    """The times are those of all chunks of a stage together."""
    schedule = make_schedule("interleaved", 2, 3, 4)
    times = StageTimes.equal(schedule)
    assert (times.forward == np.full((4, 2), 0.25)).all() and (times.backward == np.full((4, 2), 0.5)).all()
    assert times.busy(schedule).tolist() == [9, 9]
    with_ends = dataclasses.replace(times, embed=1, head=5, embed_backward=2)
    assert with_ends.busy(schedule).tolist() == [9 + 3 * 8] * 2


def test_a_timeline_by_hand():
    """1F1B, two stages, two microbatches, the second stage slower."""
    schedule = make_schedule("1f1b", 2, 2)
    times = StageTimes(np.array([[1.0, 3.0]]), np.array([[2.0, 4.0]]))
    spans = [(x.stage, "FB"[x.part] + str(x.microbatch), x.start, x.end) for x in timeline(schedule, times)[1]]
    assert sorted(spans) == [
        (0, "B0", 8, 10), (0, "B1", 15, 17), (0, "F0", 0, 1), (0, "F1", 1, 2),
        (1, "B0", 4, 8), (1, "B1", 11, 15), (1, "F0", 1, 4), (1, "F1", 8, 11),
    ]  # fmt: skip
    assert wall_time(schedule, times) == 17
    assert step_time(schedule, times).bubble == pytest.approx(3 / 14)


def test_a_timeline_with_a_common_head_by_hand():
    """For the head all wait for the slowest: here the first stage, with the slower backward, for the second."""
    schedule = make_schedule("1f1b", 2, 3)
    times = StageTimes(np.array([[1.0, 3.0]]), np.array([[4.0, 1.0]]), head=1.0)
    backwards = sorted((x.stage, x.microbatch, x.start, x.end) for x in timeline(schedule, times)[1] if x.part)
    assert backwards == [(0, 0, 10, 14), (0, 1, 15, 19), (0, 2, 19, 23), (1, 0, 5, 6), (1, 1, 10, 11), (1, 2, 15, 16)]
    assert wall_time(schedule, times) == 23
    assert step_time(schedule, times).bubble == pytest.approx(5 / 18)


@given(all_arguments, st.integers(0, 2**32 - 1))
def test_a_timeline_can_be_run(arguments, seed):
    """Everything once; a stage does one thing at a time, and nothing starts before its input is there."""
    _, p, m, v = arguments
    schedule = make_schedule(*arguments)
    forward, backward = np.random.default_rng(seed).integers(1, 9, (2, v, p)).astype(float)
    times = StageTimes(forward, backward)
    spans = timeline(schedule, times)[1]
    found = {(x.microbatch, x.chunk * p + x.stage, bool(x.part)): x for x in spans}
    assert set(found) == set(itertools.product(range(m), range(v * p), (False, True))) and len(spans) == len(found)
    for (i, k, is_backward), span in found.items():
        assert span.end - span.start == (backward if is_backward else forward)[span.chunk, span.stage]
        if is_backward:
            before = (i, k, False) if k == v * p - 1 else (i, k + 1, True)
        else:
            before = (i, k - 1, False) if k else None
        assert span.start >= (found[before].end if before else 0)
    for s in range(p):
        own = sorted((span.start, span.end) for span in spans if span.stage == s)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(own))
    wall = wall_time(schedule, times)
    assert wall == max(span.end for span in spans) >= m * (forward + backward).sum(0).max()
    assert step_time(schedule, times).bubble == pytest.approx(wall / (m * (forward + backward).sum(0).max()) - 1)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("forward", "backward"), [(3, 2), (1, 7), (4, 9)])
def test_a_slow_stage_dominates(name, forward, backward):
    """All take its time for each microbatch; what the others need to fill and drain the pipe is added at most."""
    for p, slow in [(1, 0), (2, 0), (4, 0), (4, 2), (4, 3)]:
        times = StageTimes(np.ones((1, p)), np.full((1, p), 2.0))
        times.forward[0, slow], times.backward[0, slow] = forward, backward
        each = forward + backward
        walls = [wall_time(make_schedule(name, p, m), times) for m in range(1, 12)]
        assert all(m * each <= wall <= m * each + 3 * (p - 1) for m, wall in enumerate(walls, 1))
        assert set(np.diff(walls[2 * p :])) == {each}


ENDS = [("1f1b", 1, 5, 1), ("1f1b", 4, 6, 1), ("gpipe", 4, 6, 1), ("interleaved", 4, 8, 2), ("interleaved", 4, 6, 2)]


@pytest.mark.parametrize(("name", "p", "m", "v"), ENDS)
def test_ends_of_the_last_stage_or_of_all(name, p, m, v):
    """A head of the last stage delays everybody by all of its time; computed by all together, by a p-th of it."""
    schedule, head = make_schedule(name, p, m, v), 8.0
    times = StageTimes.equal(schedule)
    alone = dataclasses.replace(times, backward=times.backward.copy())
    alone.backward[-1, -1] += head
    together = dataclasses.replace(times, head=head / p, embed=0.5, embed_backward=0.25)
    pipe, work = 3 * (p - 1) / v, m * (3 + head / p + 0.75)
    assert wall_time(schedule, alone) == pytest.approx(m * (3 + head) + pipe)
    assert wall_time(schedule, together) == pytest.approx(work + pipe)
    assert step_time(schedule, together).bubble == pytest.approx(pipe / work)


def test_evaluation_takes_the_forwards_time():
    for p, m, v in [(1, 3, 1), (4, 6, 1), (4, 8, 2), (4, 6, 2), (2, 5, 3)]:
        schedule = forward_only(p, m, v)
        assert wall_time(schedule, StageTimes.equal(schedule)) == pytest.approx(m + (p - 1) / v)

"""Schedules: tables that a simulated pipe can run, and broken ones that it and `check` reject (when: test_timing.py);
the placement of layers on stages.

Letters: p stages, m microbatches, v chunks of each stage; microbatch i, stage s, chunk c, virtual stage k = c·p + s.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator import TABLES, all_arguments, simulate

from megajax.core.errors import UserError
from megajax.core.pipeline.placement import Placement
from megajax.core.pipeline.schedule import SCHEDULES, ScheduleKind, Ticks, arrange, forward_only, make_schedule
from megajax.core.pipeline.table import IDLE, Pass, Schedule, check
from megajax.core.pipeline.timing import in_flight


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
    with pytest.raises(UserError, match=r"schedule 'unknown'; valid: .*1f1b"):
        make_schedule("unknown", 4, 6)


def rejected(schedule: Schedule, by: Callable[[Schedule], object]) -> bool:
    try:
        by(schedule)
    except AssertionError:
        return True
    return False


def edited(schedule: Schedule, direction: str, edit: Callable[[Pass], None]) -> Schedule:
    """`schedule` with the tables of one direction edited in place."""
    tables = getattr(schedule, direction)
    copy = dataclasses.replace(tables, **{name: getattr(tables, name).copy() for name in TABLES})
    edit(copy)
    return dataclasses.replace(schedule, **{direction: copy})


def swap(t: Pass, names: list[str], one: tuple[int, int], other: tuple[int, int]) -> None:
    for table in (getattr(t, name) for name in names):
        table[one], table[other] = table[other], table[one]


def put(t: Pass, names: list[str], where: tuple[int, int], value: int | tuple[int, int]) -> None:
    """A value, or what is in another cell."""
    for table in (getattr(t, name) for name in names):
        table[where] = table[value] if isinstance(value, tuple) else value


def shift(t: Pass, s: int, by: int) -> None:
    """All that a stage does and receives, some ticks later."""
    for table in (getattr(t, name) for name in TABLES):
        table[:, s] = np.roll(table[:, s], by)


def at(t: Pass, i: int, s: int) -> tuple[int, int]:
    """Where stage s runs microbatch i, first chunk; with i = IDLE, where it does nothing."""
    return int(np.flatnonzero((t.microbatch[:, s] == i) & (t.chunk[:, s] == min(i, 0)))[-1]), s


SMALL = {
    "1f1b": make_schedule("1f1b", 3, 4),
    "a single stage": make_schedule("1f1b", 1, 3),
    "gpipe": make_schedule("gpipe", 2, 3),
    "interleaved": make_schedule("interleaved", 2, 3, 2),
    "interleaved, unequal groups": make_schedule("interleaved", 2, 5, 2),
    "forward only": forward_only(2, 3, 2),
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("what", SMALL)
def test_check_rejects_any_changed_entry(what, name):
    """Whatever is used of a table, changed to anything else: what, where to, from where; the simulator agrees."""
    schedule = SMALL[what]
    for direction in ("forward", "backward"):
        table = getattr(getattr(schedule, direction), name)
        for where in np.ndindex(table.shape):
            if table[where] == IDLE and name not in ("microbatch", "arrival"):
                continue  # not looked at
            for value in set(range(-2, table.max() + 2)) - {int(table[where])}:
                broken = edited(schedule, direction, partial(put, names=[name], where=where, value=value))
                assert rejected(broken, simulate) and rejected(broken, check), (direction, where, value)


def test_check_rejects_a_chunk_where_nothing_runs():
    """The executor would take it for one more end of the model: `at_virtual` is true there."""
    broken = edited(LARGER["1f1b"], "backward", lambda t: put(t, ["chunk"], (0, 3), 0))
    assert broken.at_virtual(broken.backward, 3)[0, 3]
    assert rejected(broken, check)


RUN = ["microbatch", "chunk", "slot"]
BREAKS: dict[str, tuple[str, Callable[[Pass], None]]] = {
    "two forwards swapped": ("forward", lambda t: swap(t, ["microbatch"], at(t, 1, 1), at(t, 2, 1))),
    "two backwards swapped": ("backward", lambda t: swap(t, ["microbatch"], at(t, 1, 2), at(t, 2, 2))),
    "two forwards swapped with their slots": ("forward", lambda t: swap(t, RUN, at(t, 1, 1), at(t, 2, 1))),
    "two backwards swapped with their slots": ("backward", lambda t: swap(t, RUN, at(t, 1, 1), at(t, 2, 1))),
    # Nothing is read where a direction begins: only the neighbour sees it.
    "two first forwards swapped": ("forward", lambda t: swap(t, RUN, at(t, 1, 0), at(t, 2, 0))),
    "two forwards swapped with their inputs": (
        "forward", lambda t: swap(t, [*RUN, "source"], at(t, 1, 1), at(t, 2, 1))),
    "a forward missing": ("forward", lambda t: put(t, TABLES, at(t, 2, 1), IDLE)),
    "a backward missing": ("backward", lambda t: put(t, TABLES, at(t, 2, 0), IDLE)),
    "a forward never run": ("forward", lambda t: put(t, [*RUN, "source"], at(t, 5, 3), IDLE)),
    "a forward twice": ("forward", lambda t: put(t, TABLES, at(t, IDLE, 3), at(t, 2, 3))),
    "a first forward twice": ("forward", lambda t: put(t, TABLES, at(t, IDLE, 0), at(t, 5, 0))),
    "a backward twice": ("backward", lambda t: put(t, TABLES, at(t, IDLE, 0), at(t, 2, 0))),
    "a stage one tick late": ("forward", lambda t: shift(t, 2, 1)),
    "the first stage one tick late": ("forward", lambda t: shift(t, 0, 1)),
    "gradients one tick late": ("backward", lambda t: shift(t, 1, 1)),
    "gradients one tick early": ("backward", lambda t: shift(t, 1, -1)),
    "a slot written while live": ("forward", lambda t: put(t, ["slot"], at(t, 1, 0), at(t, 0, 0))),
    "two writes exchanged": ("forward", lambda t: swap(t, ["slot"], at(t, 1, 1), at(t, 2, 1))),
    "two reads exchanged": ("backward", lambda t: swap(t, ["slot"], at(t, 4, 0), at(t, 5, 0))),
}  # fmt: skip


def crowd(t: Pass) -> None:
    """Microbatch 1, back at the first stage for its next chunk, is stored and read where microbatch 0 still lies."""
    t.arrival[5, 0], t.source[7, 0] = t.arrival[4, 0], t.source[6, 0]


INBOX_BREAKS: dict[str, tuple[str, Callable[[Pass], None]]] = {
    "stored where another still lies": ("forward", crowd),
    "two arrivals exchanged": ("forward", lambda t: swap(t, ["arrival"], (4, 0), (5, 0))),
    "two inputs exchanged": ("forward", lambda t: swap(t, ["source"], (6, 0), (7, 0))),
    "stored a tick late": ("forward", lambda t: swap(t, ["arrival"], (9, 0), (10, 0))),
}
LARGER = {
    "1f1b": make_schedule("1f1b", 4, 6),
    "gpipe": make_schedule("gpipe", 4, 6),
    "interleaved": make_schedule("interleaved", 4, 6, 2),  # one group of 6: chunks wait at the first stage
}
CASES = [(name, edit) for edit in BREAKS.values() for name in LARGER]
CASES += [("interleaved", edit) for edit in INBOX_BREAKS.values()]
IDS = [f"{name}-{what}" for what in BREAKS for name in LARGER] + [f"interleaved-{what}" for what in INBOX_BREAKS]


@pytest.mark.parametrize(("name", "edit"), CASES, ids=IDS)
def test_check_rejects_a_broken_table(name, edit):
    """Anything out of order, missing or repeated, any memory used wrongly; the simulator agrees."""
    broken = edited(LARGER[name], *edit)
    assert rejected(broken, simulate)
    with pytest.raises(AssertionError):
        check(broken)


def renumbered(schedule: Schedule, numbers: dict[int, int]) -> Schedule:
    """Microbatches under other numbers throughout; with the number `IDLE` nothing of them is left."""

    def edit(t: Pass) -> None:
        whole = t.microbatch.copy()
        for i, number in numbers.items():
            t.microbatch[whole == i] = number
        for table in (getattr(t, name) for name in TABLES):
            table[(t.microbatch == IDLE) & (len(numbers) == schedule.num_microbatches)] = IDLE

    return edited(edited(schedule, "forward", edit), "backward", edit)


@pytest.mark.parametrize("name", LARGER)
def test_check_rejects_another_size(name):
    """Buffers one slot short; a microbatch or a chunk that nobody runs; fused where it is not, and the reverse.

    A microbatch of another number, one that comes twice, nothing at all: each in itself a sound table.
    """
    schedule = LARGER[name]
    wrong = [
        dataclasses.replace(schedule, **{size: getattr(schedule, size) + by})
        for size, by in {"num_slots": -1, "num_microbatches": 1, "num_chunks": 1}.items()
    ]
    wrong.append(dataclasses.replace(schedule, fused=not schedule.fused))
    for direction in ("forward", "backward"):
        table = getattr(schedule, direction)
        shallow = dataclasses.replace(table, inbox_depth=table.inbox_depth - 1)
        wrong.append(dataclasses.replace(schedule, **{direction: shallow}))
    wrong.append(renumbered(schedule, {2: 6}))
    wrong.append(dataclasses.replace(renumbered(schedule, {5: 4}), num_microbatches=5))
    wrong.append(renumbered(dataclasses.replace(schedule, fused=False), dict.fromkeys(range(6), IDLE)))
    for broken in wrong:
        assert rejected(broken, simulate)
        with pytest.raises(AssertionError):
            check(broken)


even_placements = st.builds(Placement, st.integers(1, 30), st.integers(1, 8), st.integers(1, 3))


@st.composite
def given_placements(draw: st.DrawFn) -> Placement:
    stages, chunks = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    counts = draw(st.lists(st.integers(0, 4), min_size=stages * chunks, max_size=stages * chunks).filter(any))
    return Placement(sum(counts), stages, chunks, tuple(counts))


@st.composite
def placed_periods(draw: st.DrawFn) -> Placement:
    """A kind's layers, of which periods have several or none."""
    placement = draw(even_placements | given_placements())
    runs = draw(st.lists(st.integers(0, 3), min_size=placement.num_layers, max_size=placement.num_layers).filter(any))
    return dataclasses.replace(placement, runs=tuple(runs))


placements = even_placements | given_placements() | placed_periods()


@given(placements)
def test_every_layer_has_one_slot_in_order(placement):
    """Going through the chunks, in each through the stages, the layers come in canonical order, each once."""
    index = placement.layer_index
    assert index.shape == (placement.num_chunks, placement.num_stages, placement.layers_per_chunk)
    assert index[index >= 0].tolist() == list(range(placement.size))
    assert set(index[index < 0]) <= {-1}
    assert placement.padded == (index < 0).any()


@given(given_placements())
def test_numbers_of_layers_are_those_of_the_virtual_stages(placement):
    """Chunk after chunk, in each stage after stage."""
    numbers = (placement.layer_index >= 0).sum(2)
    for k, count in enumerate(placement.given):
        assert numbers[divmod(k, placement.num_stages)] == placement.counts[divmod(k, placement.num_stages)] == count


@given(even_placements)
def test_the_extra_layers_are_a_contiguous_run(placement):
    """The first virtual stages hold one layer more than the others; padded slots come last in their stage."""
    rows = placement.layer_index.reshape(-1, placement.layers_per_chunk)
    counts = (rows >= 0).sum(1)
    assert (np.diff(counts) <= 0).all() and counts.max() - counts.min() <= 1
    assert counts[0] == placement.layers_per_chunk
    assert all((row[:count] >= 0).all() for row, count in zip(rows, counts, strict=True))


@settings(max_examples=8)  # every one compiles
@given(placements)
def test_stages_and_back(placement):
    """The round trip is exact, and padding is zeros, of which nothing comes back, whatever stands there."""
    canonical = np.random.default_rng(0).normal(size=(placement.size, 2, 3)).astype(np.float32)
    pipelined = np.array(placement.to_stages(jnp.asarray(canonical)))
    index = placement.layer_index
    assert pipelined.shape == (*index.shape, 2, 3)
    np.testing.assert_array_equal(pipelined[index >= 0], canonical)
    assert not pipelined[index < 0].any()
    pipelined[index < 0] = np.nan
    np.testing.assert_array_equal(placement.to_canonical(jnp.asarray(pipelined)), canonical)


def test_the_documented_interleaved_example():
    """16 layers, 4 stages, 2 chunks: stage 0 has layers 1-2 and 9-10, stage 3 has 7-8 and 15-16 (REFERENCE §3)."""
    index = Placement(16, 4, 2).layer_index + 1
    expected = [[1, 2, 9, 10], [3, 4, 11, 12], [5, 6, 13, 14], [7, 8, 15, 16]]
    assert [index[:, stage].ravel().tolist() for stage in range(4)] == expected


@pytest.mark.parametrize("placement", [Placement(8, 4), Placement(7, 4)], ids=["even", "padded"])
def test_gradients_pass_through_the_placement(placement):
    weights = jnp.arange(placement.num_layers, dtype=float)
    pipelined_grad = jnp.asarray(np.random.default_rng(0).normal(size=placement.layer_index.shape).astype(np.float32))
    (grad,) = jax.vjp(placement.to_stages, weights)[1](pipelined_grad)
    np.testing.assert_array_equal(grad, placement.to_canonical(pipelined_grad))

"""The mesh never changes the numbers: losses and every gradient of five steps equal those of one device, dropout on."""

import dataclasses
import functools
import itertools
import math

import jax
import pytest
from tiny import tiny_config

from megajax.verify import Comparison, Trace, compare, trace

MESHES = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2), (1, 4, 2), (4, 1, 2), (8, 1, 1), (1, 8, 1), (1, 1, 8)]
GRID = {
    "mesh": MESHES,  # heads = tensor size in the last one
    "microbatch": [1, 2, 4],
    "schedule": ["1f1b", "gpipe"],
    "remat": ["none", "layer"],
    "num_layers": [5, 8],  # 5: not divisible by any pipe but 1
    "vocab_size": [101, 128],  # 101: padded
}
STEPS = 5


def pairwise(grid: dict[str, list]) -> list[tuple]:
    """Rows of the grid that contain every pair of values of any two of its columns, chosen greedily."""
    rows = list(itertools.product(*grid.values()))

    def pairs(row: tuple) -> set:
        return set(itertools.combinations(enumerate(row), 2))

    missing, chosen = set().union(*map(pairs, rows)), []
    while missing:
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def name(row: tuple) -> str:
    return "-".join("x".join(map(str, value)) if isinstance(value, tuple) else str(value) for value in row)


PAIRWISE = pairwise(GRID)
OTHERS = [row for row in itertools.product(*GRID.values()) if row not in PAIRWISE]


@functools.cache
def reference(num_layers: int, vocab_size: int) -> Trace:
    return trace(tiny_config(microbatch=32, global_batch=32, num_layers=num_layers, vocab_size=vocab_size), STEPS)


def check_row(mesh, microbatch, schedule, remat, num_layers, vocab_size) -> None:
    config = tiny_config(
        mesh,
        schedule=schedule,
        remat=remat,
        microbatch=microbatch,
        global_batch=32,
        num_layers=num_layers,
        vocab_size=vocab_size,
    )
    result = compare(reference(num_layers, vocab_size), trace(config, STEPS))
    assert result.within(), result


@pytest.mark.parametrize("row", PAIRWISE, ids=name)
def test_pairwise(row):
    check_row(*row)


@pytest.mark.full
@pytest.mark.parametrize("row", OTHERS, ids=name)
def test_rest_of_the_grid(row):
    check_row(*row)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_what_is_left_is_rounding(schedule):
    """The hardest mesh in fp64, with more than one block of queries and layers the pipe does not divide."""
    common = {"precision": "fp64", "num_layers": 5, "sequence_length": 136, "global_batch": 8}
    with jax.enable_x64(True):
        expected = trace(tiny_config(microbatch=8, **common), 3)
        actual = trace(tiny_config((2, 2, 2), schedule=schedule, remat="layer", **common), 3)
    result = compare(expected, actual)
    assert result.loss_error < 1e-12 and result.gradient_error < 1e-12, result


def test_unrolled_layers_equal_scanned_ones():
    scanned = trace(tiny_config((1, 2, 2), num_layers=5), 3)
    unrolled = trace(tiny_config((1, 2, 2), num_layers=5, scan_layers="false"), 3)
    assert compare(scanned, unrolled).within()


def test_the_comparison_can_fail():
    """Another dropout seed, a doubled gradient and a NaN are all noticed."""
    config = tiny_config(num_layers=2)
    expected = trace(config, 2)
    assert compare(expected, expected) == Comparison(0.0, 0.0, next(iter(expected.gradients[0])))
    other = trace(dataclasses.replace(config, seed=1), 2)
    assert not compare(expected, other).within()
    for leaf in expected.gradients[0]:
        doubled = [gradients | {leaf: 1.001 * gradients[leaf]} for gradients in expected.gradients]
        wrong = compare(expected, Trace(expected.losses, doubled))
        assert wrong.worst_leaf == leaf and wrong.gradient_error > 0
    missing = [gradients | {leaf: math.nan * gradients[leaf]} for gradients in expected.gradients]
    assert not compare(expected, Trace(expected.losses, missing)).within()
    assert not compare(expected, Trace([math.nan, *expected.losses[1:]], expected.gradients)).within()

"""A recipe of docs/recipes.md: a batch that grows."""

import re
from pathlib import Path

import pytest
from processes import MESH_222, Commands
from results import assert_close_losses, curve, training
from tiny import full

TOKENS = 32  # of a sequence
SHORT = ("--train.eval-every", 100, "--train.eval-batches", 1, "--checkpoint.every", 100)


def ramp(start: int, increment: int, samples: int) -> tuple[object, ...]:
    return "--train.ramp-start", start, "--train.ramp-increment", increment, "--train.ramp-samples", samples


@pytest.mark.parametrize(
    ("flags", "mesh", "sizes", "first"),
    [
        (ramp(4, 4, 8), (), [4, 4, 8], 1),
        full(ramp(4, 4, 12), ("--mesh.data", 2, "--simulate-devices", 2), [4, 4, 4, 8, 8], 2),
        full((*ramp(4, 4, 24), "--train.global-batch", 12), MESH_222, [4, 4, 4, 8, 8, 12, 12], 4),
    ],
)
@pytest.mark.slow
def test_a_batch_that_grows(
    commands: Commands, tmp_path: Path, flags: tuple, mesh: tuple, sizes: list[int], first: int
) -> None:
    """A run that stops within the ramp continues on another mesh with the same results, and compiles the sizes left."""
    flags = (*flags, *SHORT, "--train.microbatch", 2 if mesh == MESH_222 else 1)
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    told = commands.train(straight, *flags, "--train.steps", len(sizes)).out
    different = sorted(set(sizes))
    full = sizes.index(sizes[-1]) + 1
    assert f"to {sizes[-1]} at step {full}; {len(different)} sizes" in told
    assert list(map(int, re.findall(r"compiled the step of (\d+) sequences", told))) == different
    assert [record["tokens"] for record in training(straight)] == [size * TOKENS for size in sizes]
    assert f"after {len(sizes)} steps, on {sizes[-1] * TOKENS} tokens (--train.eval-batches 1)\n" in told

    commands.train(parts, *flags, "--train.steps", first)
    told = commands.train(parts, *flags, *mesh, "--train.steps", len(sizes)).out
    assert list(map(int, re.findall(r"compiled the step of (\d+) sequences", told))) == sorted(set(sizes[first:]))
    assert_close_losses(curve(parts), curve(straight))
    assert [record["tokens"] for record in training(parts)] == [record["tokens"] for record in training(straight)]

"""A checkpoint that cannot be written is told in one line, leaves nothing behind and does not end training; nor does a
read that fails."""

import asyncio
import contextlib
import errno
import resource
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from tiny import tiny_config, tiny_program

from megajax.core.errors import RunError
from megajax.core.program.state import StateLayout, TrainState
from megajax.runs import checkpoint
from megajax.runs.checkpoint import Checkpoints
from megajax.runs.digests import problem_of, read_manifest
from megajax.runs.failures import forget_abandoned

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_collections")]


@pytest.fixture(scope="module")
def layout() -> StateLayout:
    return tiny_program(tiny_config(num_layers=1)).layout


@pytest.fixture(scope="module")
def state(layout: StateLayout) -> TrainState:
    """What is saved, whatever the step is called."""
    return layout.from_canonical(jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), layout.canonical_shapes))


@pytest.fixture
def checkpoints(layout: StateLayout, state: TrainState, tmp_path: Path) -> Iterator[Checkpoints]:
    """Those of a run that has one of step 1; the third failure in a row is the end."""
    (tmp_path / "run").mkdir()
    checkpoints = Checkpoints(tmp_path / "run", layout, keep=9, max_failures=3)
    checkpoints.save(1, state)
    checkpoints.wait()
    yield checkpoints
    checkpoints.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint of step")]


def fail(monkeypatch: pytest.MonkeyPatch, times: int, method: str = "finalize") -> None:
    """Let a method of Orbax raise so many times, as where the disk is full."""
    plain, left = getattr(ocp.StandardCheckpointHandler, method), [times]

    def failing(*arguments: Any, **others: Any) -> Any:
        if left[0] == 0:
            return plain(*arguments, **others)
        left[0] -= 1
        raise OSError(errno.ENOSPC, "No space left on device", "some file")

    monkeypatch.setattr(ocp.StandardCheckpointHandler, method, failing)


def entries(checkpoints: Checkpoints) -> list[str]:
    return sorted(entry.name for entry in checkpoints.folder.iterdir())


@pytest.mark.parametrize("method", ["async_save", "finalize"])
def test_one_failure_is_mended(
    checkpoints: Checkpoints, state: TrainState, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a second try, which is told."""
    fail(monkeypatch, 1, method)
    checkpoints.save(2, state)
    checkpoints.wait()
    (line,) = checkpoints.news()
    assert "step 2 was written on the second attempt; no space left on device: some file" in line
    assert checkpoints.news() == [] and checkpoints.saved == 2 and entries(checkpoints) == ["1", "2"]


def test_failures_are_survived_until_there_are_too_many_in_a_row(
    checkpoints: Checkpoints, state: TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes two tries. A good one in between begins the count anew; what is half written goes."""
    fail(monkeypatch, 4)
    for step in (2, 3):
        checkpoints.save(step, state)
    checkpoints.save(4, state)
    for line, step, count in zip(checkpoints.news(), (2, 3), (1, 2), strict=True):
        assert f"step {step} could not be written: no space left" in line and f"({count} of 3 in a row)" in line
    assert checkpoints.saved == 1
    checkpoints.wait()
    assert checkpoints.saved == 4 and entries(checkpoints) == ["1", "4"]
    fail(monkeypatch, 6)
    for step in (5, 6, 7):
        checkpoints.save(step, state)
    with pytest.raises(RunError, match=rf"step 7 .*--checkpoint.max-failures 3.*: {checkpoints.folder / '4'} "):
        checkpoints.save(8, state)
    assert entries(checkpoints) == ["1", "4"]


def test_who_waits_for_a_checkpoint_is_told_that_there_is_none(
    checkpoints: Checkpoints, state: TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a run, or before it stops, one failure is enough."""
    fail(monkeypatch, 2)
    checkpoints.save(2, state)
    for _ in range(2):
        with pytest.raises(RunError, match=r"step 2 could not .*; last good checkpoint: .*\(step 1\)$"):
            checkpoints.wait()
    checkpoints.save(3, state)
    checkpoints.wait()


def test_no_space(checkpoints: Checkpoints, state: TrainState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "Write", None)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    checkpoints.save(2, state)
    (line,) = checkpoints.news()
    assert f"step 2 could not be written: {checkpoints.folder} has 1.0 MB free, but a checkpoint" in line


def remove(folder: Path) -> None:
    """A folder and all in it, also while threads of a write that failed, which Orbax abandons, put files there."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            return shutil.rmtree(folder)
        time.sleep(0.1)
    raise AssertionError(f"{folder} is not removed")


def test_what_really_happens(checkpoints: Checkpoints, layout: StateLayout, state: TrainState, tmp_path: Path) -> None:
    """Files that may not grow, a file in the folder's place, a run directory that is gone, and one that is back."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        checkpoints.save(2, state)
        with pytest.raises(RunError, match=r"^the checkpoint of step 2 could not be written: .*file too large"):
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert entries(checkpoints) == ["1"] and len(checkpoints.news()) == 1
    remove(checkpoints.folder)
    checkpoints.folder.write_text("mine")
    checkpoints.save(3, state)
    with pytest.raises(RunError, match=r"step 3 could not be written: not a directory: \S+checkpoints"):
        checkpoints.wait()
    assert checkpoints.folder.read_text() == "mine"
    checkpoints.folder.unlink()
    checkpoints.save(4, state)
    checkpoints.wait()
    assert checkpoints.news()[0].endswith("(2 of 3 in a row)") and entries(checkpoints) == ["4"]
    remove(tmp_path / "run")
    checkpoints.save(5, state)
    with pytest.raises(RunError, match=rf"step 5 could not be written: .*{tmp_path / 'run'}"):
        checkpoints.wait()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("instead", ["nothing", "somebody else's", "checkpoints alone"])
def test_a_folder_that_is_removed_while_it_is_written(
    instead: str, layout: StateLayout, state: TrainState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorStore would make it anew: nothing stays where the run directory was, nothing is added to another one."""
    run_dir, plain, removed = tmp_path / "run", ocp.StandardCheckpointHandler.async_save, [False]
    run_dir.mkdir()
    (run_dir / "run.json").write_text("{}")
    checkpoints = Checkpoints(run_dir, layout, keep=9, max_failures=3)

    async def after_its_removal(*arguments: Any, **others: Any) -> Any:
        if not removed[0]:
            removed[0] = True
            (checkpoints.folder if instead == "checkpoints alone" else run_dir).rename(tmp_path / "gone")
            if instead == "somebody else's":
                run_dir.mkdir()
                (run_dir / "mine.txt").write_text("mine")
        return await plain(*arguments, **others)

    monkeypatch.setattr(ocp.StandardCheckpointHandler, "async_save", after_its_removal)
    checkpoints.save(1, state)
    if instead == "checkpoints alone":
        checkpoints.wait()
        folder = checkpoints.folder / "1"
        assert entries(checkpoints) == ["1"] and problem_of(folder, read_manifest(folder)) == ""
        assert checkpoints.news()[0].endswith(
            "on the second attempt; " + f"{checkpoints.folder / '1.orbax-checkpoint-tmp'} was removed"
        )
        return
    with pytest.raises(RunError, match=rf"^the checkpoint of step 1 could not be written: {run_dir} is gone; "):
        checkpoints.wait()
    assert [path.name for path in tmp_path.glob("run/*")] == (["mine.txt"] if instead == "somebody else's" else [])
    assert run_dir.exists() == (instead == "somebody else's")


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The exceptions that nobody could be told of."""
    found: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: found.append(str(unraisable.exc_value)))
    yield found
    monkeypatch.undo()


async def read(problem: str) -> None:
    """Fails in the way of Orbax's reads: whatever ends it becomes another exception."""
    try:
        await asyncio.sleep(0)
    except BaseException as error:
        raise Exception(problem) from error


class Faulty:
    def __del__(self) -> None:
        raise ValueError("of somebody else")


@pytest.mark.parametrize(("given_up", "told"), [(True, []), (False, ["while reading array index"])])
def test_a_read_that_ends_later(given_up: bool, told: list[str], heard: list[str]) -> None:
    """Is not heard of where it was given up; what fails elsewhere is."""
    under_way = read("while reading array index")
    under_way.send(None)
    if given_up:
        forget_abandoned()
    del under_way
    Faulty()
    assert heard == [*told, "of somebody else"]

"""What is not the user's mistake: damaged checkpoints, and a loss that is not finite."""

import errno
import math
import re
import shutil
from pathlib import Path

import pytest
from processes import (
    Commands,
    Run,
    assert_same_checkpoint,
    checkpoint_steps,
    contents,
    curve,
    training,
    validation,
)

from megajax.runs.writing import Write

TOO_FAST = ("--optimizer.learning-rate", 1e30)  # finite weights, but nothing that can be computed with them


def largest(folder: Path) -> Path:
    """The largest file below a folder."""
    return max((file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def truncate(checkpoint: Path) -> None:
    """Cut the largest file in half."""
    file = largest(checkpoint)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def remove(checkpoint: Path) -> None:
    """Delete the largest file."""
    largest(checkpoint).unlink()


def flip(checkpoint: Path) -> None:
    """Change three bytes in the middle of the largest file; its size stays."""
    data = bytearray(largest(checkpoint).read_bytes())
    for place in range(3):
        data[len(data) // 2 + 100 * place] ^= 0xFF
    largest(checkpoint).write_bytes(data)


def test_damaged_checkpoints_are_passed_over(commands: Commands, straight: Run, tmp_path: Path) -> None:
    """Of three checkpoints, one truncated, one lacking a file and one with other bytes, none is trained from; once one
    of them is whole, the run goes on from there to the right numbers."""
    run = shutil.copytree(straight.folder, tmp_path / "run")
    checkpoints = run / "checkpoints"
    for step, damage in ((20, truncate), (15, remove), (10, flip)):
        damage(checkpoints / str(step))
    before = contents(checkpoints)
    done = commands.run("train.py", commands.preset, "--run-dir", run)
    assert done.code == 1, (done.out, done.err)
    last = done.err.splitlines()[-1]
    assert "no checkpoint" in last and str(checkpoints) in last
    assert contents(checkpoints) == before

    shutil.rmtree(checkpoints / "10")
    shutil.copytree(straight.folder / "checkpoints" / "10", checkpoints / "10")
    done = commands.train(run)
    told = done.out + done.err
    assert "step 10" in told
    for step in (15, 20):
        assert any("damaged" in line and str(checkpoints / str(step)) in line for line in told.splitlines()), told
    assert curve(run) == curve(straight.folder)
    assert validation(run) == validation(straight.folder)
    assert {10, 15, 20} <= set(checkpoint_steps(run))
    assert_same_checkpoint(run, straight.folder, 20)


@pytest.mark.full
@pytest.mark.parametrize("damage", [truncate, remove, flip])
def test_each_damage_by_itself(commands: Commands, straight: Run, damage, tmp_path: Path) -> None:
    """Only the newest checkpoint is damaged: the run goes on from the one before."""
    run = shutil.copytree(straight.folder, tmp_path / "run")
    damage(run / "checkpoints" / "20")
    done = commands.train(run)
    assert "step 15" in done.out and "damaged" in done.out
    assert curve(run) == curve(straight.folder)
    assert_same_checkpoint(run, straight.folder, 20)


def test_a_checkpoint_that_cannot_be_written_does_not_end_training(
    commands: Commands, half: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is one line; the next one is written. Only if the last state of the run is lost, the exit code says
    so."""
    run = shutil.copytree(half.folder, tmp_path / "run")
    plain, faults = Write._write_part, {11}

    def failing(write: Write) -> None:
        if write.step in faults:
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(write)

    monkeypatch.setattr(Write, "_write_part", failing)
    done = commands.train(run, "--train.steps", 12, "--checkpoint.every", 1)
    lines = [line for line in done.out.splitlines() if "could not be written" in line]
    assert lines == [
        "the checkpoint of step 11 could not be written: no space left on device; training goes on (1 of 3 in a row)"
    ]
    assert done.err == "" and checkpoint_steps(run) == [5, 10, 12]
    faults.add(13)
    line = ("train.py", commands.preset, "--run-dir", run, "--train.steps", 13, "--checkpoint.every", 1)
    done = commands.run(*line)
    assert done.code == 1 and len(done.err.splitlines()) == 1
    assert done.err.endswith(f"no space left on device; last good checkpoint: {run / 'checkpoints' / '12'} (step 12)\n")
    assert checkpoint_steps(run) == [5, 10, 12]


def test_too_many_skipped_steps_stop_the_run(commands: Commands, straight: Run, half: Run, tmp_path: Path) -> None:
    """Steps whose loss is not finite are skipped, counted and reported, two of them; the third in a row ends the run:
    exit code 1, the step and the last good checkpoint in the last line. Checkpoints stay as they are, and with a sane
    learning rate the run goes on as if nothing had been."""
    run = shutil.copytree(half.folder, tmp_path / "run")
    before = contents(run / "checkpoints")
    line = ("train.py", commands.preset, "--run-dir", run, *TOO_FAST, "--optimizer.max-skipped", 2)
    done = commands.run(*line)
    assert done.code == 1, (done.out, done.err)
    last = done.err.splitlines()[-1]
    assert "step 14" in last and str(run / "checkpoints" / "10") in last
    assert "Traceback" not in done.err
    assert [line["skipped_steps"] for line in training(run)] == [0] * 11 + [1, 2, 3]
    reported = [line for line in done.out.splitlines() if line.endswith(": skipped")]
    assert [line.partition(":")[0] for line in reported] == ["step 12", "step 13"]
    assert contents(run / "checkpoints") == before
    commands.train(run)
    assert curve(run) == curve(straight.folder)
    assert_same_checkpoint(run, straight.folder, 20)


@pytest.mark.parametrize("steps", [20, pytest.param(11, marks=pytest.mark.full)])
def test_no_checkpoint_of_weights_that_give_no_finite_loss(
    commands: Commands, half: Run, steps: int, tmp_path: Path
) -> None:
    """The update of step 11 ruins the weights, and its own loss does not show it yet: neither step 11 nor the end of
    the run may replace the good checkpoint, the only one that is kept."""
    run = shutil.copytree(half.folder, tmp_path / "run")
    good = contents(run / "checkpoints" / "10")
    flags = ("--checkpoint.every", 1, "--checkpoint.keep", 1, "--train.steps", steps)
    done = commands.run("train.py", commands.preset, "--run-dir", run, *TOO_FAST, *flags)
    assert contents(run / "checkpoints" / "10") == good
    assert done.code == 1, (done.out, done.err)
    last = done.err.splitlines()[-1]
    assert re.search(r"step 1[12]\b", last) and str(run / "checkpoints" / "10") in last
    assert all(math.isfinite(loss) for _, loss, _ in curve(run)[:11])


@pytest.mark.full
def test_without_any_checkpoint_yet(commands: Commands, tmp_path: Path) -> None:
    """The last line names the step and says that there is no checkpoint."""
    run = tmp_path / "run"
    done = commands.run("train.py", commands.preset, "--run-dir", run, *TOO_FAST)
    assert done.code == 1, (done.out, done.err)
    last = done.err.splitlines()[-1]
    step, loss, _ = curve(run)[-1]
    assert loss is None and f"step {step}" in last and "none" in last
    assert checkpoint_steps(run) == []

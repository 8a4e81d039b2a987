"""What goes wrong beside the command line: damaged or changed files, losses that are not finite, no memory."""

import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from damages import DAMAGES
from mistakes import assert_says, failure, mistake, one_line, train_mistake
from processes import Commands, Run
from results import assert_same_checkpoint, checkpoint_steps, contents, curve, training, validation
from tiny import full

from megajax.core.program import memory
from megajax.runs.failures import forget_abandoned

TOO_FAST = ("--optimizer.learning-rate", 1e30)  # finite weights, but nothing that can be computed with them


@pytest.mark.slow
def test_damaged_checkpoints_are_passed_over(commands: Commands, straight: Run, tmp_path: Path) -> None:
    """None of them is trained from, or measured; once one is whole, the run goes on from there."""
    run = shutil.copytree(straight.folder, tmp_path / "run")
    checkpoints = run / "checkpoints"
    for step, way in ((20, "halved"), (15, "deleted"), (10, "middle byte")):
        files = (file for file in (checkpoints / str(step)).rglob("*") if file.is_file())
        DAMAGES[way](max(files, key=lambda file: file.stat().st_size))
    before = contents(checkpoints)
    last = one_line(commands.run("train.py", commands.preset, "--run-dir", run))
    assert "no checkpoint" in last and str(checkpoints) in last
    forget_abandoned()  # reads of Orbax, which this process would else hear of at any time
    assert contents(checkpoints) == before
    for file in (checkpoints / "20" / "state").rglob("*"):  # where the weights lie in there is Orbax's choice
        if file.is_file() and file.stat().st_size > 2**12:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    last = one_line(commands.run("eval.py", "perplexity", "--checkpoint", run))
    assert str(checkpoints / "20") in last and "--step" in last
    forget_abandoned()

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


@pytest.mark.slow
def test_too_many_skipped_steps_stop_the_run(commands: Commands, straight: Run, begun: Path, monkeypatch) -> None:
    """The third in a row ends it; with a sane learning rate it goes on as if nothing had been."""
    before = contents(begun / "checkpoints")
    with monkeypatch.context() as few:
        few.setattr("megajax.training.figures.MOST_SKIPPED", 2)
        done = commands.run("train.py", commands.preset, "--run-dir", begun, *TOO_FAST)
    last = failure(done)
    assert "step 14" in last and str(begun / "checkpoints" / "10") in last
    assert "Traceback" not in done.err
    assert [line["skipped_steps"] for line in training(begun)] == [0] * 11 + [1, 2, 3]
    reported = [line for line in done.out.splitlines() if line.endswith(": skipped")]
    assert [line.partition(":")[0] for line in reported] == ["step 12", "step 13"]
    assert contents(begun / "checkpoints") == before
    commands.train(begun)
    assert curve(begun) == curve(straight.folder)
    assert_same_checkpoint(begun, straight.folder, 20)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [20, full(11)])
def test_no_checkpoint_of_weights_that_give_no_finite_loss(commands: Commands, begun: Path, steps: int) -> None:
    """The update of step 11 ruins the weights, and its own loss does not show it yet."""
    good = contents(begun / "checkpoints" / "10")
    flags = ("--checkpoint.every", 1, "--checkpoint.keep", 1, "--train.steps", steps)
    done = commands.run("train.py", commands.preset, "--run-dir", begun, *TOO_FAST, *flags)
    assert contents(begun / "checkpoints" / "10") == good
    last = failure(done)
    assert re.search(r"step 1[12]\b", last) and str(begun / "checkpoints" / "10") in last
    assert all(math.isfinite(loss) for _, loss, _ in curve(begun)[:11])


@pytest.mark.full
def test_without_any_checkpoint_yet(commands: Commands, tmp_path: Path) -> None:
    run = tmp_path / "run"
    last = failure(commands.run("train.py", commands.preset, "--run-dir", run, *TOO_FAST))
    step, loss, _ = curve(run)[-1]
    assert loss is None and f"step {step}" in last and "none" in last
    assert checkpoint_steps(run) == []


def test_what_no_memory_holds(commands: Commands, straight: Run, tmp_path: Path, monkeypatch) -> None:
    """Each number may be valid and their product too large."""
    large = ("--model.hidden-size", 1_000_000, "--model.num-layers", 10_000)
    sizes = r"--model\.num-layers 10000, --model\.hidden-size 1000000"
    assert_says(train_mistake(commands, tmp_path / "run", *large), sizes, r"need [\d,.]+ GiB on each of 1", "have")
    monkeypatch.setattr(memory, "_machine_bytes", lambda: 2**20)  # the weights take 250 KiB
    evaluate = ("eval.py", "perplexity", "--checkpoint", straight.folder)
    assert_says(mistake(commands, *evaluate, "--train.microbatch", 1000), r"--train\.microbatch 1000 need", "valid")
    monkeypatch.setattr(memory, "_machine_bytes", lambda: 2**16)
    for line in (evaluate, ("-m", "megajax", "generate", "--prompt", "a", *evaluate[2:])):
        assert_says(mistake(commands, *line), r"need [\d,.]+ GiB", "valid")
    assert not list(tmp_path.iterdir())


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def replaced(old: str, new: str) -> Callable[[Path], object]:
    return lambda file: file.write_text(file.read_text().replace(old, new, 1))


CHANGED: list[tuple[str, Callable[[Path], object], str]] = [
    ("metrics.jsonl", pipe, "FILE.* is a named pipe"),
    ("metrics.jsonl", lambda file: file.write_text("Dear diary\n" * 20), "FILE.* its lines are not metrics of a run"),
    ("metrics.jsonl", lambda file: file.write_text("x" * 5_000_000), "FILE.* line 1 has more than 4 MiB"),
    ("config.toml", lambda file: file.write_text("a = " + "[" * 10_000), "FILE.* nested"),
    ("config.toml", lambda file: file.write_text("seed = " + "9" * 5000), "FILE.* digits"),
    ("config.toml", replaced("num_layers = 3", "num_layers = 5"), "FILE: model.num_layers is 5; valid: 3"),
]


@pytest.mark.parametrize(("name", "change", "problem"), CHANGED, ids=[f"{name} {said}" for name, _, said in CHANGED])
def test_changed_files_of_a_run(
    commands: Commands, begun: Path, name: str, change: Callable[[Path], object], problem: str
) -> None:
    """A configuration larger than the checkpoint is no damage: the key that was changed is named."""
    change(begun / name)
    before = contents(begun / "checkpoints")
    preset = begun / name if "is 5" in problem else commands.preset
    lines = [mistake(commands, "train.py", preset, "--run-dir", begun)]
    if "is 5" in problem:
        lines.append(mistake(commands, "eval.py", "perplexity", "--checkpoint", begun))
    for line in lines:
        assert_says(line, problem.replace("FILE", str(begun / name)))
        assert "damaged" not in line
    assert contents(begun / "checkpoints") == before


def test_a_run_without_a_checkpoint(commands: Commands, straight: Run, tmp_path: Path) -> None:
    shutil.copy(straight.folder / "config.toml", tmp_path)
    assert_says(mistake(commands, "eval.py", "perplexity", "--checkpoint", tmp_path), str(tmp_path))
    shutil.copytree(straight.folder / "data", tmp_path / "data")
    assert_says(mistake(commands, "eval.py", "perplexity", "--checkpoint", tmp_path), str(tmp_path), "no checkpoint")

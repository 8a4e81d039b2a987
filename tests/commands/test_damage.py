"""What goes wrong beside the command line: changed files, losses that are not finite, no memory."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from damages import DAMAGES
from mistakes import assert_says, failure, mistake, train_mistake
from processes import Commands, Run
from results import assert_same_checkpoint, contents, curve, training
from tiny import full

from megajax.runs.failures import forget_abandoned
from megajax.start import device_memory

TOO_FAST = ("--optimizer.learning-rate", 1e30)  # finite weights, but nothing that can be computed with them


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


def test_what_no_memory_holds(commands: Commands, straight: Run, tmp_path: Path, monkeypatch) -> None:
    """Each number may be valid and their product too large."""
    large = ("--model.hidden-size", 1_000_000, "--model.num-layers", 10_000)
    sizes = r"--model\.num-layers 10000, --model\.hidden-size 1000000"
    assert_says(train_mistake(commands, tmp_path / "run", *large), sizes, r"need [\d,.]+ GiB on each of 1", "have")
    monkeypatch.setattr(device_memory, "_machine_bytes", lambda: 2**20)  # the weights take 250 KiB
    evaluate = ("eval.py", "perplexity", "--checkpoint", straight.folder)
    assert_says(mistake(commands, *evaluate, "--train.microbatch", 1000), r"--train\.microbatch 1000 need", "valid")
    monkeypatch.setattr(device_memory, "_machine_bytes", lambda: 2**16)
    for line in (evaluate, ("-m", "megajax", "generate", "--prompt", "a", *evaluate[2:])):
        assert_says(mistake(commands, *line), r"need [\d,.]+ GiB", "valid")
    assert not list(tmp_path.iterdir())


def replaced(old: str, new: str) -> Callable[[Path], object]:
    return lambda file: file.write_text(file.read_text().replace(old, new, 1))


CHANGED: list[tuple[str, Callable[[Path], object], str]] = [
    ("metrics.jsonl", DAMAGES["a named pipe"], "FILE.* is a named pipe"),
    ("metrics.jsonl", lambda file: file.write_text("Dear diary\n" * 20), "FILE.* its lines are not metrics of a run"),
    ("metrics.jsonl", lambda file: file.write_text("x" * 5_000_000), "FILE.* line 1 has more than 4 MiB"),
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
        forget_abandoned()  # reads of Orbax, which this process would else hear of at any time
    for line in lines:
        assert_says(line, problem.replace("FILE", str(begun / name)))
        assert "damaged" not in line
    assert contents(begun / "checkpoints") == before

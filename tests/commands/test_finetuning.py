"""Fine-tuning from the files to the figures: the commands, seen from outside."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from finetuning import BATCH, DEV, KEYS, PRESET, SIZE, TASKS, TRAIN, Finetuning, assert_same_figures, dev_of, stop_after
from results import assert_same_checkpoint, checkpoint_steps, curve, training, validation
from tiny import full

from megajax.settings.flags import parse
from megajax.training.begin import with_total_steps
from megajax.training.figures import in_words

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("task", TASKS)
def test_every_task_is_trained_and_scored(tuning: Finetuning, task: str, tmp_path: Path) -> None:
    """The figures that training logs are those of eval.py, also for another batch."""
    run = tuning.run(task)
    logged = dev_of(run)
    assert KEYS[task] <= logged.keys() and logged["records"] == DEV
    assert all(0 <= logged[name] <= 100 for name in KEYS[task] - {"records"})
    assert_same_figures(tuning.figures(task, run, "--predictions", tmp_path / "predictions"), logged)
    if task == "mnli":
        assert_same_figures(tuning.figures(task, run, "--train.microbatch", 5), logged)
    own = tuning.commands.evaluate(task, run)  # without --data: the run's own dev files
    assert_same_figures({name: own[name] for name in logged}, logged)


@pytest.mark.parametrize(("task", "step"), [full("mnli", 3), full("squad2", 7), full("race", 1)])
def test_a_stopped_run_goes_on_exactly(tuning: Finetuning, task: str, step: int, tmp_path: Path, monkeypatch) -> None:
    """SIGTERM, with dropout on, in the first epoch or the second: the same command ends as the undisturbed run."""
    run, whole = tmp_path / "run", tuning.run(task)
    stop_after(monkeypatch, step)
    stopped = tuning.start(task, run)
    assert stopped.code == 143, (stopped.out, stopped.err)
    (saved,) = checkpoint_steps(run)
    assert step <= saved < len(curve(whole))
    done = tuning.train(task, run, "--resume", "must")
    assert f"resumed from step {saved}" in done.out
    assert curve(run) == curve(whole) and validation(run) == validation(whole)
    assert dev_of(run) == dev_of(whole)
    assert_same_checkpoint(run, whole, len(curve(whole)))


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ((), math.ceil(2 * TRAIN / BATCH)),
        (("--train.steps", 3, "--evaluate", "mnli", "--evaluate-every", 2), 3),
        full(("--train.steps", 100), 10),
        full(("--train.epochs", 0.3), 2),
        full(("--train.epochs", 1.01), 6),
    ],
)
def test_epochs(tuning: Finetuning, tmp_path: Path, flags: tuple, steps: int) -> None:
    """Of the steps of epochs the last one begun counts; `train.steps` ends earlier, not later."""
    run = tmp_path / "run"
    out = tuning.train("mnli", run, *flags).out
    (line,) = [line for line in out.splitlines() if line.startswith("dev of mnli: ")]
    for name, value in dev_of(run, before=int("--evaluate" in flags)).items():
        assert in_words(name, value, percent=True) in line
    assert "weights: fresh" in out and ("step 2/3  dev  " in out) == ("--evaluate" in flags)
    rates = [line["learning_rate"] for line in training(run)]
    assert len(rates) == steps
    epochs = flags[1] if "--train.epochs" in flags else 2
    end = math.ceil(epochs * TRAIN / BATCH)
    warmup = round(end / 10)
    rising = [n / warmup if warmup else 1 for n in range(steps)]
    expected = [5e-4 * min(rise, (end - n) / max(1, end - warmup)) for n, rise in enumerate(rising)]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)


@pytest.mark.parametrize(("epochs", "records", "batch", "steps"), [(1.1, 50, 5, 11), (0.28, 100, 4, 7)])
def test_steps_of_a_share_of_an_epoch(epochs: float, records: int, batch: int, steps: int) -> None:
    """As they are in decimals."""
    flags = map(str, (*SIZE, "--train.epochs", epochs, "--train.global-batch", batch, "--data.train", "x"))
    config = with_total_steps(parse([PRESET, *flags], "", ""), SimpleNamespace(epoch_size=records))
    assert config.train.steps == config.optimizer.decay_steps == steps


@pytest.mark.full
def test_dev_records_that_are_trained_on_are_told(tuning: Finetuning, tmp_path: Path) -> None:
    """Of contexts and articles, not of pairs, which share sentences."""
    flags = ("--data.dev", tuning.file("race", "train"), "--train.steps", 1)
    told = tuning.train("race", tmp_path / "run", *flags).out
    assert f"warning: the contexts of {TRAIN} dev records also occur in the training records" in told

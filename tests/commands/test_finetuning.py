"""Fine-tuning from the files to the figures, as issue 17 asks: the commands, seen from outside."""

import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from finetuning import BATCH, DEV, KEYS, PRESET, SIZE, TASKS, TRAIN, Finetuning, assert_same_figures, dev_of, stop_after
from processes import MESH_222
from results import assert_close_losses, assert_same_checkpoint, checkpoint_steps, curve, records, training, validation
from scorers import by_independent_scorer
from tiny import full

from megajax.settings.flags import parse
from megajax.training.begin import with_total_steps

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("task", TASKS)
def test_every_task_is_trained_and_scored(tuning: Finetuning, task: str, tmp_path: Path) -> None:
    """The figures that training logs are those of eval.py, also for another batch, and of an independent scorer."""
    run, dev, predictions = tuning.run(task), tuning.file(task, "dev"), tmp_path / "predictions"
    logged = dev_of(run)
    assert KEYS[task] <= logged.keys() and logged["records"] == DEV
    assert all(0 <= logged[name] <= 100 for name in KEYS[task] - {"records"})
    assert_same_figures(tuning.figures(task, run, "--predictions", predictions), logged)
    if task == "mnli":
        assert_same_figures(tuning.figures(task, run, "--train.microbatch", 5), logged)
    for name, value in by_independent_scorer(task, predictions, dev).items():
        assert logged[name] == pytest.approx(value, abs=1e-9), name
    own = tuning.commands.evaluate(task, run)  # without --data: the run's own dev files
    assert_same_figures({name: own[name] for name in logged}, logged)


def test_groups_are_counted_apart(tuning: Finetuning, tmp_path: Path) -> None:
    run, (header, *rows) = tuning.run("mnli"), tuning.file("mnli", "dev").read_text().splitlines()
    figures = tuning.figures("mnli", run)
    for genre, group in (("fiction", "matched"), ("verbatim", "mismatched")):
        file = tmp_path / f"{genre}.tsv"
        file.write_text("\n".join([header, *(row for row in rows if row.split("\t")[1] == genre)]) + "\n")
        assert tuning.figures("mnli", run, "--data", file)["accuracy"] == figures[f"accuracy_{group}"]


MESH_202 = ("--mesh.data", 2, "--mesh.tensor", 2, "--simulate-devices", 4)


@pytest.mark.full
@pytest.mark.parametrize("task", ["squad2", "mnli", "race"])
def test_a_mesh_changes_nothing(tuning: Finetuning, task: str, tmp_path: Path) -> None:
    """The first losses on four devices with dropout are those of one, from the files on; so are the figures."""
    other, whole = tmp_path / "run", tuning.run(task)
    tuning.train(task, other, *MESH_202, "--sequence-parallel", "--optimizer.zero", 3, "--train.steps", 4)
    assert len(curve(other)) == 4
    assert_close_losses(curve(other), curve(whole)[:4])
    assert_same_figures(tuning.figures(task, whole, *MESH_202), dev_of(whole))


@pytest.mark.full
@pytest.mark.parametrize("order", ["pre", "post"])
@pytest.mark.parametrize(
    ("task", "flags"),
    [
        ("mnli", ("--pipeline.vocabulary", "split")),
        ("squad2", ("--sequence-parallel", "--optimizer.zero", 3)),
        ("race", ("--sequence-parallel",)),
    ],
)
def test_a_pipeline_changes_nothing(tuning: Finetuning, task: str, flags: tuple, order: str, tmp_path: Path) -> None:
    layers = ("--model.num-layers", 2, "--train.steps", 4, "--model.layer-order", order)
    tuning.train(task, tmp_path / "one", *layers)
    tuning.train(task, tmp_path / "eight", *layers, *MESH_222, *flags, "--train.microbatch", 1)
    assert len(curve(tmp_path / "one")) == 4
    assert_close_losses(curve(tmp_path / "eight"), curve(tmp_path / "one"))
    assert_same_figures(tuning.figures(task, tmp_path / "one", *MESH_222), dev_of(tmp_path / "one"))


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


def test_a_finished_run_is_left_as_it_is(tuning: Finetuning, tmp_path: Path) -> None:
    """Also started for fewer steps and with its records elsewhere; its figures of dev are there once."""
    run = shutil.copytree(tuning.run("mnli"), tmp_path / "run")
    moved = shutil.copy(tuning.file("mnli", "train"), tmp_path / "moved.tsv")
    before = records(run)
    assert "nothing to train" in tuning.train("mnli", run, "--train.steps", 7, "--data.train", moved).out
    assert records(run) == before


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
        assert (f"{name} {value:.2f}" if name != "records" else f"records {value}") in line
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


def test_an_epoch_of_squad_has_every_window_once(tuning: Finetuning) -> None:
    """Steps follow from the windows, which are more than the questions."""
    run, told = tuning.told("squad2")
    windows = int(told.split("squad2 train: 40 records, in ")[1].split()[0])
    assert windows > TRAIN and len(curve(run)) == math.ceil(2 * windows / BATCH)


def test_a_part_of_the_training_records_is_held_out(tuning: Finetuning, tmp_path: Path) -> None:
    """Without --data.dev about the share asked for, and whole contexts; what is held out is not trained on."""
    data = ("--task.name", "squad2", "--data.train", tuning.file("squad2", "train"), "--train.steps", 1)
    data += ("--data.validation-fraction", 0.3, "--optimizer.decay-steps", len(curve(tuning.run("squad2"))))
    out = tuning.commands.run("train.py", PRESET, "--run-dir", tmp_path, *SIZE, *data).ok()
    train, dev = (int(out.split(f"squad2 {name}: ")[1].split()[0]) for name in ("train", "dev"))
    assert train + dev == TRAIN and abs(dev - 0.3 * TRAIN) <= 2
    assert dev % 2 == 0, "the questions of a context, two here, stay together"
    assert "also occur in the training records" not in out and dev_of(tmp_path)["records"] == dev


@pytest.mark.full
def test_dev_records_that_are_trained_on_are_told(tuning: Finetuning, tmp_path: Path) -> None:
    """Of contexts and articles, not of pairs, which share sentences."""
    flags = ("--data.dev", tuning.file("race", "train"), "--train.steps", 1)
    told = tuning.train("race", tmp_path / "run", *flags).out
    assert f"warning: the contexts of {TRAIN} dev records also occur in the training records" in told


REAL = {  # to train and to score on; few of the records of MNLI and QQP, of which those are large
    "mnli": (["glue/MNLI/train.tsv"], ["glue/MNLI/dev_matched.tsv", "glue/MNLI/dev_mismatched.tsv"]),
    "qqp": (["glue/QQP/dev.tsv"], ["glue/QQP/dev.tsv"]),
    "squad1": (["squad/expmrc-squad-dev.json"], ["squad/expmrc-squad-dev.json"]),
    "squad2": (["squad/dev-v2.0-2articles.json"], ["squad/dev-v2.0-2articles.json"]),
    "race": (["race/RACE/train/middle", "race/RACE/train/high"], ["race/RACE/dev/middle"]),
}


@pytest.mark.full
@pytest.mark.parametrize("task", REAL)
def test_real_files(tuning: Finetuning, test_data: Path, tmp_path: Path, task: str) -> None:
    train, dev = ([test_data / name for name in names] for names in REAL[task])
    flags = ("--task.name", task, "--data.train", *train, "--data.dev", *dev, "--model.sequence-length", 128)
    size = (*SIZE, *flags, "--task.doc-stride", 32, "--train.epochs", 1, "--train.steps", 2)
    tuning.commands.run("train.py", PRESET, "--run-dir", tmp_path / "run", *size, "--train.eval-batches", 2).ok()
    logged, predictions = dev_of(tmp_path / "run"), tmp_path / "predictions"
    counts = {"mnli": 2000, "qqp": 3000, "squad1": 501, "squad2": 706, "race": 1436}
    assert logged["records"] == counts[task]
    figures = tuning.figures(task, tmp_path / "run", "--data", dev[0], "--predictions", predictions)
    if task == "race":
        assert figures["accuracy_middle"] == figures["accuracy"] == logged["accuracy"]
        assert len(predictions.read_text().splitlines()) == 1 + counts[task]
        return
    for name, value in by_independent_scorer(task, predictions, dev[0]).items():
        assert figures[name] == pytest.approx(value, abs=1e-9), name

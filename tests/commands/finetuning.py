"""Fine-tuning commands with a small model on files that are made up, and what they leave behind."""

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from made_up_tasks import SUFFIXES, WRITERS
from mistakes import redundant
from processes import Commands, Finished, made_once, records

from megajax.host.ending import stop_signals
from megajax.training.run_log import RunLog

KEYS = {
    "mnli": {"accuracy", "accuracy_matched", "accuracy_mismatched", "records"},
    "qqp": {"accuracy", "records"},
    "squad1": {"f1", "exact_match", "records"},
    "squad2": {"f1", "exact_match", "records"},
    "race": {"accuracy", "accuracy_middle", "accuracy_high", "records"},
}
"""What eval.py gives of every task, at least."""

TASKS = [task if task in ("mnli", "squad2") else redundant(task) for task in KEYS]
"""Each a run; the default tests have one of pairs and one of contexts."""

PRESET = "configs/finetune/qqp-demo.toml"
TRAIN, DEV, BATCH = 40, 24, 8  # records, records, and rows of a step
MODEL = ("--model.num-layers", 1, "--model.hidden-size", 32, "--model.num-heads", 4, "--model.vocab-size", 512)
MODEL += ("--model.vocab-multiple", 64, "--model.sequence-length", 48, "--train.global-batch", BATCH)
SIZE = (*MODEL, "--train.microbatch", 2, "--train.epochs", 2, "--train.log-every", 1, "--task.doc-stride", 8)
MESH_222 = ("--mesh.data", 2, "--mesh.pipe", 2, "--mesh.tensor", 2, "--simulate-devices", 8)


@dataclass(frozen=True)
class Finetuning:
    """Fine-tunes in a folder on made-up files of every task."""

    commands: Commands
    folder: Path

    def file(self, task: str, kind: str, count: int = 0) -> Path:
        """The task's file `train` or `dev`, or another one, of other records."""
        seed, usual = {"train": (1, TRAIN), "dev": (2, DEV)}.get(kind, (sum(map(ord, kind)), TRAIN))
        file = self.folder / f"{task}-{kind}{SUFFIXES[task]}"
        if not file.exists():
            WRITERS[task](file, count or usual, seed, 1000 * seed)
        return file

    def data(self, task: str) -> tuple[object, ...]:
        """The flags of the task and its files."""
        return "--task.name", task, "--data.train", self.file(task, "train"), "--data.dev", self.file(task, "dev")

    def start(self, task: str, run_dir: Path, *flags: object) -> Finished:
        """train.py with the task's files, however it ends."""
        return self.commands.run("train.py", PRESET, "--run-dir", run_dir, *SIZE, *self.data(task), *flags)

    def train(self, task: str, run_dir: Path, *flags: object) -> Finished:
        """train.py with the task's files; must succeed."""
        done = self.start(task, run_dir, *flags)
        assert done.code == 0, (done.code, done.out, done.err)
        return done

    def predictions(self, task: str, file: Path, *runs: Path) -> bytes:
        """The file of answers of several runs to the dev file."""
        self.commands.evaluate(task, *runs, "--data", self.file(task, "dev"), "--predictions", file)
        return file.read_bytes()

    def run(self, task: str) -> Path:
        """A run of two epochs on one device: look, don't write."""
        folder = self.folder / task
        made_once(folder, lambda: self.train(task, folder))
        return folder

    def figures(self, task: str, *runs_and_flags: object) -> dict[str, Any]:
        """What eval.py prints of the dev file, without the task and the step; must succeed."""
        data = () if "--data" in runs_and_flags else ("--data", self.file(task, "dev"))
        found = self.commands.evaluate(task, *runs_and_flags, *data)
        assert found.pop("task") == task
        del found["step"]
        return found


def dev_of(run_dir: Path) -> dict[str, float]:
    """The figures of dev in metrics.jsonl, which has them once, after the last step."""
    lines = [line for line in records(run_dir) if any(name.startswith("dev/") for name in line)]
    assert len(lines) == 1 and lines[0]["step"] == max(line["step"] for line in records(run_dir)), lines
    return {name.removeprefix("dev/"): value for name, value in lines[0].items() if name != "step"}


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The next training gets SIGTERM when it has recorded this step."""
    record = RunLog.record_step

    def record_and_stop(log: RunLog, number: int, figures: Mapping[str, float]) -> None:
        record(log, number, figures)
        if number == step:
            monkeypatch.setattr(RunLog, "record_step", record)
            os.kill(os.getpid(), signal.SIGTERM)
            while not stop_signals.number:
                time.sleep(0.001)

    monkeypatch.setattr(RunLog, "record_step", record_and_stop)


def assert_same_figures(found: dict[str, float], expected: dict[str, float]) -> None:
    """Equal, but for thresholds, which are differences of logits."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == (pytest.approx(value, rel=1e-5) if "thresh" in name else value), name

"""Fine-tuning commands with a small model on files that are made up, and what they leave behind."""

import os
import re
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import pytest
from made_up_tasks import SUFFIXES, WRITERS
from processes import Commands, Finished, made_once
from results import records
from tiny import full

from megajax.core.program.program import Program
from megajax.data.text.tokenizers import train_tokenizer
from megajax.host.signals import stop_signals
from megajax.runs.checkpoint import Checkpoints
from megajax.runs.ownership import mark
from megajax.settings.config import to_toml
from megajax.settings.flags import parse
from megajax.training.run_log import RunLog
from megajax.verify.run import drawn_state

KEYS = {
    "mnli": {"accuracy", "accuracy_matched", "accuracy_mismatched", "records"},
    "qqp": {"accuracy", "records"},
    "squad1": {"f1", "exact_match", "records"},
    "squad2": {"f1", "exact_match", "records"},
    "race": {"accuracy", "accuracy_middle", "accuracy_high", "records"},
}
"""What eval.py gives of every task, at least."""

TASKS = [task if task in ("mnli", "squad2") else full(task) for task in KEYS]
"""Each a run; the default tests have one of pairs and one of contexts."""

PRESET = "configs/finetune/qqp-demo.toml"
TRAIN, DEV, BATCH = 40, 24, 8  # records, records, and rows of a step
MODEL = ("--model.num-layers", 1, "--model.hidden-size", 32, "--model.num-heads", 4, "--model.vocab-size", 512)
MODEL += ("--model.vocab-multiple", 64, "--model.sequence-length", 48, "--train.global-batch", BATCH)
SIZE = (*MODEL, "--train.microbatch", 2, "--train.epochs", 2, "--train.log-every", 1, "--task.doc-stride", 8)
STEPS = 2
PRETRAINING = ("--task.name", "pretraining", "--train.epochs", 0, "--train.steps", STEPS, "--precision", "bf16")
PRETRAINING += ("--optimizer.schedule", "constant", "--optimizer.warmup-fraction", 0, "--model.sequence-length", 64)


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
        done.ok()
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

    def pretrained(self) -> Path:
        """A BERT in bf16 of more positions as pretraining leaves it on two devices, its moments other than zero. It was
        not trained, which would take seconds to compile; `test_from_pretraining_to_a_task` has one that was."""
        folder = self.folder / "pretrained"
        made_once(folder, lambda: make_pretrained(folder, self.file("mnli", "pretraining")))
        return folder

    def finish_seeds(self, folder: Path, figures: dict[int, float]) -> None:
        """Runs of mnli of seeds with such accuracies, as if each had been trained."""
        for seed, accuracy in figures.items():
            run = shutil.copytree(self.run("mnli"), folder / f"seed-{seed}")
            preset, metrics = run / "config.toml", run / "metrics.jsonl"
            text, count = re.subn(r"^seed = 0$", f"seed = {seed}", preset.read_text(), flags=re.M)
            assert count == 1
            preset.write_text(text)
            metrics.write_text(re.sub(r'"dev/accuracy": [0-9.]+', f'"dev/accuracy": {accuracy}', metrics.read_text()))

    def figures(self, task: str, *runs_and_flags: object) -> dict[str, Any]:
        """What eval.py prints of the dev file, without the task and the step; must succeed."""
        data = () if "--data" in runs_and_flags else ("--data", self.file(task, "dev"))
        found = self.commands.evaluate(task, *runs_and_flags, *data)
        assert found.pop("task") == task
        del found["step"]
        return found


def make_pretrained(folder: Path, words: Path) -> None:
    flags = map(str, (*MODEL, *PRETRAINING, "--mesh.data", 2, "--train.microbatch", 2, "--data.path", "x"))
    config = parse([PRESET, "--run-dir", str(folder), *flags], "", "")
    program = Program.on(config, jax.devices()[:2])
    layout, state = program.layout, program.layout.from_canonical(drawn_state(program))
    state = replace(state, optimizer=jax.tree.map(lambda x: x + jax.numpy.ones_like(x), state.optimizer))
    checkpoints = Checkpoints(folder, layout, keep=1)
    checkpoints.save(STEPS, state)
    checkpoints.wait()
    checkpoints.close()
    train_tokenizer([words.read_text()], config.model.vocab_size, "wordpiece").save(folder / "data" / "tokenizer")
    mark(folder)
    (folder / "config.toml").write_text(to_toml(config))


def dev_of(run_dir: Path, before: int = 0) -> dict[str, float]:
    """The figures of dev in metrics.jsonl, which has them after the last step, and so many times before."""
    lines = [line for line in records(run_dir) if any(name.startswith("dev/") for name in line)]
    assert len(lines) == 1 + before and lines[-1]["step"] == max(line["step"] for line in records(run_dir)), lines
    return {name.removeprefix("dev/"): value for name, value in lines[-1].items() if name != "step"}


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The next training gets SIGTERM when it has recorded this step."""
    record = RunLog.record_step

    def record_and_stop(log: RunLog, number: int, figures: Mapping[str, float], *loads: Any) -> None:
        record(log, number, figures, *loads)
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

"""Signals while a run trains: a checkpoint at once, exit code 128 + signal, and the same command goes on."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from mistakes import assert_says, train_mistake
from processes import Commands, Run
from results import assert_same_checkpoint, checkpoint_steps, curve, records, validation

from megajax.core.errors import RunError
from megajax.core.program.program import Program
from megajax.core.program.train_step import train_step
from megajax.host.signals import stop_signals
from megajax.runs.lock import RunLock
from megajax.training import loop, watchdog
from megajax.training.validator import Validator


def after_lines(run: Path, count: int, number: int) -> threading.Thread:
    """A thread that sends this process a signal, at any moment, once metrics.jsonl has so many lines."""

    def send() -> None:
        metrics, until = run / "metrics.jsonl", time.monotonic() + 300
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= count):
            if time.monotonic() > until:
                return
            time.sleep(0.002)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


def test_the_same_command_goes_on(commands: Commands, straight: Run, tmp_path: Path) -> None:
    """Between two checkpoints; bit for bit what it would have been, each step recorded once."""
    run = tmp_path / "run"
    line = ("train.py", commands.preset, "--run-dir", run, "--train.log-every", 1, "--checkpoint.every", 20)
    sender = after_lines(run, 3, signal.SIGTERM)
    done = commands.run(*line)
    sender.join()
    assert done.code == 143, (done.out, done.err)
    step = curve(run)[-1][0]
    last = done.err.splitlines()[-1]
    assert checkpoint_steps(run) == [step] and 3 <= step < 20
    where = run / "checkpoints" / str(step)
    assert last.startswith(f"stopped by SIGTERM after step {step} of 20; last good checkpoint: {where} (step {step})")
    assert not (run / "run.lock").exists()
    assert f"resumed from step {step}" in commands.run(*line).ok()
    steps = [(record["step"], "loss" in record) for record in records(run)]
    assert len(steps) == len(set(steps))
    assert curve(run) == curve(straight.folder)
    assert validation(run)[20] == validation(straight.folder)[20]
    assert_same_checkpoint(run, straight.folder, 20)


def test_a_signal_while_the_first_step_is_compiled(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It promises no checkpoint, and writes none."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup make test` ignores it, and so would the run

    def lost_terminal(program: Program, **how: object) -> Any:
        os.kill(os.getpid(), signal.SIGHUP)
        while not stop_signals.number:
            time.sleep(0.01)
        return train_step(program)

    monkeypatch.setattr(loop, "train_step", lost_terminal)
    done = commands.run("train.py", commands.preset, "--run-dir", tmp_path / "run")
    signal.signal(signal.SIGHUP, before)
    assert re.match(r"SIGHUP: .*nothing new to save; .*\nstopped by SIGHUP before step 1: [^\n]*\n\Z", done.err)
    assert done.code == 129 and not list((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_validation_that_a_signal_ended_is_made_up(commands: Commands, tmp_path: Path, monkeypatch) -> None:
    """And its checkpoint is kept as the best: at such a rate, losses grow."""
    flags = "--train.steps 6 --train.eval-every 2 --optimizer.learning-rate 3 --checkpoint.every 2 --checkpoint.keep 1"
    line = ("train.py", commands.preset, "--run-dir", tmp_path, *flags.split(), "--checkpoint.keep-best", 1)

    def stopped(*given: Any, validate: Any = Validator.validate) -> Any:
        monkeypatch.undo()
        os.kill(os.getpid(), signal.SIGTERM)
        return validate(*given)

    monkeypatch.setattr(Validator, "validate", stopped)
    done = commands.run(*line)
    assert done.code == 143 and not validation(tmp_path) and checkpoint_steps(tmp_path) == [2]
    commands.run(*line).ok()
    assert [*validation(tmp_path)] == [2, 4, 6] and checkpoint_steps(tmp_path) == [2, 6]


def test_minutes_between_checkpoints(commands: Commands, tmp_path: Path) -> None:
    """Beside the steps: here every step takes longer."""
    commands.train(tmp_path, "--train.steps", 3, "--checkpoint.every", 20, "--checkpoint.minutes", 1e-6)
    assert checkpoint_steps(tmp_path) == [1, 2, 3]


def test_a_second_start_is_refused(commands: Commands, half: Run, tmp_path: Path) -> None:
    """While the first, here this process, holds the lock; nothing in the run directory changes."""
    lock = RunLock(half.folder)
    lock.take()
    try:
        assert_says(train_mistake(commands, half.folder), r"error: --run-dir \S+ is in use by process .*; valid: ")
    finally:
        lock.release()


def other_process(run: Path, doing: str, monkeypatch: pytest.MonkeyPatch) -> tuple[watchdog.Watchdog, Callable]:
    """The watchdog of this process, the first of two, which looks often; and a function with which the other, at step
    6, reports."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for name, seconds in (("_LOOKS_EVERY", 0.05), ("_WRITTEN_EVERY", 0.1), ("_GRACE", 1.0)):
        monkeypatch.setattr(watchdog, name, seconds)
    (run / "processes").mkdir()
    file = run / "processes" / "1.json"
    status = json.dumps({"host": "far", "step": 6, "doing": doing, "seconds": 9.0, "pid": 7})

    def report() -> None:
        new = file.with_suffix(".partial")
        new.write_text(status)
        new.replace(file)

    report()
    dog = watchdog.Watchdog(run, 0.3)
    report()  # the first was of an earlier start
    return dog, report


def test_a_lost_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of what Gloo says; while the other reports, and after other errors, nothing is."""
    closed = RuntimeError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer [127.0.0.1]:33714")
    dog, report = other_process(tmp_path, "computing", monkeypatch)
    dog.at(6, "starting")
    time.sleep(0.2)
    dog.explain(KeyError("Glue"))
    with pytest.raises(RunError, match=r"^lost process 1 of 2 on far \(pid 7\), which was at step 6, .*; rerun the"):
        dog.explain(closed)
    reports = threading.Thread(target=lambda: [(report(), time.sleep(0.05)) for _ in range(40)])
    reports.start()
    dog.explain(closed)
    dog.close()
    reports.join()


@pytest.mark.parametrize(
    ("doing", "grows", "told"), [(watchdog.WRITING, False, 1), (watchdog.WRITING, True, 0), ("computing", False, 0)]
)
def test_one_process_is_watched_while_it_writes(
    doing: str, grows: bool, told: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For ever without it, where memory ends in the thread that writes, or while it starts. A slow disk goes on."""
    said: list[str] = []
    monkeypatch.setattr(watchdog, "_LOOKS_EVERY", 0.02)
    monkeypatch.setattr(watchdog, "fail", lambda text: (said.append(text), dog.close()))
    (file := tmp_path / "checkpoints" / "7.partial" / "d").mkdir(parents=True)
    dog = watchdog.Watchdog(tmp_path, 0.5)
    dog.at(6, doing)
    for number in range(100):
        if grows:
            (file / str(number)).touch()
        time.sleep(0.01)
    dog.close()
    assert [text.partition(" for ")[0] for text in said] == ["step 6: writing a checkpoint has been hanging"] * told


@pytest.mark.parametrize("doing", ["loading its batch", "computing", "nothing"])
def test_the_watchdog_names_who_hangs(doing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two processes, the one at the earlier step or not waiting for the other, or that says nothing any more."""
    said: list[str] = []
    monkeypatch.setattr(watchdog, "fail", lambda text: (said.append(text), dog.close()))
    dog, report = other_process(tmp_path, doing, monkeypatch)
    dog.at(6, "starting")
    dog.at(6 if doing != "computing" else 7, watchdog.COMPUTING)
    while not said:
        time.sleep(0.05)
        if doing != "nothing":
            report()
    hangs = rf"process 1 of 2 on far \(pid 7\) has been hanging at step 6, {doing} for \d+ s; rerun the command"
    lost = r"lost process 1 of 2 on far \(pid 7\), which was at step 6, nothing and has not reported for \d s; "
    assert re.match(lost if doing == "nothing" else hangs, said[0])

"""Runs recorded by Weights & Biases, offline, and by MLflow, in SQLite, read back by these libraries themselves."""

import dataclasses
import importlib.util
import io
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import tiny_config

from megajax.training import tracking
from megajax.training.run_log import RunLog
from megajax.training.tracking import LibraryTracker

pytestmark = pytest.mark.full
STEP = {"grad_norm": 1.0, "learning_rate": 0.1, "loss_scale": 1.0, "skipped_steps": 0, "tokens": 8, "seconds": 1.0}


def log_run(library: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Five steps in two starts, with their configuration and a sample; the name that the library knows the run by."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed (the extra `{library}`)")
    monkeypatch.setattr(tracking, "_LAST_OF_STOPPED", 60.0)  # the first start of MLflow's database takes some seconds
    for first, last in ((1, 3), (4, 5)):
        log = RunLog(
            run_dir, total_steps=5, finished_steps=first - 1, others=lambda: [LibraryTracker(library, run_dir)]
        )
        log.record_config(dataclasses.replace(tiny_config(), seed=7))
        for step in range(first, last + 1):
            log.record_step(step, {"loss": 10.0 - step, "tflops_per_device": 3.5, **STEP})
        log.record_text(last, "sample", "def <read>")
        log.close(finished=last == 5)
    return json.loads((run_dir / "tracking.json").read_text())[library]


def offline_records(file: Path) -> Iterator[bytes]:
    """The records of an offline run: after 7 bytes those of a LevelDB log, in blocks of 32 KiB, each with its
    checksum (4 bytes), length (2) and kind: whole, or the first, a middle or the last part of one."""
    content, place, parts = file.read_bytes(), 7, b""
    while place + 7 < len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def test_weights_and_biases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    name = log_run("wandb", tmp_path, monkeypatch)
    assert "cannot be written" not in capsys.readouterr().out
    from wandb.proto import wandb_internal_pb2

    losses, ends, texts = [], [], []
    for file in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        for data in offline_records(file):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.HasField("run"):
                assert record.run.run_id == name
            for item in record.history.item if record.HasField("history") else ():
                key = item.key or "/".join(item.nested_key)
                losses += [json.loads(item.value_json)] if key == "loss" else []
                texts += [key] if key.startswith("sample") else []
            if record.HasField("exit"):
                ends.append(record.exit.exit_code)
    assert losses == [9.0, 8.0, 7.0, 6.0, 5.0] and sorted(ends) == [0, 1] and texts


def test_weights_and_biases_asks_nothing_and_takes_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not on a terminal either, where nobody has logged in; and a run that the caller has open stays the caller's."""
    wandb = pytest.importorskip("wandb")
    (tmp_path / "own").mkdir()
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("WANDB_MODE", "offline")
    own = wandb.init(dir=tmp_path / "own", id="own", settings=wandb.Settings(console="off"))
    name = log_run("wandb", tmp_path / "run", monkeypatch)
    own.log({"loss": 1.0})
    own.finish()
    assert len(list(tmp_path.glob(f"run/wandb/offline-run-*/run-{name}.wandb"))) == 2
    wandb.teardown()

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for key in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    asked = Terminal()
    capsys.readouterr()
    with monkeypatch.context() as terminal:
        terminal.setattr("sys.stdin", Terminal("3\n"))
        terminal.setattr("sys.stderr", asked)
        log_run("wandb", tmp_path / "run", monkeypatch)
    assert "No API key configured" in capsys.readouterr().out and not asked.getvalue()
    wandb.teardown()


@pytest.mark.filterwarnings("ignore")  # MLflow uses what SQLAlchemy deprecates
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    name = log_run("mlflow", tmp_path, monkeypatch)
    said = capfd.readouterr()
    assert "cannot be written" not in said.out and "INFO" not in said.err
    with sqlite3.connect(tmp_path / "mlflow" / "mlflow.db") as database:
        (run,) = database.execute("select run_uuid, status, name from runs").fetchall()
        assert run[1:] == ("FINISHED", tmp_path.name)
        assert ("megajax.run", name) in database.execute("select key, value from tags").fetchall()
        assert ("seed", "7") in database.execute("select key, value from params").fetchall()
        found = database.execute("select step, value from metrics where key = 'loss' order by step").fetchall()
        assert found == [(step, 10.0 - step) for step in range(1, 6)]
    texts = sorted(path.name for path in (tmp_path / "mlflow" / "artifacts").rglob("*.txt"))
    assert texts == ["step-3.txt", "step-5.txt"]

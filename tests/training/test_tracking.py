"""`--track`: what goes to another library, and that nothing that happens there ends the run or holds it up. Full tests
read back what Weights & Biases, offline, and MLflow, in SQLite, have recorded."""

import dataclasses
import io
import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import tiny_config

from megajax.core.errors import UserError
from megajax.data.config import DataConfig, Source, ValidationSet
from megajax.host import ending
from megajax.settings.checks import check_installed
from megajax.training import plot, tracking
from megajax.training.run_log import RunLog
from megajax.training.tracking import LibraryTracker

STEP = {"grad_norm": 1.0, "learning_rate": 0.1, "loss_scale": 1.0, "skipped_steps": 0, "tokens": 8, "seconds": 1.0}
DATA = DataConfig(
    sources=(Source(path="a[v1].txt", weight=0.5), Source(path="b.txt", weight=0.5)),
    validation=(ValidationSet(name="held", path="c.txt"),),
)

FAKE = """\
import atexit, json, os, time
HOW = {how!r}
def note(*what):
    with open({file!r}, "a") as calls:
        print(json.dumps(what), file=calls)
class Settings(dict):
    pass
class Run:
    url = "https://there/run"
    def __init__(self):
        self.config = self
    def update(self, values, allow_val_change):
        note("config", values)
    def define_metric(self, *names, **more):
        pass
    def log(self, values):
        if HOW == "fails":
            raise ValueError("the server says no")
        note("log", values)
    def finish(self, exit_code):
        wait()
        note("finish", exit_code)
def wait():
    while HOW in ("hangs", "unreachable") and os.path.exists({file!r} + ".hangs"):
        time.sleep(0.05)
def setup(settings):
    pass
def init(**settings):
    if HOW == "hangs":
        atexit.register(wait)
    if HOW == "unreachable":
        wait()
    note("init", settings["id"], settings["resume"])
    return Run()
def Html(text):
    return text
"""


@pytest.fixture(autouse=True)
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a second, and has tests of its own."""
    monkeypatch.setattr(plot, "plot_loss", lambda *arguments: None)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a wandb that works, fails or hangs; returns the file of its calls. At the end it hangs no more."""
    calls = tmp_path / "calls"
    Path(f"{calls}.hangs").touch()  # which is also gone where another session of pytest removes this one's folders

    def make(how: str) -> Path:
        (tmp_path / "packages").mkdir()
        (tmp_path / "packages" / "wandb.py").write_text(FAKE.format(how=how, file=str(calls)))
        monkeypatch.syspath_prepend(tmp_path / "packages")
        monkeypatch.delitem(sys.modules, "wandb", raising=False)
        monkeypatch.setattr(ending.Exit, "at_once", False)
        (tmp_path / "run").mkdir()
        return calls

    yield make
    Path(f"{calls}.hangs").unlink()
    sys.modules.pop("wandb", None)


def log_run(run_dir: Path, steps: range, finished: bool = True, library: str = "wandb") -> None:
    log = RunLog(run_dir, total_steps=9, finished_steps=steps.start - 1, track=library)
    log.record_config(dataclasses.replace(tiny_config(), data=DATA, seed=7))
    for step in steps:
        log.record_step(step, {"loss": float("nan") if step == 2 else 10.0 - step, **STEP})
    log.record_text(steps[-1], "sample", "a <b>")
    log.close(finished=finished)


def test_a_run_and_one_that_goes_on(tmp_path: Path, fake, capsys: pytest.CaptureFixture[str]) -> None:
    """The same run there, by the name that the run directory keeps."""
    calls = fake("works")
    log_run(tmp_path / "run", range(1, 4), finished=False)
    log_run(tmp_path / "run", range(4, 6))
    found = [json.loads(line) for line in calls.read_text().splitlines()]
    inits = [call for call in found if call[0] == "init"]
    name = json.loads((tmp_path / "run" / "tracking.json").read_text())["wandb"]
    assert inits == [["init", name, "allow"]] * 2
    values = next(call[1] for call in found if call[0] == "config")
    sources = [{"path": "a[v1].txt", "weight": 0.5}, {"path": "b.txt", "weight": 0.5}]
    wanted = {"data.sources": sources, "data.validation": [{"name": "held", "path": "c.txt"}], "data.train": []}
    assert values.items() >= wanted.items()
    figures = [call[1] for call in found if call[0] == "log" and "tokens" in call[1]]
    assert [each["step"] for each in figures] == [1, 2, 3, 4, 5]
    assert figures[0]["loss"] == 9.0 and "loss" not in figures[1], "NaN is no figure"
    assert ["log", {"step": 3, "sample": "<pre>a &lt;b&gt;</pre>"}] in found
    assert [call[1] for call in found if call[0] == "finish"] == [1, 0]
    assert "Weights & Biases: https://there/run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ("fails", "ValueError: the server says no"),
        *(
            (how, "it did not finish in time; unsent records are in the run directory")
            for how in ("hangs", "unreachable")
        ),
    ],
)
def test_a_library_that_fails_or_hangs(
    how: str, problem: str, tmp_path: Path, fake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reported once and soon; metrics.jsonl is whole."""
    fake(how)
    monkeypatch.setattr(tracking, "_LAST", 0.5)
    began = time.monotonic()
    log_run(tmp_path / "run", range(1, 4))
    assert time.monotonic() - began < 5
    told = f"Weights & Biases cannot be written: {problem}; recording there has stopped"
    assert " ".join(capsys.readouterr().out.split()).count(told) == 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_process_whose_library_hangs_ends(tmp_path: Path, fake) -> None:
    """Without what the library would do at the exit, which hangs, too."""
    fake("hangs")
    code = f"""
import sys, types; sys.path.insert(0, {str(tmp_path / "packages")!r})
sys.modules["megajax.core.models.router"] = types.SimpleNamespace(LOAD="load")  # no JAX, which takes seconds
from pathlib import Path
from megajax.host.ending import run
from megajax.training import tracking
tracking._LAST = 0.2
def main():
    tracker = tracking.LibraryTracker("wandb", Path({str(tmp_path / "run")!r}))
    tracker.figures(1, {{"loss": 1.0}})
    try:
        tracker.close(finished=True)
    except OSError as error:
        print(error)
run(main)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=20, capture_output=True, text=True)
    assert done.returncode == 0 and "it did not finish in time" in done.stdout and not done.stderr


def test_a_library_that_is_missing_and_a_name_that_somebody_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Missing it is also where a folder of its name lies in the working directory."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UserError, match=r"^--track wandb: .* is not installed; valid: pip install 'megajax\[wandb\]'$"):
        check_installed("wandb")
    (tmp_path / "tracking.json").write_text('{"wandb": "../x"}')
    with pytest.raises(UserError, match=r"tracking\.json"):
        LibraryTracker("wandb", tmp_path)


def log_two_starts(library: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run that went on after three steps; the name that the library knows it by."""
    pytest.importorskip(library)
    monkeypatch.setattr(tracking, "_LAST_OF_STOPPED", 60.0)  # the first start of MLflow's database takes some seconds
    log_run(run_dir, range(1, 4), finished=False, library=library)
    log_run(run_dir, range(4, 6), library=library)
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


@pytest.mark.full
def test_weights_and_biases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    name = log_two_starts("wandb", tmp_path, monkeypatch)
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
    assert losses == [9.0, 7.0, 6.0, 5.0] and sorted(ends) == [0, 1] and texts


@pytest.mark.full
def test_weights_and_biases_asks_nothing_and_takes_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not on a terminal either, where nobody has logged in; and a run that the caller has open stays the caller's."""
    wandb = pytest.importorskip("wandb")
    (tmp_path / "own").mkdir()
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("WANDB_MODE", "offline")
    own = wandb.init(dir=tmp_path / "own", id="own", settings=wandb.Settings(console="off"))
    name = log_two_starts("wandb", tmp_path / "run", monkeypatch)
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
        log_two_starts("wandb", tmp_path / "run", monkeypatch)
    assert "No API key configured" in capsys.readouterr().out and not asked.getvalue()
    wandb.teardown()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # MLflow uses what SQLAlchemy deprecates
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    name = log_two_starts("mlflow", tmp_path, monkeypatch)
    said = capfd.readouterr()
    assert "cannot be written" not in said.out and "INFO" not in said.err
    with sqlite3.connect(tmp_path / "mlflow" / "mlflow.db") as database:
        (run,) = database.execute("select run_uuid, status, name from runs").fetchall()
        assert run[1:] == ("FINISHED", tmp_path.name)
        assert ("megajax.run", name) in database.execute("select key, value from tags").fetchall()
        assert ("seed", "7") in database.execute("select key, value from params").fetchall()
        found = database.execute("select step, value from metrics where key = 'loss' order by step").fetchall()
        assert found == [(step, 10.0 - step) for step in (1, 3, 4, 5)]
    texts = sorted(path.name for path in (tmp_path / "mlflow" / "artifacts").rglob("*.txt"))
    assert texts == ["step-3.txt", "step-5.txt"]

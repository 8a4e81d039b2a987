"""`--track`: what goes to another library, and that nothing that happens there ends the run or holds it up."""

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import tiny_config

from megajax.data.config import DataConfig, Source, ValidationSet
from megajax.errors import UserError
from megajax.host import ending
from megajax.training import plot, tracking
from megajax.training.run_log import RunLog
from megajax.training.tracking import LibraryTracker, check_installed

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
        while HOW == "hangs" and not os.path.exists({file!r} + ".end"):
            time.sleep(0.05)
        note("log", values)
    def finish(self, exit_code):
        note("finish", exit_code)
def setup(settings):
    pass
def init(**settings):
    if HOW == "hangs":
        atexit.register(Run().log, {{}})
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

    def make(how: str) -> Path:
        (tmp_path / "packages").mkdir()
        (tmp_path / "packages" / "wandb.py").write_text(FAKE.format(how=how, file=str(calls)))
        monkeypatch.syspath_prepend(tmp_path / "packages")
        monkeypatch.delitem(sys.modules, "wandb", raising=False)
        monkeypatch.setattr(ending._End, "at_once", False)
        (tmp_path / "run").mkdir()
        return calls

    yield make
    Path(f"{calls}.end").touch()
    sys.modules.pop("wandb", None)


def log_run(run_dir: Path, steps: range, finished: bool = True) -> None:
    log = RunLog(
        run_dir, total_steps=9, finished_steps=steps.start - 1, others=lambda: [LibraryTracker("wandb", run_dir)]
    )
    log.record_config(dataclasses.replace(tiny_config(), data=DATA))
    for step in steps:
        log.record_step(step, {"loss": float("nan") if step == 2 else 2.0, **STEP})
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
    assert found[1][0] == "config" and found[1][1] == json.loads(json.dumps(found[1][1]))
    values = {
        key: value for key, value in found[1][1].items() if key in ("data.sources", "data.validation", "data.train")
    }
    assert values == {
        "data.sources": [{"path": "a[v1].txt", "weight": 0.5}, {"path": "b.txt", "weight": 0.5}],
        "data.validation": [{"name": "held", "path": "c.txt"}],
        "data.train": [],
    }
    figures = [call[1] for call in found if call[0] == "log" and "tokens" in call[1]]
    assert [each["step"] for each in figures] == [1, 2, 3, 4, 5]
    assert figures[0]["loss"] == 2.0 and "loss" not in figures[1], "NaN is no figure"
    assert ["log", {"step": 3, "sample": "<pre>a &lt;b&gt;</pre>"}] in found
    assert [call[1] for call in found if call[0] == "finish"] == [1, 0]
    assert "Weights & Biases: https://there/run" in capsys.readouterr().out


def test_a_library_that_fails(tmp_path: Path, fake, capsys: pytest.CaptureFixture[str]) -> None:
    """Reported once; metrics.jsonl is whole."""
    fake("fails")
    log_run(tmp_path / "run", range(1, 4))
    told = "Weights & Biases cannot be written: ValueError: the server says no; no more is written there"
    assert capsys.readouterr().out.count(told) == 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_library_that_hangs(
    tmp_path: Path, fake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake("hangs")
    monkeypatch.setattr(tracking, "_LAST", 0.5)
    began = time.monotonic()
    log_run(tmp_path / "run", range(1, 4))
    assert time.monotonic() - began < 5
    assert "Weights & Biases cannot be written: it did not end in time" in capsys.readouterr().out


def test_a_process_whose_library_hangs_ends(tmp_path: Path, fake) -> None:
    """Without what the library would do at the exit, which hangs, too."""
    fake("hangs")
    code = f"""
import sys; sys.path.insert(0, {str(tmp_path / "packages")!r})
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
    assert done.returncode == 0 and "it did not end in time" in done.stdout and not done.stderr


def test_a_library_that_takes_too_long(tmp_path: Path, fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not more than so many records wait for it."""
    calls = fake("hangs")
    monkeypatch.setattr(tracking, "_MOST", 5)
    tracker = LibraryTracker("wandb", tmp_path / "run")
    with pytest.raises(OSError, match="5 records wait"):
        for step in range(100_000):
            tracker.figures(step, {"loss": 1.0, "text": float(step)})
    while not calls.exists():  # it is imported in another thread
        time.sleep(0.01)


def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where a folder of its name lies in the working directory."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UserError, match=r"^--track wandb: .* is not installed; valid: pip install 'megajax\[wandb\]'$"):
        check_installed("wandb")


def test_names_that_somebody_changed(tmp_path: Path) -> None:
    (tmp_path / "tracking.json").write_text('{"wandb": "../x"}')
    with pytest.raises(UserError, match=r"tracking\.json"):
        LibraryTracker("wandb", tmp_path)

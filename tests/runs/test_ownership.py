"""A run takes a folder that is its own or empty, with one writer; everything else stays as it is."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from pytest import MonkeyPatch
from tiny import full, tiny_config

from megajax.core.errors import RunError, UserError
from megajax.data.text.tokenizers import train_tokenizer
from megajax.host.files import mark as mark_temporary
from megajax.host.files import write_atomically
from megajax.runs import lock
from megajax.runs.directory import check_claim, claimed, stored_config
from megajax.runs.lock import NAME, RunLock
from megajax.runs.ownership import FORMAT, MARK, marked_format
from megajax.runs.trained import check_run
from megajax.settings.config import to_toml

FOREIGN = {  # files of a folder that is no run, by name
    "a project": {"data/corpus.txt": "mine", "train.py": "mine"},
    "run names": {
        **{"data/report.json": "{}", "checkpoints/3/state/a": "mine", "loss.png": "mine"},
        **{"config.toml": to_toml(tiny_config()), "metrics.jsonl": '{"step": 1, "loss": 2.5}\n'},
    },
    "a mark of another program": {"config.toml": to_toml(tiny_config()), MARK: '{"format": 2}\n'},
    "a mark that is damaged": {"config.toml": to_toml(tiny_config()), MARK: '{"program": "megajax", "form'},
    "half a corpus": {"data.partial/notes.txt": "mine"},
    "a tokenizer": {f"data/tokenizer/{name}": text for name, text in train_tokenizer(["ab"], 258).files.items()},
}


def entries(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("resume", ["auto", "never", "must"])
@pytest.mark.parametrize("folder", FOREIGN)
def test_other_folders_are_refused(folder: str, resume: str, tmp_path: Path) -> None:
    """In one line that names the flag; nothing is touched, whatever `--resume` is."""
    for name, text in FOREIGN[folder].items():
        write_atomically(tmp_path / name, text)
    before = entries(tmp_path)
    config = dataclasses.replace(tiny_config(), resume=resume)  # type: ignore[arg-type]
    line = rf"--run-dir {tmp_path} is not empty and holds .+; valid: an empty or new folder, or "
    with pytest.raises(UserError, match=line) as error, claimed(tmp_path, config, RunLock(tmp_path)):
        pytest.fail()
    holds = "a run.json that is not a run's" if MARK in FOREIGN[folder] else "instead of a run"
    assert holds in str(error.value) and "\n" not in str(error.value)
    assert entries(tmp_path) == before


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / MARK).write_text(json.dumps({"program": "megajax", "format": FORMAT + 1}))
    (tmp_path / "config.toml").write_text(to_toml(tiny_config()))
    with pytest.raises(UserError, match=rf"^--run-dir \S+ was written by a newer .* format {FORMAT + 1}; valid: "):
        check_claim(tmp_path, tiny_config())
    with pytest.raises(UserError, match=r"^--checkpoint \S+ was written by a newer version"):
        check_run(tmp_path)


def take(run: Path) -> None:
    lock = RunLock(run)
    with claimed(run, tiny_config(), lock):
        lock.release()


def test_new_and_empty_folders_are_taken(tmp_path: Path) -> None:
    """And know their own again, however early the run was killed, with what users leave there."""
    (tmp_path / "empty").mkdir()
    for run in (tmp_path / "empty", tmp_path / "some" / "new"):
        for _ in range(2):
            take(run)
            assert [entry.name for entry in run.iterdir()] == [MARK]
            assert json.loads((run / MARK).read_text()) == {"program": "megajax", "format": FORMAT}
    (tmp_path / "empty" / "train.log").write_text("mine")
    take(tmp_path / "empty")
    half = tmp_path / "half" / f"{MARK}.partial"
    half.mkdir(parents=True)
    mark_temporary(half)
    take(tmp_path / "half")
    assert [entry.name for entry in (tmp_path / "half").iterdir()] == [MARK]
    assert marked_format(tmp_path / "half") == FORMAT


def test_a_run_that_cannot_begin_leaves_nothing(tmp_path: Path) -> None:
    """Neither a mark nor the folders that were made; what was there stays, and so does what was begun."""
    (tmp_path / "empty").mkdir()
    for run in (tmp_path / "empty", tmp_path / "some" / "new"):
        with pytest.raises(UserError, match="no data"), claimed(run, tiny_config(), RunLock(run)):
            raise UserError("no data")
    assert [entry.name for entry in tmp_path.rglob("*")] == ["empty"]
    begun = tmp_path / "begun"
    with pytest.raises(UserError), claimed(begun, tiny_config(), RunLock(begun)):
        (begun / "data").mkdir()
        raise UserError("no data")
    assert (begun / MARK).is_file()


def test_a_configuration_with_values_missing(tmp_path: Path) -> None:
    """A preset in the place of config.toml has the defaults, the precision's too."""
    text = to_toml(tiny_config()).replace('precision = "fp32"\n', "")
    (tmp_path / "config.toml").write_text(text)
    assert "\nprecision" not in text and stored_config(tmp_path, {}).precision == "fp32"
    assert stored_config(tmp_path, {"precision": "bf16"}).precision == "bf16"
    assert stored_config(tmp_path, {"precision": "fp64"}).precision == "fp64"
    (tmp_path / "config.toml").write_text(to_toml(tiny_config(precision="fp64")))
    with pytest.raises(UserError, match=r"--precision bf16: .* holds a run in fp64; valid: fp64"):
        stored_config(tmp_path, {"precision": "bf16"})


def test_a_model_in_hugging_face_s_format_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=rf"^--init {tmp_path}: a model .* `megajax convert import-hf {tmp_path} RUN`"):
        check_run(tmp_path, "--init")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds become tenths."""
    monkeypatch.setattr(lock, "TOUCHED_EVERY", 0.1)
    monkeypatch.setattr(lock, "ABANDONED_AFTER", 1.5)


def write_lock(run_dir: Path, **owner: object) -> Path:
    """A lock as a process of another machine would leave it."""
    known = {"host": "far", "process": 7, "since": "2026-01-02T03:04:05+00:00", "machine": "another", "started": "1"}
    file = run_dir / NAME
    file.write_text(json.dumps(known | owner))
    return file


def locked(run_dir: Path) -> RunLock:
    found = RunLock(run_dir)
    found.take()
    return found


def test_a_second_taker_is_refused_at_once(tmp_path: Path) -> None:
    """With host, process and since when; the holder touches it; when the first is done, the next may have it."""
    first = locked(tmp_path)
    began = time.monotonic()
    with pytest.raises(UserError, match=rf"in use by process {os.getpid()} on \S+, since 20\d\d-.*; valid: "):
        RunLock(tmp_path).take()
    assert time.monotonic() - began < 1
    os.utime(tmp_path / NAME, (1, 1))
    time.sleep(0.5)
    assert abs((tmp_path / NAME).stat().st_mtime - time.time()) < 60
    first.check()
    first.release()
    assert list(tmp_path.iterdir()) == []
    locked(tmp_path).release()


def test_the_lock_of_a_process_that_has_ended_is_taken_at_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    code = f"from pathlib import Path; from megajax.runs.lock import RunLock; RunLock(Path({str(tmp_path)!r})).take()"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / NAME).exists()
    took = locked(tmp_path)
    took.check()
    assert capsys.readouterr().out == ""
    took.release()


@pytest.mark.parametrize("content", ["another machine", "nothing", full("noise")])
def test_an_abandoned_lock_is_taken_after_a_while(content: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """And the wait is shown."""
    file = write_lock(tmp_path)
    if content != "another machine":
        file.write_text("" if content == "nothing" else "[1")
    began = time.monotonic()
    took = locked(tmp_path)
    assert 1.5 <= time.monotonic() - began < 10
    assert "taken over if not touched for" in capsys.readouterr().out
    took.check()
    took.release()
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_another_machine_that_is_touched_is_held(tmp_path: Path) -> None:
    file = write_lock(tmp_path)
    timer = threading.Timer(0.7, os.utime, [file])
    timer.start()
    with pytest.raises(UserError, match="in use by process 7 on far, since 2026-01-02"):
        RunLock(tmp_path).take()
    timer.join()
    assert json.loads(file.read_text())["host"] == "far"


def test_releasing_while_a_lock_is_taken_over_closes_nothing_else(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Standard input least of all."""
    write_lock(tmp_path)
    taking = RunLock(tmp_path)

    def another_is_later(_: float) -> None:
        taking.release()
        (tmp_path / NAME).unlink()
        write_lock(tmp_path)

    monkeypatch.setattr(lock.time, "sleep", another_is_later)
    before = os.fstat(0).st_ino, len(os.listdir("/proc/self/fd"))
    assert taking._take_over() is None
    assert (os.fstat(0).st_ino, len(os.listdir("/proc/self/fd"))) == before


@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_who_has_lost_it_must_not_write(how: str, tmp_path: Path) -> None:
    held = locked(tmp_path)
    (tmp_path / NAME).unlink()
    if how == "replaced":
        write_lock(tmp_path)
    with pytest.raises(RunError, match="stops writing there"):
        held.check()
    held.release()
    assert [entry.name for entry in tmp_path.iterdir()] == ([NAME] if how == "replaced" else [])

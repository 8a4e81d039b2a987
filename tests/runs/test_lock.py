"""One writer for a run directory."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from pytest import MonkeyPatch

from megajax.errors import RunError, UserError
from megajax.runs import lock
from megajax.runs.lock import NAME, RunLock


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


def take(run_dir: Path) -> RunLock:
    found = RunLock(run_dir)
    found.take()
    return found


def test_a_second_taker_is_refused_at_once(tmp_path: Path) -> None:
    """With host, process and since when; the holder touches it; when the first is done, the next may have it."""
    first = take(tmp_path)
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
    take(tmp_path).release()


def test_the_lock_of_a_process_that_has_ended_is_taken_at_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    code = f"from pathlib import Path; from megajax.runs.lock import RunLock; RunLock(Path({str(tmp_path)!r})).take()"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / NAME).exists()
    took = take(tmp_path)
    took.check()
    assert capsys.readouterr().out == ""
    took.release()


@pytest.mark.parametrize("content", ["another machine", "nothing", pytest.param("noise", marks=pytest.mark.full)])
def test_an_abandoned_lock_is_taken_after_a_while(content: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """And the wait is shown."""
    file = write_lock(tmp_path)
    if content != "another machine":
        file.write_text("" if content == "nothing" else "[1")
    began = time.monotonic()
    took = take(tmp_path)
    assert 1.5 <= time.monotonic() - began < 10
    assert "taken over if it is not touched for" in capsys.readouterr().out
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
    held = take(tmp_path)
    (tmp_path / NAME).unlink()
    if how == "replaced":
        write_lock(tmp_path)
    with pytest.raises(RunError, match="must not write there"):
        held.check()
    held.release()
    assert [entry.name for entry in tmp_path.iterdir()] == ([NAME] if how == "replaced" else [])

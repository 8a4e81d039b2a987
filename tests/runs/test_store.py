"""A run in an object store has one writer and whole checkpoints, whatever fails, here on moto's S3 server."""

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from tiny import user_error

from megajax.core.errors import RunError
from megajax.runs import store as stores
from megajax.runs.lock import Holder
from megajax.runs.store import Store

URL = "s3://bucket/some/run"
ODD = {"data/ä b#1*?[x]%20+.txt": "odd"}
CHECKPOINT = {"checkpoints/5/checkpoint.json": "five", "checkpoints/5/state/d/x": "x", "checkpoints/5/state/y": "y"}


@pytest.fixture
def start(s3: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Store]]:
    """Starts of a run; those of the same process would be told apart by nobody, so all seem to be on other machines."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # the client waits between them
    monkeypatch.setattr(Holder, "is_alive", None)
    monkeypatch.setattr(stores, "RENEWED_EVERY", 0.5)
    monkeypatch.setattr(stores, "_AT_START", 1.5)
    made: list[Store] = []

    def begin(url: str = URL) -> Store:
        made.append(Store(url, "--run-dir"))
        return made[-1]

    yield begin
    s3.fault = lambda request: None
    for each in made:
        with contextlib.suppress(RunError):  # it belongs to another
            each.release()
        each.close()


def write(store: Store, files: dict[str, str]) -> None:
    for name, text in files.items():
        (store.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (store.folder / name).write_text(text)


def read(store: Store) -> dict[str, str]:
    """Its files, with those of the checkpoint."""
    store.fetch(store.folder / "checkpoints" / "5")
    files = [file for file in store.folder.rglob("*") if file.is_file() and file.name != ".uploading"]
    return {file.relative_to(store.folder).as_posix(): file.read_text() for file in files}


def bucket() -> Any:
    return fsspec.filesystem("s3", skip_instance_cache=True)


def test_files_come_back_and_go(start: Callable[..., Store]) -> None:
    """Those of a checkpoint when it is read; a renamed file is not uploaded again, and what is gone is removed."""
    first, temporary = start(), {"processes/0.json": "no", "checkpoints/7.orbax-checkpoint-tmp/x": "no"}
    first.take()
    write(first, {"metrics.jsonl": "1"} | ODD | CHECKPOINT | temporary)
    first.publish()
    write(first, {"metrics.jsonl": "12"})
    first.release()
    bucket().pipe({"bucket/some/run/": b"", "bucket/some/run/commits/": b""})  # as browsers make
    second = start()
    assert not (second.folder / "checkpoints/5/state/y").exists()
    second.take()
    assert read(second) == {"metrics.jsonl": "12"} | ODD | CHECKPOINT
    (second.folder / next(iter(ODD))).unlink()
    second.publish()
    before = bucket().find("bucket/some/run/uploads")
    assert len(before) == 4
    (second.folder / "checkpoints" / "5").rename(second.folder / "checkpoints" / "damaged-5-0")
    second.publish()
    assert bucket().find("bucket/some/run/uploads") == before
    assert read(start()).keys() == {"metrics.jsonl", "checkpoints/damaged-5-0/checkpoint.json"}


def test_a_copy_that_is_removed_removes_nothing(start: Callable[..., Store], tmp_path: Path) -> None:
    """By another program, or at the end, while a thread still waits to publish; a file that comes back is uploaded
    again."""
    store, files = start(), {"run.json": "{}", "config.toml": "x"} | CHECKPOINT
    store.take()
    write(store, files)
    store.publish()
    for source, target in ((store.folder, tmp_path), (tmp_path, store.folder)):
        shutil.move(source / "config.toml", target)
        store.publish()
    copy = shutil.copytree(store.folder, tmp_path / "copy")
    shutil.rmtree(store.folder)
    with pytest.raises(RunError, match="is gone, so this process stops writing to s3://bucket/some/run"):
        store.publish()
    shutil.copytree(copy, store.folder)
    store.release()
    shutil.rmtree(store.folder / "checkpoints")
    with pytest.raises(RunError):
        store.publish(patience=0)
    assert read(start()) == files


def test_who_wakes_after_a_takeover_writes_no_more(
    s3: Any, start: Callable[..., Store], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its process was stopped, so it renewed nothing; what it uploads and removes afterwards is nobody's. A start that
    waits for the lease is patient again after each answer."""
    monkeypatch.setattr(Store, "_renew", lambda store: None)
    monkeypatch.setattr(stores, "ABANDONED_AFTER", 4.0)
    monkeypatch.setattr(stores, "_AT_START", 2.5)
    old = start()
    old.take()
    write(old, {"metrics.jsonl": "old"} | CHECKPOINT)
    old.publish()
    new, began, late = start(), time.monotonic(), iter(["503"])
    s3.fault = lambda request: next(late, None) if time.monotonic() - began > 2.6 else None
    new.take()
    assert time.monotonic() - began > 4 and "taken over if not renewed for 4 s" in capsys.readouterr().out
    assert next(late, None) is None
    for text in ("new", "new!", "new!!"):
        write(new, {"metrics.jsonl": text})
        new.publish()
    write(old, {"metrics.jsonl": "woken", "checkpoints/6/checkpoint.json": "six"})
    (old.folder / "checkpoints" / "5" / "state" / "y").unlink()
    for action in (old.publish, old.publish, old.check):
        with pytest.raises(RunError, match="belongs to another process, so this process stops writing there"):
            action()
    assert read(start()) == {"metrics.jsonl": "new!!"} | CHECKPOINT


@pytest.mark.slow
def test_a_store_that_fails_for_a_while_is_told_and_loses_nothing(s3: Any, start: Callable[..., Store]) -> None:
    """Refused, slow, and answers that are lost after the request was done: whatever is committed is whole."""
    store, files = start(), {}
    store.take()
    for status in ("503", "403", "+500"):
        store.news.clear()
        s3.fault = lambda request, status=status: time.sleep(0.1) if store.news else status
        files[f"checkpoints/{status}/checkpoint.json"] = status
        write(store, files)
        store.publish()
        assert [line.endswith(end) for line, end in zip(store.news, ("trying again", "works again"), strict=True)]
    s3.fault = lambda request: "503"
    files["metrics.jsonl"] = "1"
    write(store, files)
    with pytest.raises(OSError):
        store.publish(patience=0)
    s3.fault = lambda request: None
    store.release()
    assert read(start()) == files


def test_one_line_for_each_mistake(s3: Any, start: Callable[..., Store]) -> None:
    bucket().pipe("bucket/other/a.txt", b"text")
    said = user_error(start("s3://bucket/other").take)
    assert "--run-dir s3://bucket/other is not empty and holds a.txt instead of a run; valid: " in said
    said = user_error(start("s3://none/run").take)
    assert "s3://none/run: cannot be written: The specified bucket does not exist; valid: " in said
    assert "--init s3://; valid: s3://BUCKET/RUN" in user_error(stores.run_folder, "s3://", "--init")
    s3.fault = lambda request: request.pop("HTTP_IF_NONE_MATCH", None) and None
    for _ in range(2):
        said = user_error(start().take)
        assert "objects are replaced, not created; valid: a store with conditional writes" in said


@pytest.mark.parametrize("races", [pytest.param(1, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.full)])
def test_of_two_starts_at_once_one_writes(start: Callable[..., Store], races: int) -> None:
    """The other one is told who."""
    for race in range(races):  # in threads, since processes take seconds to start
        url, told = f"{URL}-{race}", []

        def take(store: Store, told: list[str] = told) -> None:
            try:
                store.take()
                write(store, {"winner": store._token})
                store.publish()
            except Exception as error:
                told.append(str(error))

        both = [start(url), start(url)]
        threads = [threading.Thread(target=take, args=(store,)) for store in both]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = (store for store in both if store.taken)
        assert len(told) == 1 and "is in use by process" in told[0], told
        assert read(start(url)) == {"winner": winner._token}

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

from megajax.core.errors import RunError, UserError
from megajax.runs import store as stores
from megajax.runs.lock import Holder
from megajax.runs.store import Store

URL = "s3://bucket/some/run"


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
    files = [file for file in store.folder.rglob("*") if file.is_file() and file.name != ".uploading"]
    return {file.relative_to(store.folder).as_posix(): file.read_text() for file in files}


def objects() -> list[str]:
    system = fsspec.filesystem("s3", skip_instance_cache=True)
    return [path.removeprefix("bucket/some/run/") for path in system.find("bucket") if "/uploads/" in path]


ODD = {"data/ä b#1*?[x]%20+.txt": "odd"}
CHECKPOINT = {"checkpoints/5/checkpoint.json": "five", "checkpoints/5/state/d/x": "x", "checkpoints/5/state/y": "y"}


def test_files_come_back_and_go(start: Callable[..., Store]) -> None:
    """Those of a checkpoint when it is read; a renamed file is not uploaded again, and what is gone is removed."""
    first = start()
    first.take()
    write(
        first,
        {"metrics.jsonl": "1", "processes/0.json": "no", "checkpoints/7.orbax-checkpoint-tmp/x": "no"} | CHECKPOINT,
    )
    first.publish()
    write(first, {"metrics.jsonl": "12"} | ODD)
    first.release()
    fsspec.filesystem("s3", skip_instance_cache=True).pipe({"bucket/some/run/": b"", "bucket/some/run/commits/": b""})
    second = start()
    second.take()
    assert read(second) == {"metrics.jsonl": "12", "checkpoints/5/checkpoint.json": "five"} | ODD
    (second.folder / next(iter(ODD))).unlink()
    second.publish()
    before = {*objects()}
    assert len(before) == 4
    second.fetch(second.folder / "checkpoints" / "5")
    assert read(second) == {"metrics.jsonl": "12"} | CHECKPOINT
    (second.folder / "checkpoints" / "5").rename(second.folder / "checkpoints" / "damaged-5-0")
    second.publish()
    assert {*objects()} == before and "checkpoints/damaged-5-0/checkpoint.json" in read(start())
    for file in (second.folder / "checkpoints" / "damaged-5-0" / "state").rglob("*.?"):
        file.unlink()
    (second.folder / "metrics.jsonl").unlink()
    second.release()
    assert read(start()) == {"checkpoints/damaged-5-0/checkpoint.json": "five"}


def test_a_copy_that_is_removed_removes_nothing(start: Callable[..., Store], tmp_path: Path) -> None:
    """By another program, or at the end, while a thread still waits to publish; a file that comes back is uploaded
    again."""
    store, files = start(), {"run.json": "{}", "config.toml": "x"} | CHECKPOINT
    store.take()
    write(store, files)
    store.publish()
    (store.folder / "config.toml").rename(tmp_path / "x")
    store.publish()
    (tmp_path / "x").rename(store.folder / "config.toml")
    store.publish()
    shutil.copytree(store.folder, tmp_path / "copy")
    shutil.rmtree(store.folder)
    with pytest.raises(RunError, match="is gone, so this process stops writing to s3://bucket/some/run"):
        store.publish()
    shutil.copytree(tmp_path / "copy", store.folder)
    store.release()
    shutil.rmtree(store.folder / "checkpoints")
    with pytest.raises(RunError):
        store.publish(patience=0)
    last = start()
    last.fetch(last.folder / "checkpoints" / "5")
    assert read(last) == files


def test_who_wakes_after_a_takeover_writes_no_more(
    start: Callable[..., Store], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its process was stopped, so it renewed nothing; what it uploads and removes afterwards is nobody's."""
    monkeypatch.setattr(Store, "_renew", lambda store: None)
    monkeypatch.setattr(stores, "ABANDONED_AFTER", 1.0)
    old = start()
    old.take()
    write(old, {"metrics.jsonl": "old"} | CHECKPOINT)
    old.publish()
    new, began = start(), time.monotonic()
    new.take()
    assert time.monotonic() - began > 1 and "taken over if not renewed for 1 s" in capsys.readouterr().out
    write(new, {"metrics.jsonl": "new"})
    for _ in range(4):
        new.publish()
        write(new, {"metrics.jsonl": read(new)["metrics.jsonl"] + "!"})
    write(old, {"metrics.jsonl": "woken", "checkpoints/6/checkpoint.json": "six"})
    (old.folder / "checkpoints" / "5" / "state" / "y").unlink()
    for _ in range(2):
        with pytest.raises(RunError, match="belongs to another process, so this process stops writing there"):
            old.publish()
    with pytest.raises(RunError):
        old.check()
    last = start()
    last.fetch(last.folder / "checkpoints" / "5")
    assert read(last) == {"metrics.jsonl": "new!!!"} | CHECKPOINT


@pytest.mark.slow
def test_a_store_that_fails_for_a_while_is_told_and_loses_nothing(s3: Any, start: Callable[..., Store]) -> None:
    """Refused, slow, and answers that are lost after the request was done: whatever is committed is whole."""
    store = start()
    store.take()
    for number, status in enumerate(["503", "403", "+500"]):
        store.news.clear()
        s3.fault = lambda request, status=status: time.sleep(0.1) if store.news else status
        write(store, {f"checkpoints/{number}/checkpoint.json": status})
        store.publish()
        assert [line.endswith(end) for line, end in zip(store.news, ("trying again", "works again"), strict=True)]
    s3.fault = lambda request: "503"
    write(store, {"metrics.jsonl": "1"})
    with pytest.raises(OSError):
        store.publish(patience=0)
    s3.fault = lambda request: None
    store.publish()
    store.release()
    files = {f"checkpoints/{number}/checkpoint.json": status for number, status in enumerate(["503", "403", "+500"])}
    assert read(start()) == {"metrics.jsonl": "1"} | files


def test_one_line_for_each_mistake(s3: Any, start: Callable[..., Store]) -> None:
    fsspec.filesystem("s3", skip_instance_cache=True).pipe("bucket/other/a.txt", b"text")
    with pytest.raises(UserError, match=r"--run-dir s3://bucket/other is not empty and holds a.txt instead of a run"):
        start("s3://bucket/other").take()
    with pytest.raises(
        UserError, match="s3://none/run: cannot be written: The specified bucket does not exist; valid: "
    ):
        start("s3://none/run").take()

    def forget(request: dict[str, Any]) -> None:
        request.pop("HTTP_IF_NONE_MATCH", None)

    s3.fault = forget
    for _ in range(2):
        with pytest.raises(
            UserError, match="objects are replaced, not created; valid: a store with conditional writes"
        ):
            start().take()
    with pytest.raises(UserError, match=r"--init s3://; valid: s3://BUCKET/RUN"):
        stores.run_folder("s3://", "--init")


@pytest.mark.parametrize("races", [pytest.param(1, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.full)])
def test_of_two_starts_at_once_one_writes(start: Callable[..., Store], races: int) -> None:
    """The other one is told who."""
    for race in range(races):  # in threads, since processes take seconds to start
        both, told = [start(f"{URL}-{race}") for _ in range(2)], []

        def take(store: Store, told: list[str] = told) -> None:
            try:
                store.take()
                write(store, {"winner": store._token})
                store.publish()
                told.append("")
            except UserError as error:
                told.append(str(error))

        threads = [threading.Thread(target=take, args=(store,)) for store in both]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(map(bool, told)) == [False, True] and "is in use by process" in max(told), told
        winner = next(store for store in both if store.taken)
        assert read(start(f"{URL}-{race}")) == {"winner": winner._token}

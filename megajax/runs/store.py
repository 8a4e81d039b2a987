"""Runs in object stores: `--run-dir s3://bucket/run`, or `gs://`.

A process works in a local copy, from which new files are uploaded, since Orbax (0.12) writes to no S3 store. What a run
consists of is said by the newest of its commits: objects `commits/NUMBER`, created and never replaced, which name the
object of every file. A checkpoint is in the newest commit, or does not exist. Whoever creates the next number is the
run's writer; an earlier one cannot commit again, and what it still uploads or removes is nobody's, since each file that
is uploaded gets an object of its own.
"""

import contextlib
import functools
import json
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple

from megajax.core.errors import RunError, UserError
from megajax.host import reading, remote
from megajax.host.ending import Exit
from megajax.host.files import is_marked, writable
from megajax.host.paths import check_path, in_store
from megajax.host.transcript import known_as, tell
from megajax.runs.failures import in_one_line
from megajax.runs.lock import ABANDONED_AFTER, TOUCHED_EVERY, Holder, RunLock
from megajax.runs.step_folders import is_temporary

PATIENCE = 120.0  # seconds for which a store may fail before a checkpoint counts as failed
_UPLOADED_EVERY = 60.0  # seconds, besides checkpoints
_COPIES, _OWNER = "megajax-store-", "owner.json"  # folders with local copies, and the processes that work in them
_ALIVE = ".uploading"  # in `checkpoints/`, touched at every request, for the watchdog
_WHEN_NEEDED = re.compile(r"checkpoints/[^/]+/state/")  # what is copied only to read a checkpoint

_stores: dict[str, "Store"] = {}  # of this process, by URL


def run_folder(path: str | Path, flag: str) -> Path:
    """The folder of a run: `path`, or the local copy of a run in a store."""
    if not in_store(path):
        check_path(path, flag)
        return Path(path)
    url = re.sub(":/+", "://", str(path), count=1).rstrip("/")
    if url not in _stores:
        try:
            _stores[url] = Store(url, flag)
        except OSError as error:
            raise UserError(f"{flag} {url}: cannot be read: {error.strerror}; valid: a readable store") from None
    return _stores[url].folder


def store_of(run_dir: Path) -> "Store | None":
    """The store of whose run a folder is the local copy."""
    return next((store for store in _stores.values() if store.folder == run_dir), None)


def _patiently(method: Callable[..., None]) -> Callable[..., None]:
    """Have a method of `Store` begin again until the store does not fail, for `patience` seconds; what fails for the
    writer is news."""

    @functools.wraps(method)
    def call(store: "Store", *given: Any, patience: float = PATIENCE, **further: Any) -> None:
        end, pause = time.monotonic() + patience, 1.0
        with store.lock:
            while True:
                try:
                    with remote.os_errors(store.url):
                        method(store, *given, **further)
                    if store.fails:
                        store.fails = False
                        store.news.append(f"{store.url} works again")
                    return
                except OSError as error:
                    if store.taken and not store.fails:
                        store.fails = True
                        store.news.append(f"{store.url}: {error.strerror}; trying again")
                    if time.monotonic() + pause > end:
                        raise
                store.show_life()
                time.sleep(pause)
                pause = min(2 * pause, 15.0)
                store.connect()

    return call


class _Commit(NamedTuple):
    """What a run consists of."""

    number: int = 0
    writer: str = ""  # begins with the number of its first commit
    holder: Holder | None = None  # None once it has ended
    files: Mapping[str, str] = MappingProxyType({})  # the object of every file, by its path in the run directory


class Store(RunLock):
    """A run in a store, and its local copy. The process that takes it publishes; others read, and hand over their
    shares of checkpoints. Methods raise `OSError` if the store fails for longer than they are patient."""

    def __init__(self, url: str, flag: str) -> None:
        _remove_abandoned()
        self._copy = Path(tempfile.mkdtemp(prefix=_COPIES))
        (self._copy / _OWNER).write_text(json.dumps(asdict(Holder.me())))
        self.folder = self._copy / PurePosixPath(url).name
        self.folder.mkdir()
        super().__init__(self.folder)
        self.lock = threading.RLock()  # held while the local copy is looked at, and to remove something from it
        self.news: list[str] = []
        self.url, self._flag, self._token, self._uploads = url, flag, secrets.token_hex(8), 0
        self.taken = self._taken_over = self.fails = False
        self._commit = _Commit()  # the newest one known
        self._objects: dict[tuple[int, int, int], str] = {}  # of local files, whatever their names
        self._absent: dict[str, str] = {}  # files of the commit that have not been copied, with their objects
        known_as[str(self.folder)] = url
        Exit.at_end.append(self.close)
        self.connect()
        self.pull(patience=3.0)

    def connect(self) -> None:
        options = {"use_listings_cache": False, "skip_instance_cache": True}  # the latter for new credentials
        self._system, self._root = remote.file_system(self.url, self._flag, **options)
        self._system.retries = 1  # besides those of its client, so that requests without an answer fail in time

    def close(self) -> None:
        """Remove the local copy."""
        shutil.rmtree(self._copy, ignore_errors=True)
        _stores.pop(self.url, None)
        known_as.pop(str(self.folder), None)

    def take(self) -> None:
        """Become the run's writer. If another one may have ended, announce that and wait up to a minute."""
        seen, since = None, 0.0
        with writable(self.url), remote.os_errors(self.url):
            while True:
                newest = self._newest()
                lease, holder = (newest.number, self._content(self._lease(newest))), newest.holder
                if not holder or holder.is_alive is False or (seen and time.monotonic() - since > ABANDONED_AFTER):
                    if self._claim(newest):
                        break
                elif seen not in (None, lease):
                    in_use = f"--run-dir {self.url} is in use by {holder}"
                    raise UserError(f"{in_use}; valid: wait until it ends, or another place")
                elif not seen:
                    seen, since = lease, time.monotonic()
                    tell(f"{self.url} belongs to {holder}: taken over if not renewed for {ABANDONED_AFTER:.0f} s")
                time.sleep(1.0)
        for action in (self._renew, self._keep_uploading):
            threading.Thread(target=action, daemon=True).start()

    def _claim(self, newest: _Commit) -> bool:
        """Whether this process has become the writer."""
        number, folder = newest.number + 1, f"--run-dir {self.url}"
        if newest.number != self._commit.number:
            raise UserError(f"{folder} was changed since this start read it; valid: rerun the command")
        if not newest.number and (others := self._names("")):
            raise UserError(f"{folder} is not empty and holds {others[0]} instead of a run; valid: an empty place")
        try:
            self._add(_Commit(number, f"{number:08}-{self._token}", Holder.me(), newest.files))
            self._system.pipe_file(self._path(number), b"", mode="create")
        except FileExistsError:
            self.taken = True
        except RunError:
            return False
        if not self.taken:
            raise UserError(f"{folder}: objects are replaced, not created; valid: a store with conditional writes")
        return True

    def check(self) -> None:
        if self._taken_over:
            raise RunError(f"{self.url} belongs to another process, so this process stops writing there")

    def release(self) -> None:
        if not self.taken:
            return
        self.taken = False
        self._ended.set()
        try:
            self.publish(ends=True)
        except (OSError, RunError) as error:
            del known_as[str(self.folder)]
            tell(f"{self.url}: {in_one_line(error)}; what was not uploaded stays in {self.folder}")
            (self._copy / _OWNER).unlink()
            Exit.at_end.remove(self.close)

    def _renew(self) -> None:
        while True:
            with contextlib.suppress(Exception):
                self._system.pipe_file(self._lease(self._commit), str(time.time_ns()).encode())
            if self._ended.wait(TOUCHED_EVERY):
                return

    def _lease(self, commit: _Commit) -> str:
        return f"{self._root}/leases/{commit.writer}"

    def _content(self, path: str) -> bytes:
        with contextlib.suppress(FileNotFoundError):
            return self._system.cat_file(path)
        return b""

    def _keep_uploading(self) -> None:
        with contextlib.suppress(Exception):  # remove what a killed writer has left
            left = [name for name in self._names("uploads") if name < self._commit.writer]
            paths = [path for name in left for path in self._system.find(f"{self._root}/uploads/{name}")]
            self._remove({path.removeprefix(f"{self._root}/") for path in paths} - {*self._commit.files.values()})
        while not self._ended.wait(_UPLOADED_EVERY) and not self._taken_over:
            with contextlib.suppress(OSError, RunError):
                self.publish(patience=0)

    @_patiently
    def publish(self, *, ends: bool = False) -> None:
        """Upload what is new in the local copy, and commit it. Raises `RunError` if another process is the writer."""
        self.check()
        holder = None if ends else self._commit.holder
        self._uploads += 1
        local = {file.relative_to(self.folder).as_posix(): file for file in _files(self.folder)}
        prints = {name: _fingerprint(file) for name, file in local.items()}

        def upload(name: str) -> None:
            key = f"uploads/{self._commit.writer}/{self._uploads:06}/{name}"
            try:
                self._system.put_file(str(local[name]), f"{self._root}/{key}")
                self._objects[prints[name]] = key
            except FileNotFoundError:
                if local[name].exists():  # otherwise it was replaced
                    raise

        self._each(upload, [name for name in local if prints[name] not in self._objects])
        files = {name: self._objects[print_] for name, print_ in prints.items() if print_ in self._objects}
        files |= {name: key for name, key in self._absent.items() if (self.folder / name).parent.exists()}
        while (self._commit.files, self._commit.holder) != (files, holder):
            self._add(_Commit(self._commit.number + 1, self._commit.writer, holder, files))

    def _add(self, commit: _Commit) -> None:
        """Commit; raises `RunError` if another process was the first."""
        fields = commit._asdict() | {"holder": commit.holder and asdict(commit.holder), "files": dict(commit.files)}
        with contextlib.suppress(FileExistsError):
            self._system.pipe_file(self._path(commit.number), json.dumps(fields).encode(), mode="create")
        there = self._read(commit.number)  # an earlier one of ours, if the answer to it was lost
        if there is None or not there.writer.endswith(self._token):
            self._taken_over = self.taken
            raise RunError(f"{self.url} belongs to another process, so this process stops writing there")
        before, self._commit = self._commit, there
        with contextlib.suppress(Exception):  # what stays is removed by a later start
            self._remove({*before.files.values()} - {*there.files.values()})
            if commit.number > 2:
                self._system.pipe_file(self._path(commit.number - 2), b"")

    def _read(self, number: int) -> _Commit | None:
        """A commit; None for one that later ones have replaced."""
        if not (content := self._content(self._path(number))):
            return None
        try:
            fields = reading.parse_json(content.decode())
            commit = _Commit(**fields)._replace(holder=fields["holder"] and Holder(**fields["holder"]))
            if not any(path.is_absolute() or ".." in path.parts for path in map(PurePosixPath, commit.files)):
                return commit
        except (ValueError, TypeError, KeyError):
            pass
        raise UserError(f"{self._flag} {self.url}: commit {number} is damaged; valid: the object as it was written")

    def _newest(self) -> _Commit:
        while number := max(map(int, self._names("commits")), default=0):
            if commit := self._read(number):
                return commit
        return _Commit()

    def _names(self, folder: str) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return [PurePosixPath(path).name for path in self._system.ls(f"{self._root}/{folder}", detail=False)]
        return []

    def _path(self, number: int) -> str:
        return f"{self._root}/commits/{number:08}"

    @_patiently
    def pull(self) -> None:
        """Copy the newest files of the run, except checkpoints."""
        newest = self._newest()
        later = {name: key for name, key in newest.files.items() if _WHEN_NEEDED.match(name)}
        self._download({name: key for name, key in newest.files.items() if name not in later}, self.folder)
        for name in later:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        self._commit, self._absent = newest, later

    @_patiently
    def fetch(self, checkpoint: Path) -> None:
        """Copy the files of a checkpoint; those that are gone stay missing."""
        within = f"{checkpoint.relative_to(self.folder).as_posix()}/"
        wanted = {name: key for name, key in self._absent.items() if name.startswith(within)}
        self._download(wanted, self.folder, may_be_gone=True)
        self._absent = {name: key for name, key in self._absent.items() if name not in wanted}

    @_patiently
    def hand_over(self, folder: Path, step: int) -> None:
        """Upload this process's share of a checkpoint to where process 0 gathers it, with its marker last."""
        for file in sorted(filter(Path.is_file, folder.rglob("*")), key=lambda file: file.parent == folder):
            name = file.relative_to(folder).as_posix()
            self._system.put_file(str(file), f"{self._root}/{self._shares(step)}/{name}")

    @_patiently
    def gather(self, folder: Path, step: int) -> None:
        """Copy to `folder` what the other processes have handed over so far."""
        shares = self._shares(step)
        markers = self._names(shares)
        keys = [path.removeprefix(f"{self._root}/") for path in self._system.find(f"{self._root}/{shares}")]
        there = {key.removeprefix(f"{shares}/"): key for key in keys}
        self._download({name: key for name, key in there.items() if "/" in name or name in markers}, folder)

    def _shares(self, step: int) -> str:
        return f"uploads/{self._commit.writer}/shares/{step}"

    def _download(self, keys: Mapping[str, str], folder: Path, *, may_be_gone: bool = False) -> None:
        def download(name: str) -> None:
            file = folder / name
            if file.exists() and self._objects.get(_fingerprint(file)) == keys[name]:
                return
            file.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._system.get_file(f"{self._root}/{keys[name]}", str(file))
                self._objects[_fingerprint(file)] = keys[name]
            except FileNotFoundError:
                file.unlink(missing_ok=True)
                if not may_be_gone:
                    raise

        self._each(download, keys)

    def _remove(self, keys: Iterable[str]) -> None:
        def remove(key: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._system.rm_file(f"{self._root}/{key}")

        self._each(remove, keys)

    def show_life(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self.folder / "checkpoints" / _ALIVE).touch()

    def _each(self, action: Callable[[str], None], names: Iterable[str]) -> None:
        with ThreadPoolExecutor(8) as threads:
            for _ in threads.map(action, names):
                self.show_life()


def _files(folder: Path) -> Iterator[Path]:
    """What is uploaded."""
    for entry in folder.iterdir():
        if entry.name in ("processes", _ALIVE) or is_temporary(entry.name) or is_marked(entry):
            continue
        if entry.is_dir() and not entry.is_symlink():
            yield from _files(entry)
        elif entry.is_file():
            yield entry


def _fingerprint(file: Path) -> tuple[int, int, int]:
    """Stays when a file is renamed, and changes with its content."""
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _remove_abandoned() -> None:
    """Remove the local copies of processes of this machine that were killed."""
    for copy in Path(tempfile.gettempdir()).glob(f"{_COPIES}*"):
        with contextlib.suppress(OSError):
            owner = Holder.read(copy / _OWNER)
            if owner is not None and owner.is_alive is False and copy.stat().st_uid == os.geteuid():
                shutil.rmtree(copy)

"""Runs in object stores: `--run-dir s3://bucket/run`, or `gs://`.

A process works in a local copy, from which new files are uploaded, since Orbax (0.12) writes to no S3 store. What a run
consists of is said by the newest of its commits: objects `commits/NUMBER`, created and never replaced, which name the
object of every file. A checkpoint is in the newest commit, or does not exist. Whoever creates the next number is the
run's writer; an earlier one finds a newer commit than its own, so that it ends, and what it still uploads is nobody's,
since each file that is uploaded gets an object of its own. Listings must show what was created before, as those of S3
and Google do.
"""

import contextlib
import functools
import json
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from megajax.core.errors import RunError, UserError
from megajax.host import reading, remote
from megajax.host.ending import Exit
from megajax.host.files import is_marked, writable
from megajax.host.paths import check_path, in_store
from megajax.host.transcript import known_as, tell
from megajax.runs.failures import in_one_line
from megajax.runs.lock import ABANDONED_AFTER, Holder, RunLock
from megajax.runs.ownership import MARK
from megajax.runs.step_folders import is_temporary

PATIENCE = 120.0  # seconds for which a store may fail before a checkpoint counts as failed
_AT_START = 5.0  # the same, before a run is read or taken
_UPLOADED_EVERY = 60.0  # seconds, besides checkpoints
RENEWED_EVERY = 15.0  # the same commit, so that others know that its writer lives
_COPIES, _OWNER = "megajax-store-", "owner.json"  # folders with local copies, and the processes that work in them
_Fingerprint = tuple[int, int, int]
_ALIVE = ".uploading"  # in `checkpoints/`, touched at every request, for the watchdog
_WHEN_NEEDED = re.compile(r"checkpoints/[^/]+/state/")  # what is copied only to read a checkpoint
_OURS = re.compile(r"(?:commits|uploads)/(\d{8})(?![^-/])")  # objects, and the number of their writer's commit

_stores: dict[str, "Store"] = {}  # of this process, by URL


def run_folder(path: str | Path, flag: str) -> Path:
    """The folder of a run: `path`, or the local copy of a run in a store."""
    if not in_store(path):
        check_path(path, flag)
        return Path(path)
    url = re.sub(":/+", "://", str(path), count=1).rstrip("/")
    if "://" not in url or ".." in PurePosixPath(url).parts:
        raise UserError(f"{flag} {path}; valid: s3://BUCKET/RUN or gs://BUCKET/RUN")
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
    def call(store: "Store", *arguments: Any, patience: float | None = None, **options: Any) -> None:
        patience, pause = PATIENCE if patience is None else patience, 1.0
        end, news = time.monotonic() + patience, store.news if store.taken and patience else []
        with store.lock:
            while True:
                try:
                    with remote.os_errors(store.url):
                        method(store, *arguments, **options)
                    news += [f"{store.url} works again"] * (pause > 1)
                    return
                except OSError as error:
                    news += [f"{store.url}: {error.strerror}; trying again"] * (pause == 1)
                    if time.monotonic() + pause > end:
                        raise
                store.show_life()
                time.sleep(pause)
                pause = min(2 * pause, 15.0)
                with contextlib.suppress(UserError):  # new credentials are not there yet
                    store.connect()

    return call


class _Commit(NamedTuple):
    """What a run consists of."""

    number: int
    writer: str  # begins with the number of its first commit
    holder: Holder | None  # None once it has ended
    files: Mapping[str, str]  # the object of every file, by its path in the run directory


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
        self.url, self._flag, self._token = url, flag, secrets.token_hex(8)
        self.taken = self._taken_over = False
        self._seen = 0, 0.0  # another writer's commit, and when it was first seen
        self._commit, self._adding = _Commit(0, "", None, {}), threading.Lock()  # the newest one known
        self._objects: dict[_Fingerprint, str] = {}  # of local files, whatever their names
        self._absent: dict[str, str] = {}  # files of the commit that have not been copied, with their objects
        known_as[str(self.folder)] = url
        Exit.at_end.append(self.close)
        self.connect()
        self.pull(patience=_AT_START)

    def connect(self) -> None:
        from fsspec.implementations.dirfs import DirFileSystem  # here, since it takes a while

        options = {"use_listings_cache": False, "skip_instance_cache": True}  # the latter for new credentials
        system, path = remote.file_system(self.url, self._flag, **options)
        system.retries = 1  # besides those of its client, so that requests without an answer fail in time
        self._system = DirFileSystem(path, system, skip_instance_cache=True)

    def close(self) -> None:
        """Remove the local copy."""
        shutil.rmtree(self._copy, ignore_errors=True)
        _stores.pop(self.url, None)
        known_as.pop(str(self.folder), None)

    def take(self) -> None:
        """Become the run's writer. If another one may have ended, announce that and wait up to a minute."""
        with writable(self.url):
            while not self.taken:
                self._try_to_take(patience=_AT_START)
                time.sleep(0.0 if self.taken else 1.0)
        for action in (self._renew, self._keep_uploading):
            threading.Thread(target=action, daemon=True).start()

    @_patiently
    def _try_to_take(self) -> None:
        newest, (seen, since) = self._newest(), self._seen
        holder, silent = newest.holder, newest.number == seen and time.monotonic() - since > ABANDONED_AFTER
        if silent or holder is None or holder.is_alive is False or newest.writer.endswith(self._token):
            self._claim(newest)
        elif not seen:
            self._seen = newest.number, time.monotonic()
            tell(f"{self.url} belongs to {holder}: taken over if not renewed for {ABANDONED_AFTER:.0f} s")
        elif newest.number != seen:
            raise UserError(f"--run-dir {self.url} is in use by {holder}; valid: wait until it ends, or another place")

    def _claim(self, newest: _Commit) -> None:
        """Become the writer after `newest`, unless another process is faster."""
        folder, before = f"--run-dir {self.url}", self._commit
        if newest.files != before.files:
            raise UserError(f"{folder} was changed since this start read it; valid: rerun the command")
        if not newest.number and (others := self._names("")):
            raise UserError(f"{folder} is not empty and holds {others[0]} instead of a run; valid: an empty place")
        try:
            self._commit = newest._replace(writer=f"{newest.number + 1:08}-{self._token}")
            self._add(holder=Holder.me())
        except RunError:
            self._commit, self._taken_over = before, False
            return
        with contextlib.suppress(Exception):  # it exists
            self._create(self._commit._replace(holder=None))
        if self._newest() != self._commit:
            raise UserError(f"{folder}: objects are replaced, not created; valid: a store with conditional writes")
        self.taken = True

    def check(self) -> None:
        if self._taken_over:
            raise RunError(f"{self.url} belongs to another process, so this process stops writing there")

    def release(self) -> None:
        """Publish the last changes; raises `RunError` if that fails and no other error is being handled."""
        if not self.taken:
            return
        before = sys.exception()
        self._ended.set()
        try:
            self.publish(ends=True)
        except (OSError, RunError) as error:
            problem = f"{self.url}: {in_one_line(error)}; what was not uploaded stays in {self._copy}"
            (self._copy / _OWNER).unlink()
            Exit.at_end.remove(self.close)
            if before is None:
                raise RunError(problem) from None
            tell(problem)
        finally:
            self.taken = False

    def _renew(self) -> None:
        while not self._ended.wait(RENEWED_EVERY) and not self._taken_over:
            with contextlib.suppress(Exception):
                self._add()

    def _keep_uploading(self) -> None:
        with contextlib.suppress(Exception):  # remove what earlier writers have left
            left = {*self._system.find("")} - {*self._commit.files.values()}
            earlier = [key for key in left if (ours := _OURS.match(key)) and ours[1] < self._commit.writer[:8]]
            self._each(self._remove, earlier)
        while not self._ended.wait(_UPLOADED_EVERY) and not self._taken_over:
            with contextlib.suppress(OSError, RunError):
                self.publish(patience=0)

    @_patiently
    def publish(self, *, ends: bool = False) -> None:
        """Upload what is new in the local copy, and commit it. Raises `RunError` if another process is the writer."""
        self.check()
        local = dict(_files(self.folder))
        if self._ended.is_set() != ends or (MARK in self._commit.files and MARK not in local):
            raise RunError(f"{self._copy} is gone, so this process stops writing to {self.url}")
        folder = f"uploads/{self._commit.writer}/{secrets.token_hex(8)}"

        def upload(name: str) -> None:
            key = f"{folder}/{name}"
            try:
                self._system.put_file(str(self.folder / name), key)
                self._objects[local[name]] = key
            except FileNotFoundError:
                if (self.folder / name).exists():  # otherwise it was replaced
                    raise

        self._each(upload, [name for name, fingerprint in local.items() if fingerprint not in self._objects])
        files = {name: key for name, fingerprint in local.items() if (key := self._objects.get(fingerprint))}
        files |= {name: key for name, key in self._absent.items() if (self.folder / name).parent.exists()}
        holder = None if ends else self._commit.holder
        while (self._commit.files, self._commit.holder) != (files, holder):
            self._add(files=files, holder=holder)

    def _add(self, **changes: Any) -> None:
        """Commit what differs from the newest commit; raises `RunError` if another process has committed."""
        with self._adding:
            before = self._commit
            commit = before._replace(number=before.number + 1, **changes)
            problem: Exception = OSError(f"commit {commit.number} is not listed")
            try:
                self._create(commit)
            except Exception as error:  # if only the answer was lost, it is there
                problem = error
            newest = self._newest()
            if newest.number < commit.number:
                raise problem
            if not newest.writer.endswith(self._token):
                self._taken_over = True
                self.check()
            self._commit, gone = newest, {*before.files.values()} - {*newest.files.values()}
            for fingerprint in [each for each, key in [*self._objects.items()] if key in gone]:
                del self._objects[fingerprint]  # the file may come back
            with contextlib.suppress(Exception):  # what stays is removed by a later start
                self._each(self._remove, {*gone, f"commits/{newest.number - 2:08}"})

    def _create(self, commit: _Commit) -> None:
        content = json.dumps(commit._asdict(), default=vars).encode()
        self._system.pipe_file(f"commits/{commit.number:08}", content, mode="create")

    def _newest(self) -> _Commit:
        number = max((int(name) for name in self._names("commits") if name.isdecimal()), default=0)
        if not number:
            return _Commit(0, "", None, {})
        content = self._system.cat_file(f"commits/{number:08}")
        try:
            fields = reading.parse_json(content.decode())
            commit = _Commit(**fields)._replace(holder=fields["holder"] and Holder(**fields["holder"]))
            if not any(path.is_absolute() or ".." in path.parts for path in map(PurePosixPath, commit.files)):
                return commit
        except (ValueError, TypeError, KeyError):
            pass
        raise UserError(f"{self._flag} {self.url}: commit {number} is damaged; valid: the object as it was written")

    def _names(self, folder: str) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            there = self._system.ls(folder, detail=False)
            return [PurePosixPath(path).name for path in there if path.strip("/") != folder]  # which may be an object
        return []

    @_patiently
    def pull(self) -> None:
        """Copy the newest files of the run, except checkpoints."""
        newest = self._newest()
        later = {name: key for name, key in newest.files.items() if _WHEN_NEEDED.match(name)}
        self._download({self.folder / name: key for name, key in newest.files.items() if name not in later})
        for name in later:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        self._commit, self._absent = newest, later

    @_patiently
    def fetch(self, checkpoint: Path) -> None:
        """Copy the files of a checkpoint; those that are gone stay missing."""
        wanted = [name for name in self._absent if checkpoint in (self.folder / name).parents]
        self._download({self.folder / name: self._absent[name] for name in wanted}, may_be_gone=True)
        self._absent = {name: key for name, key in self._absent.items() if name not in wanted}

    @_patiently
    def hand_over(self, folder: Path, shares: str) -> None:
        """Upload this process's share of a checkpoint to where process 0 gathers the `shares`, with its marker last."""
        for file in sorted(filter(Path.is_file, folder.rglob("*")), key=lambda file: file.parent == folder):
            self._system.put_file(str(file), f"{self._place(shares)}/{file.relative_to(folder).as_posix()}")

    @_patiently
    def gather(self, folder: Path, shares: str) -> None:
        """Copy to `folder` what the other processes have handed over so far. Its objects become the checkpoint's."""
        markers = self._names(self._place(shares))
        there = {key.removeprefix(f"{self._place(shares)}/"): key for key in self._system.find(self._place(shares))}
        self._download({folder / name: key for name, key in there.items() if "/" in name or name in markers})

    def _place(self, shares: str) -> str:
        return f"uploads/{self._commit.writer}/shares/{shares}"

    def _download(self, keys: Mapping[Path, str], *, may_be_gone: bool = False) -> None:
        def download(file: Path) -> None:
            file.parent.mkdir(parents=True, exist_ok=True)
            try:
                if not file.exists() or self._objects.get(_fingerprint(file.stat())) != keys[file]:
                    self._system.get_file(keys[file], str(file))
                    self._objects[_fingerprint(file.stat())] = keys[file]
            except FileNotFoundError:
                file.unlink(missing_ok=True)
                if not may_be_gone:
                    raise

        self._each(download, keys)

    def _remove(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._system.rm_file(key)

    def show_life(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self.folder / "checkpoints" / _ALIVE).touch()

    def _each(self, action: Callable[[Any], None], items: Iterable[Any]) -> None:
        with ThreadPoolExecutor(8) as threads:
            for _ in threads.map(action, items):
                self.show_life()


def _files(folder: Path) -> Iterator[tuple[str, _Fingerprint]]:
    """What is uploaded."""

    def failed(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for parent, folders, names in os.walk(folder, onerror=failed):
        left_out = {name for name in folders if is_temporary(name) or is_marked(Path(parent, name))}
        folders[:] = {*folders} - left_out - {"processes"}
        for file in (Path(parent, name) for name in names if name != _ALIVE):
            with contextlib.suppress(FileNotFoundError):  # it has just been removed
                if stat.S_ISREG((status := file.stat()).st_mode):
                    yield file.relative_to(folder).as_posix(), _fingerprint(status)


def _fingerprint(status: os.stat_result) -> _Fingerprint:
    """Stays when a file is renamed, and changes with its content."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def _remove_abandoned() -> None:
    """Remove the local copies of processes of this machine that were killed."""
    for copy in Path(tempfile.gettempdir()).glob(f"{_COPIES}*"):
        with contextlib.suppress(OSError):
            owner = Holder.read(copy / _OWNER)
            if owner is not None and owner.is_alive is False and copy.stat().st_uid == os.geteuid():
                shutil.rmtree(copy)

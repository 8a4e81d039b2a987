"""Find out which process hangs. Every process writes its activity to a file in the run directory. When nothing makes
progress, each process ends with a line that names the process and step that the others wait for."""

import contextlib
import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import jax

from megajax.core.errors import RunError
from megajax.host import reading
from megajax.host.ending import fail, says_lost
from megajax.host.paths import identity

FOLDER = "processes"
COMPUTING, COMPILING = "computing", "compiling"  # during either a process may be waiting for others
WRITING = "writing a checkpoint"
_LOOKS_EVERY, _WRITTEN_EVERY, _GRACE, _FROZEN_AFTER = 0.5, 5.0, 2.0, 30.0  # seconds
_RESUMES = "rerun the command to resume from the newest checkpoint"
_SLOWEST = 10  # a step may take this many times the longest one so far


@dataclass(frozen=True)
class Status:
    """The activity of a process: what it has been doing for how many seconds, and at which step."""

    host: str
    pid: int
    step: int
    doing: str
    seconds: float


def read_status(file: Path) -> Status | None:
    """The status written by a process; None if it cannot be read."""
    try:
        status = Status(**reading.parse_json(reading.read_bytes(file).decode()))
        numbers, words = (status.pid, status.step, status.seconds), (status.host, status.doing)
        valid = all(type(number) in (int, float) for number in numbers) and "".join(words).isprintable()
        return status if valid else None
    except (OSError, ValueError, TypeError):
        return None


class Watchdog:
    """Watches a run of several processes that share `run_dir`; of a single process only its checkpoints, whose writing
    stands still for ever where memory ends. A process that is silent for 30 s while this one waits counts as lost. This
    one ends after `patience` seconds without progress (0: never), but not before ten times the longest step; ten times
    later before the first step and while compiling."""

    def __init__(self, run_dir: Path, patience: float) -> None:
        self._folder, self._patience = run_dir / FOLDER, patience
        self._run_dir = identity(run_dir)
        self._step, self._doing, self._since, self._longest = 0, "starting", time.monotonic(), 0.0
        self._ended = threading.Event()
        self._count = jax.process_count()
        self._stamps: dict[int, tuple[int, float]] = {}  # when each process's file was written, and when we saw that
        self._heard: set[int] = set()  # processes whose file changed since this start; others' may be from earlier ones
        self._listen(self._since, first=True)
        self._watches = self._count > 1 and patience > 0
        if patience > 0:
            watch = self._watch if self._watches else self._watch_alone
            threading.Thread(target=watch, name="watchdog", daemon=True).start()

    def at(self, step: int, doing: str) -> None:
        """Note what this process is doing, and for which step."""
        now = time.monotonic()
        if self._step and self._doing != COMPILING:
            self._longest = max(self._longest, now - self._since)
        self._step, self._doing, self._since = step, doing, now

    def close(self) -> None:
        """Stop watching."""
        self._ended.set()

    def explain(self, error: BaseException) -> None:
        """Raise `RunError` with the name of the lost process, if `error` says that one is lost."""
        if self._watches and says_lost(error):
            asked = time.monotonic()
            self._hear_all()
            if lost := self._lost(asked):
                raise RunError(f"{lost}; {_RESUMES}") from None

    def _watch(self) -> None:
        written = 0.0
        while not self._ended.wait(_LOOKS_EVERY):
            now = time.monotonic()
            self._listen(now)
            if now - written >= _WRITTEN_EVERY:
                self._write()
                written = now
            waited = now - self._since
            silent = any(now - self._stamps[number][1] > _FROZEN_AFTER for number in sorted(self._heard))
            slow = not self._longest or self._doing == COMPILING
            allowed = max(_SLOWEST * self._patience if slow else self._patience, _SLOWEST * self._longest)
            if waited > allowed or (waited > _FROZEN_AFTER and silent):
                asked, suspected = now, self._since
                self._hear_all()
                if not self._ended.is_set() and self._since == suspected:
                    fail(f"{self._guilty(asked)}; {_RESUMES}")

    def _watch_alone(self) -> None:
        seconds, before = 0.0, (self._since, 0)  # counted, so that a stopped process does not wait
        while not self._ended.is_set():
            with contextlib.suppress(MemoryError, OSError):  # the latter of a file that is gone already
                self._ended.wait(_LOOKS_EVERY)
                files = (self._folder.parent / "checkpoints").rglob("*") if self._doing == WRITING else ()
                now = self._since, max((file.stat().st_mtime_ns for file in files), default=0)  # the disk may be slow
                seconds, before = seconds + _LOOKS_EVERY if self._doing == WRITING and now == before else 0.0, now
                if seconds > max(self._patience, _SLOWEST * self._longest):
                    fail(f"step {self._step}: {WRITING} has been hanging for {seconds:.0f} s; {_RESUMES}")

    def _hear_all(self) -> None:
        """Give other processes time to report again, and keep reporting meanwhile."""
        end = time.monotonic() + _WRITTEN_EVERY + _GRACE
        while time.monotonic() < end and not self._ended.wait(_LOOKS_EVERY):
            self._write()
            self._listen(time.monotonic())

    def _write(self) -> None:
        seconds = round(time.monotonic() - self._since, 1)
        if identity(self._folder.parent) != self._run_dir:  # removed, or replaced by someone else's
            return
        status = Status(socket.gethostname(), os.getpid(), self._step, self._doing, seconds)
        file = self._file(jax.process_index())
        new = file.with_suffix(".partial")  # others may read the file at any moment
        with contextlib.suppress(OSError):  # only needed if something hangs
            try:
                self._folder.mkdir(exist_ok=True)
                new.write_text(json.dumps(asdict(status)) + "\n")
                new.replace(file)
            finally:  # the disk may be full
                new.unlink(missing_ok=True)

    def _guilty(self, asked: float) -> str:
        """Which process hangs: one silent since `asked`, else one that waits for no other, else the slowest."""
        if lost := self._lost(asked):
            return lost
        known = self._reports()
        if not known:
            return f"none of the {self._count} processes has reported since step {self._step}"
        if list(known) == [jax.process_index()]:  # on one file system the others would have reported, too
            return (
                f"one of {self._count} processes hangs at step {self._step}, which is not known without a shared folder"
            )
        busy = [process for process, status in known.items() if status.doing not in (COMPUTING, COMPILING)]
        behind = [process for process in known if known[process].step == min(status.step for status in known.values())]
        process = next(iter(busy or behind))
        who, where = self._described(process, known[process])
        return f"{who} has been hanging {where} for {known[process].seconds + self._silence(process):.0f} s"

    def _lost(self, asked: float) -> str:
        """The process that has been silent for longest, if any is since `asked`; else empty."""
        known = self._reports()
        silent = [process for process in known if self._stamps[process][1] < asked]
        if not silent:
            return ""
        process = max(silent, key=self._silence)
        who, where = self._described(process, known[process])
        others = f"; {len(silent) - 1} more are silent too" if len(silent) > 1 else ""
        return f"lost {who}, which was {where} and has not reported for {self._silence(process):.0f} s{others}"

    def _reports(self) -> dict[int, Status]:
        """What the processes that have been heard wrote last."""
        return {number: status for number in sorted(self._heard) if (status := read_status(self._file(number)))}

    def _described(self, number: int, status: Status) -> tuple[str, str]:
        """Which process it is, and what it was doing."""
        who = f"process {number} of {self._count} on {status.host} (pid {status.pid})"
        return who, f"at step {status.step}, {status.doing}"

    def _silence(self, number: int) -> float:
        """The seconds since a process reported."""
        return time.monotonic() - self._stamps[number][1]

    def _listen(self, now: float, *, first: bool = False) -> None:
        for process in range(self._count):
            with contextlib.suppress(OSError):
                written = self._file(process).stat().st_mtime_ns
                known = self._stamps.get(process)
                if known is None or known[0] != written:
                    self._stamps[process] = written, now
                    if not first:
                        self._heard.add(process)

    def _file(self, number: int) -> Path:
        return self._folder / f"{number}.json"

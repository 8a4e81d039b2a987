"""One run, one writer: the lock of a run directory is a file that its holder touches every few seconds.

A process that finds a lock waits until the file is touched (so it is held) or has not been touched for a minute (so it
is abandoned). A lock is taken at once if its holder was a process on this machine that has ended. Clocks of two hosts
are never compared.
"""

import contextlib
import datetime
import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from megajax.core.errors import RunError, UserError
from megajax.host import reading
from megajax.host.transcript import tell

NAME = "run.lock"
_MOST_BYTES = 4096  # size of the lock file
TOUCHED_EVERY, ABANDONED_AFTER = 5.0, 60.0  # seconds


@dataclass(frozen=True)
class Holder:
    """The holder of a lock, as recorded in its file."""

    host: str  # host name
    process: int  # process id
    since: str  # when it took the lock, by its host's clock
    machine: str  # identifies this boot of the machine and the container, within which process ids are comparable
    started: str  # start time of the process, as counted by the kernel, because process ids are reused

    @classmethod
    def me(cls) -> "Holder":
        """This process, now."""
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        return cls(socket.gethostname(), os.getpid(), now, _machine(), _started(os.getpid()))

    @classmethod
    def read(cls, file: Path) -> "Holder | None":
        """The process named in a lock file; None if it names none. Raises `OSError` if it cannot be read."""
        try:
            with reading.open_file(file) as opened:
                holder = cls(**reading.parse_json(opened.read(_MOST_BYTES).decode()))
        except (ValueError, TypeError):
            return None
        words = [holder.host, holder.since, holder.machine, holder.started]
        valid = type(holder.process) is int and 0 < holder.process < 2**31
        return holder if valid and all(isinstance(word, str) and word.isprintable() for word in words) else None

    @property
    def is_alive(self) -> bool | None:
        """Whether it is still running; None if it is on another machine."""
        if self.machine != _machine():
            return None
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return False
        except OSError:
            pass
        return _started(self.process) == self.started

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since}"


class RunLock:
    """The lock of an existing run directory; `take` it before writing anything there."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._file = run_dir, run_dir / NAME
        self._held: int | None = None  # an open file
        self._ended = threading.Event()

    def take(self) -> None:
        """Take the lock. If it may be abandoned, announce that and wait up to a minute."""
        seen, since, announced = None, 0.0, False
        while True:
            try:
                if (created := _create(self._file)) is not None:
                    return self._hold(created)
                try:
                    stamp, holder = self._file.stat().st_mtime_ns, Holder.read(self._file)
                except FileNotFoundError:  # it has just been released
                    continue
                who = holder or "an unknown process"
                if (holder, stamp) != seen:
                    is_fresh = abs(time.time_ns() - stamp) < 1e9 * 3 * TOUCHED_EVERY
                    if announced or (holder and holder.is_alive and is_fresh):
                        in_use = f"--run-dir {self._run_dir} is in use by {who}"
                        raise UserError(f"{in_use}; valid: wait until it ends, or another folder")
                    seen, since = (holder, stamp), time.monotonic()
                dead = holder is not None and holder.is_alive is False
                abandoned = dead or time.monotonic() - since > ABANDONED_AFTER
                if abandoned and (taken := self._take_over()) is not None:
                    return self._hold(taken)
            except OSError as error:
                valid = "a writable place with free space"
                raise UserError(f"--run-dir {self._run_dir}: {error.strerror}; valid: {valid}") from None
            if not announced and not dead:
                announced, after = True, f"taken over if not touched for {ABANDONED_AFTER:.0f} s"
                tell(f"{self._file} belongs to {who}: {after}")
            time.sleep(0.5)

    def check(self) -> None:
        """Check that the lock, if taken, is still held; raises `RunError` if it or the run directory is gone."""
        if self._held is not None and not self._is(self._held):
            raise RunError(f"{self._file} is gone or belongs to another process, so this process stops writing there")

    def release(self) -> None:
        """Remove the lock if it is held."""
        if self._held is None:
            return
        self._ended.set()
        with contextlib.suppress(OSError):
            if self._is(self._held):
                self._file.unlink()
        os.close(self._held)
        self._held = None

    def _take_over(self) -> int | None:
        """Replace the lock file; None if another process did the same later."""
        mine = self._file.with_name(f"{NAME}.{os.getpid()}-{time.monotonic_ns()}")
        created = _create(mine)
        if created is None:
            return None
        mine.replace(self._file)
        time.sleep(1.0)
        if self._is(created):
            return created
        os.close(created)
        return None

    def _hold(self, created: int) -> None:
        self._held = created
        threading.Thread(target=self._touch, daemon=True).start()

    def _touch(self) -> None:
        while not self._ended.wait(TOUCHED_EVERY):
            with contextlib.suppress(OSError, TypeError):  # released meanwhile
                os.utime(self._held)  # type: ignore[arg-type]

    def _is(self, created: int) -> bool:
        """Whether the lock file is this open file."""
        try:
            return os.path.samestat(os.fstat(created), self._file.stat())
        except OSError:
            return False


def _create(file: Path) -> int | None:
    """Create a lock file that names this process, and keep it open; None if the file exists."""
    try:
        created = os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
    except FileExistsError:
        return None
    with contextlib.suppress(OSError):  # the disk is full; the lock works without contents too
        os.write(created, json.dumps(asdict(Holder.me())).encode())
    return created


def _machine() -> str:
    parts = []
    for read in (Path("/proc/sys/kernel/random/boot_id").read_text, lambda: os.readlink("/proc/self/ns/pid")):
        with contextlib.suppress(OSError):
            parts.append(read().strip())
    return " ".join(parts) or socket.gethostname()


def _started(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""

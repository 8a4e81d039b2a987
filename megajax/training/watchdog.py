"""Who hangs? Every process writes what it does to a file of the run directory; when nothing moves any more, each ends
with a line that names the process and the step that the others wait for."""

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import jax

from megajax import reading
from megajax.ending import fail

FOLDER = "processes"
COMPUTING = "computing"
_WRITTEN_EVERY, _FROZEN_AFTER = 5.0, 30.0  # seconds
_SLOWEST = 10  # times the longest step so far is not yet too long


class Watchdog:
    """Watches a run of several processes; with one alone it does nothing. A process of which nothing is heard for 30 s
    while this one waits counts as lost.

    Args:
        run_dir: shared by all processes.
        patience: seconds without progress after which the process ends; at least ten of the longest step so far, and
            before the first step ten times as many. 0: never.
    """

    def __init__(self, run_dir: Path, patience: float) -> None:
        self._folder, self._patience = run_dir / FOLDER, patience
        self._step, self._doing, self._since, self._longest = 0, "starting", time.monotonic(), 0.0
        self._ended = threading.Event()
        self._count = jax.process_count()
        self._stamps: dict[int, tuple[int, float]] = {}  # of a process's file: when it was written, and seen to be
        self._heard: set[int] = set()  # processes whose file has changed since this start; it may be of an earlier one
        if self._count > 1 and patience:
            threading.Thread(target=self._watch, daemon=True).start()

    def at(self, step: int, doing: str) -> None:
        """Say what this process does now, and for which step."""
        now = time.monotonic()
        if self._step:
            self._longest = max(self._longest, now - self._since)
        self._step, self._doing, self._since = step, doing, now

    def close(self) -> None:
        """Watch no longer."""
        self._ended.set()

    def _watch(self) -> None:
        written = 0.0
        while not self._ended.wait(0.5):
            now = time.monotonic()
            self._listen(now)
            if now - written >= _WRITTEN_EVERY:
                self._write()
                written = now
            if now - self._since > self._allowed() or (now - self._since > _FROZEN_AFTER and self._silent()):
                self._write()
                fail(f"{self._guilty()}; the same command goes on from the newest checkpoint")

    def _allowed(self) -> float:
        return max(self._patience, _SLOWEST * self._longest) if self._longest else _SLOWEST * self._patience

    def _write(self) -> None:
        status = {"host": socket.gethostname(), "step": self._step, "doing": self._doing}
        status |= {"seconds": round(time.monotonic() - self._since, 1), "pid": os.getpid()}
        try:
            self._folder.mkdir(exist_ok=True)
            self._file(jax.process_index()).write_text(json.dumps(status) + "\n")
        except OSError:
            pass  # nobody needs it unless something hangs

    def _guilty(self) -> str:
        """Which process hangs: one that says nothing any more, else one that others do not wait for, else the last."""
        known = {number: status for number in sorted(self._heard) if (status := self._read(number))}
        silent = self._silent()
        busy = [number for number, status in known.items() if status["doing"] != COMPUTING]
        behind = [number for number in known if known[number]["step"] == min(s["step"] for s in known.values())]
        if not known:
            return f"no process of {self._count} says what it does, at step {self._step}"
        if silent:
            numbers = ", ".join(map(str, silent))
            return f"lost process {numbers} of {self._count}, which says nothing any more, at step {self._step}"
        number = next(iter(busy or behind))
        status = known[number]
        where = f"on {status['host']} (pid {status['pid']}) hangs at step {status['step']}, {status['doing']}"
        return f"process {number} of {self._count} {where}, for {status['seconds']:.0f} s"

    def _silent(self) -> list[int]:
        """Processes that were heard of, and for long no more."""
        now = time.monotonic()
        return [number for number in sorted(self._heard) if now - self._stamps[number][1] > _FROZEN_AFTER]

    def _listen(self, now: float) -> None:
        for number in range(self._count):
            with contextlib.suppress(OSError):
                written = self._file(number).stat().st_mtime_ns
                known = self._stamps.get(number)
                if known is None or known[0] != written:
                    self._stamps[number] = written, now
                    if known:
                        self._heard.add(number)

    def _read(self, number: int) -> dict[str, Any] | None:
        """What a process wrote."""
        try:
            return reading.parse_json(reading.read_bytes(self._file(number)).decode())
        except (OSError, ValueError):
            return None

    def _file(self, number: int) -> Path:
        return self._folder / f"{number}.json"

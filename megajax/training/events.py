"""The figures of a run as TensorBoard's events."""

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

_FLUSH_EVERY = 30.0  # seconds


class Events:
    """The file of one start of a run, written here and now: tensorboardX's own writer waits for ever where its thread
    could not write.

    All methods raise `OSError` where the file cannot be written.
    """

    def __init__(self, folder: Path, finished_steps: int):
        """Figures of later steps than `finished_steps`, of starts before, count no more."""
        folder.mkdir(exist_ok=True)
        suffix = f".from-{finished_steps}"  # else two writers in one second share a file name
        self._writer = EventsWriter(str(folder / "events"), suffix)
        self._flushed = time.monotonic()
        self._write(finished_steps + 1, session_log=SessionLog(status=SessionLog.START))

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Record figures by name after a step."""
        for name, figure in figures.items():
            self._write(step, summary=scalar(name, figure))
        if time.monotonic() - self._flushed > _FLUSH_EVERY:
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._writer.close()

    def drop(self) -> None:
        """Close without a word of what cannot be written."""
        with contextlib.suppress(OSError, ValueError):
            self._writer.close()

    def _write(self, step: int, **content: object) -> None:
        self._writer.write_event(Event(step=step, wall_time=time.time(), **content))

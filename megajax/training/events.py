"""The figures and texts of a run as TensorBoard events."""

import math
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar
from tensorboardX.summary import text as text_summary

from megajax.training.tracker import Tracker

_FLUSH_EVERY = 30.0  # seconds
_LEFT_OUT = ("tokens", "seconds", "data_seconds", "resumed_from")


class Events(Tracker):
    """The event file of one start of a run, written synchronously: the thread of tensorboardX's own writer waits for
    ever if it cannot write."""

    def __init__(self, folder: Path, finished_steps: int):
        """Figures after `finished_steps` that earlier starts have written are superseded.

        Raises:
            OSError: the file cannot be written.
        """
        self.name, self._finished_steps = str(folder), finished_steps
        folder.mkdir(exist_ok=True)
        suffix = f".from-{finished_steps}"  # else two writers in one second share a file name
        self._writer = EventsWriter(str(folder / "events"), suffix)
        self._flushed = time.monotonic()
        self._write(finished_steps + 1, session_log=SessionLog(status=SessionLog.START))

    def config(self, text: str, values: Mapping[str, object]) -> None:
        self.text(self._finished_steps, "config", text)

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        for name, figure in figures.items():
            if name not in _LEFT_OUT and math.isfinite(figure):
                tag = {"loss": "loss/training"}.get(name, name.replace("validation_loss", "loss/validation"))
                self._write(step, summary=scalar(tag, figure))
        if time.monotonic() - self._flushed > _FLUSH_EVERY:
            self._writer.flush()
            self._flushed = time.monotonic()

    def text(self, step: int, name: str, text: str) -> None:
        as_it_is = "\n".join(f"    {line}" for line in text.splitlines())  # TensorBoard reads Markdown
        self._write(step, summary=text_summary(name, as_it_is))

    def close(self, *, finished: bool) -> None:
        self._writer.close()

    def _write(self, step: int, **content: object) -> None:
        self._writer.write_event(Event(step=step, wall_time=time.time(), **content))

"""Where a run's figures are recorded: metrics.jsonl, TensorBoard events, and the interface shared with loss.png
(`plot.py`), experts.png (`experts_plot.py`), Weights & Biases and MLflow (`tracking.py`)."""

import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megajax.core.errors import RunError
from megajax.core.models.router import LOAD


@contextlib.contextmanager
def _hidden(package: str) -> Iterator[None]:
    """What is imported in this context does not find a package that was not imported before."""
    hidden = package not in sys.modules
    if hidden:
        sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules[package]


with _hidden("torch"):  # tensorboardX imports it for the names of types: up to 5 s
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.summary import scalar
    from tensorboardX.summary import text as text_summary

_FLUSH_EVERY = 30.0  # seconds
_LEFT_OUT = ("tokens", "seconds", "data_seconds", "resumed_from")


class Tracker:
    """Receives the configuration, figures and texts of a run; this base class ignores them.

    A method that cannot record raises `OSError`. That is reported once, and then the tracker is dropped unless it
    `tries_again`. Figures are named as in metrics.jsonl and may be infinite or NaN.
    """

    name = "a tracker"
    tries_again = False

    def config(self, text: str, values: Mapping[str, object]) -> None:
        """The configuration of this start: the text of its `config.toml`, and its values by key (`to_values`)."""

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """The figures after `step` steps."""

    def loads(self, step: int, load_LE: npt.NDArray[np.int32]) -> None:
        """How many tokens of a step chose each expert in each layer."""

    def text(self, step: int, name: str, text: str) -> None:
        """A text after `step` steps, named for example "sample" or "validation"."""

    def news(self) -> list[str]:
        """Lines to show the user, new since the last call."""
        return []

    def close(self, *, finished: bool) -> None:
        """The end of this start; `finished` if all steps of the run are done."""


class MetricsFile(Tracker):
    """A run's figures, one JSON line per record. The run ends if it cannot be written, because resuming reads it."""

    def __init__(self, run_dir: Path):
        self._path = run_dir / "metrics.jsonl"
        self.name = str(self._path)
        self._file = self._path.open("ab", buffering=0)

    def figures(self, step: int, figures: Mapping[str, Any]) -> None:
        """Write a line; raises `RunError` if that fails."""
        line = _line({"step": step, **figures}).encode()
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            problem = (error.strerror or str(error)).lower()
            raise RunError(f"{self._path} cannot be written: {problem}; rerun the command to resume") from None

    def loads(self, step: int, load_LE: npt.NDArray[np.int32]) -> None:
        self.figures(step, {LOAD: load_LE.tolist()})

    def close(self, *, finished: bool) -> None:
        self._file.close()


def _line(record: Mapping[str, Any]) -> str:
    """A record as a line of JSON, floats in full precision; infinities and NaN, which JSON lacks, become null."""
    plain = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }
    return json.dumps(plain, allow_nan=False) + "\n"


class Events(Tracker):
    """The event file of one start, written synchronously, because the thread of tensorboardX's own writer waits forever
    if it cannot write. Figures after `finished_steps` written by earlier starts are superseded."""

    def __init__(self, folder: Path, finished_steps: int):
        self.name, self._finished_steps = str(folder), finished_steps
        folder.mkdir(exist_ok=True)
        suffix = f".from-{finished_steps}"  # otherwise two writers within one second share a file name
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

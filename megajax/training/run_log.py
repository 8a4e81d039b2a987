"""The log of a run: metrics.jsonl, TensorBoard events, loss.png and printed lines."""

import json
import math
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsFloat

from rich.console import Console

from megajax.data.files import write_atomically
from megajax.errors import RunError, UserError
from megajax.paths import identity
from megajax.runs.metrics import DEV, is_of_dev, read_metrics
from megajax.training.events import Events
from megajax.training.plot import plot_loss
from megajax.training.progress import TrainingProgress


class RunLog:
    """The metrics of a run as they are written, and its progress as it is shown; a context manager.

    Steps are counts of finished steps, so the first one is 1. If an earlier attempt has logged steps after
    `finished_steps`, these are dropped.

    Args:
        run_dir: where metrics.jsonl, tensorboard/ and loss.png are.
        total_steps: of the run.
        finished_steps: from which the run goes on.
        log_every: steps between two printed lines where there is no bar.
        write: True on exactly one process; on the others nothing is written, printed or drawn.
        console: where to print; standard output if None.

    Raises:
        UserError: the run directory cannot be written.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        total_steps: int,
        finished_steps: int = 0,
        log_every: int = 10,
        write: bool = True,
        console: Console | None = None,
    ):
        self._run_dir, self._write = run_dir, write
        self._progress = TrainingProgress(total_steps, finished_steps, log_every, write, console)
        self._training: list[tuple[int, float]] = []
        self._validation: list[tuple[int, float]] = []
        self._of_dev: set[int] = set()  # steps that have a task's figures of dev
        self._drawn: tuple[int, int] | None = None  # how many of them loss.png shows
        if write:
            try:
                self._file = self._reopen(finished_steps)
                self._folder = identity(run_dir)
                self._events: Events | None = Events(run_dir / "tensorboard", finished_steps)
            except OSError as error:
                self._progress.close()
                raise UserError(f"--run-dir {run_dir}: {error.strerror}; valid: a folder that can be written") from None

    def _reopen(self, finished_steps: int) -> FileIO:
        path = self._run_dir / "metrics.jsonl"
        records = [record for record in read_metrics(self._run_dir) if record["step"] <= finished_steps]
        for record in records:
            self._remember(record)
        write_atomically(path, "".join(map(_line, records)))
        return path.open("ab", buffering=0)

    def record_step(
        self,
        step: int,
        *,
        loss: SupportsFloat,
        grad_norm: SupportsFloat,
        learning_rate: SupportsFloat,
        loss_scale: SupportsFloat,
        skipped_steps: int,
        tokens: int,
        seconds: float,
        data_seconds: float,
        parts: Mapping[str, SupportsFloat] | None = None,
    ) -> None:
        """Record a finished step.

        Args:
            step: its number, from 1.
            loss: nats per token.
            grad_norm: global norm of the gradients before clipping.
            learning_rate: of the step.
            loss_scale: of the step.
            parts: the parts of the loss by name, `loss/NAME`, where it has several, and what is watched besides.
            skipped_steps: of the run, so far.
            tokens: of the step, on all devices.
            seconds: that the step took.
            data_seconds: that the host waited for the step's batch; devices may compute the step before meanwhile.
        """
        if not self._write:
            return
        numbers = {"loss": float(loss), "grad_norm": float(grad_norm), "learning_rate": float(learning_rate)}
        numbers |= {name: float(value) for name, value in (parts or {}).items()}
        numbers |= {"loss_scale": float(loss_scale), "skipped_steps": int(skipped_steps)}
        speed = {"tokens": int(tokens), "seconds": float(seconds), "tokens_per_second": tokens / max(seconds, 1e-9)}
        self._record({"step": int(step), **numbers, **speed, "data_seconds": float(data_seconds)})
        self._progress.show_step(step, numbers["loss"], tokens, seconds)

    def record_validation(
        self,
        step: int,
        loss: SupportsFloat,
        named: Mapping[str, float] | None = None,
        parts: Mapping[str, float] | None = None,
    ) -> None:
        """Record the validation losses after `step` steps, in nats per token, and draw loss.png.

        Args:
            step: how many steps were taken.
            loss: of the validation split.
            named: those of named validation sets.
            parts: more figures of the validation split, by the names they are logged under.
        """
        if not self._write:
            return
        others = {f"validation_loss/{name}": float(value) for name, value in (named or {}).items()}
        self._record({"step": int(step), "validation_loss": float(loss), **(parts or {}), **others})
        self._progress.show_validation(step, float(loss), parts=parts or {})
        for name, value in (named or {}).items():
            self._progress.show_validation(step, value, name)
        self.plot()

    def record_dev(self, step: int, figures: Mapping[str, float]) -> None:
        """Record the figures of a task's dev records after `step` steps, as `dev/NAME`, if they are not yet."""
        if self._write and step not in self._of_dev:
            self._record({"step": int(step), **{f"{DEV}{name}": value for name, value in figures.items()}})

    def print(self, text: str) -> None:
        """Print a line; nothing is recorded."""
        self._progress.print(text)

    def plot(self) -> None:
        """Draw loss.png from everything recorded, unless the run directory was removed or replaced."""
        points = len(self._training), len(self._validation)
        if self._write and any(points) and points != self._drawn and identity(self._run_dir) == self._folder:
            self._drawn = points
            try:
                plot_loss(self._run_dir / "loss.png", self._run_dir.resolve().name, self._training, self._validation)
            except OSError as error:
                self._progress.print(f"{self._run_dir / 'loss.png'} could not be drawn: {error.strerror}")

    def close(self) -> None:
        """Write out everything, draw loss.png and stop the progress bar."""
        self._progress.close()
        if self._write:
            self._file.close()
            if self._events:
                try:
                    self._events.close()
                except OSError as error:
                    self._without_events(error)
            self.plot()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _remember(self, record: dict[str, Any]) -> None:
        if is_of_dev(record):
            self._of_dev.add(record["step"])
        for points, name in ((self._training, "loss"), (self._validation, "validation_loss")):
            if name in record:
                value = record[name]
                points.append((record["step"], math.nan if value is None else float(value)))

    def _record(self, record: dict[str, Any]) -> None:
        line = _line(record).encode()
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            file, problem = self._run_dir / "metrics.jsonl", (error.strerror or str(error)).lower()
            raise RunError(f"{file} cannot be written: {problem}; the same command goes on") from None
        self._remember(record)
        figures = {
            {"loss": "loss/training"}.get(name, name.replace("validation_loss", "loss/validation")): value
            for name, value in record.items()
            if name not in ("step", "tokens", "seconds", "data_seconds") and math.isfinite(value)
        }
        if self._events:
            try:
                self._events.add(record["step"], figures)
            except OSError as error:
                self._without_events(error)

    def _without_events(self, error: OSError) -> None:
        """Go on without TensorBoard's events: metrics.jsonl has the same figures."""
        problem = (error.strerror or str(error)).lower()
        self._progress.print(f"{self._run_dir / 'tensorboard'} cannot be written: {problem}; no more events are")
        if self._events:
            self._events.drop()
        self._events = None


def _line(record: dict[str, Any]) -> str:
    """A record as a line of JSON, floats in full. A number that is not finite becomes null, JSON having none."""
    plain = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }
    return json.dumps(plain, allow_nan=False) + "\n"

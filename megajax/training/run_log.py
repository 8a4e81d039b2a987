"""The log of a run: passes figures to trackers and shows progress on the screen."""

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Self

import numpy as np
import numpy.typing as npt
from rich.console import Console

from megajax.core.errors import UserError
from megajax.core.models.router import LOAD
from megajax.runs.checkpoint import Checkpoints
from megajax.runs.metrics import DEV, cut_metrics, is_of_dev
from megajax.settings.config import TRACKERS, Config, to_toml, to_values
from megajax.training.display import StepsDisplay
from megajax.training.experts_plot import ExpertsPlot
from megajax.training.figures import in_words
from megajax.training.plot import Curves, LossPlot
from megajax.training.trackers import Events, MetricsFile, Tracker
from megajax.training.tracking import LibraryTracker

_MOST_LOADS = 100  # approximate number of times that a run records its experts' loads


class RunLog:
    """Passes the figures of a run to its trackers and shows its progress; a context manager.

    Steps are counted from 1. Records of steps after `finished_steps`, which an earlier start logged, are dropped.
    Exactly one process has `write`; the others write and print nothing.
    """

    def __init__(
        self,
        run_dir: Path,
        total_steps: int,
        finished_steps: int = 0,
        log_every: int = 10,
        write: bool = True,
        console: Console | None = None,
        track: str = "none",
    ):
        self._run_dir, self._total, self._loads_every = run_dir, total_steps, max(1, total_steps // _MOST_LOADS)
        self._of_dev: set[int] = set()  # steps with a task's figures on its dev records
        self.recorded: set[str] = set()  # names of the figures of the last finished step, up to a /
        self._trackers: list[Tracker] = []
        self._resumed_from = finished_steps  # reset when the first step is recorded
        self._writing = contextlib.ExitStack()  # the display row of a checkpoint being written
        self._step_written: int | None = None
        self._written = finished_steps  # the newest step whose complete checkpoint was shown
        if write:
            chosen = [_tracker(track, run_dir)] if track != "none" and finished_steps < total_steps else []
            try:
                self._trackers = self._files(finished_steps) + chosen
            except OSError as error:
                raise UserError(
                    f"--run-dir {run_dir}: {error.strerror}; valid: a writable place with free space"
                ) from None
        self.display = StepsDisplay(total_steps, finished_steps, log_every, write, console)

    def _files(self, finished_steps: int) -> list[Tracker]:
        curves, loads = Curves(), []
        for record in cut_metrics(self._run_dir, finished_steps):
            curves.add(record)
            if LOAD in record:
                loads.append((record["step"], np.array(record[LOAD], np.int32)))
            if record["step"] == finished_steps:
                self.recorded.update(name.partition("/")[0] for name in record)
            if is_of_dev(record):
                self._of_dev.add(record["step"])
        return [
            MetricsFile(self._run_dir),
            Events(self._run_dir / "tensorboard", finished_steps),
            LossPlot(self._run_dir, curves),
            ExpertsPlot(self._run_dir, loads),
        ]

    def record_config(self, config: Config) -> None:
        """Record the configuration of this start."""
        text, values = to_toml(config), to_values(config)
        self._notify(lambda tracker: tracker.config(text, values))

    def record_step(self, step: int, figures: Mapping[str, float], load_LE: npt.ArrayLike | None = None) -> None:
        """Record a finished step (counted from 1) with its figures, named as in metrics.jsonl; at intervals also record
        how many of its tokens chose each expert of each layer."""
        if self._resumed_from:
            figures, self._resumed_from = {**figures, "resumed_from": self._resumed_from}, 0
        self._record(step, figures)
        self.display.show_step(step, figures)
        if load_LE is not None and (step % self._loads_every == 0 or step == self._total):
            load_LE = np.asarray(load_LE)
            self._notify(lambda tracker: tracker.loads(step, load_LE))

    def record_validation(
        self,
        step: int,
        loss: float,
        named: Mapping[str, float] = MappingProxyType({}),
        details: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Record losses after `step` steps, in nats per token: for the validation split, with `details` named as in
        metrics.jsonl, and for named sets. loss.png is redrawn."""
        others = {f"validation_loss/{name}": value for name, value in named.items()}
        self._record(step, {"validation_loss": loss, **details, **others})
        self.display.show_validation(step, loss, details=details)
        for name, value in named.items():
            self.display.show_validation(step, value, name)

    def record_dev(self, step: int, figures: Mapping[str, float]) -> None:
        """Record a task's figures on its dev records after `step` steps, as `dev/NAME`, unless already recorded."""
        if step not in self._of_dev:
            self._of_dev.add(step)
            self._record(step, {f"{DEV}{name}": value for name, value in figures.items()})

    def record_task(self, step: int, name: str, figures: Mapping[str, float]) -> None:
        """Record and show the figures of an `--evaluate` task after `step` steps, as `TASK/FIGURE`."""
        self._record(step, {f"{name}/{figure}": value for figure, value in figures.items()})
        words = (in_words(each, value, percent=f"{name}/" == DEV) for each, value in figures.items())
        self.display.print_step(step, "  ".join([name, *words]))

    def record_text(self, step: int, name: str, text: str) -> None:
        """Record a text after `step` steps, such as "sample"."""
        self._notify(lambda tracker: tracker.text(step, name, text))

    def show_checkpoints(self, checkpoints: Checkpoints) -> None:
        """Show checkpoint messages, the step whose checkpoint is being written, and the newest complete one."""
        for problem in checkpoints.news():
            self.display.print(problem)
        if (writing := checkpoints.writing) != self._step_written:
            self._writing.close()
            self._step_written = writing
            if writing is not None:
                self._writing.enter_context(self.display.phase(f"checkpoint of step {writing}", announced=False))
        if (complete := checkpoints.saved or 0) > self._written:
            self._written = complete
            self.display.print_step(complete, f"checkpoint in {checkpoints.folder / str(complete)}")

    def end_steps(self) -> None:
        """Stop the progress bar."""
        self._writing.close()
        self.display.close_steps()

    def close(self, *, finished: bool = False) -> None:
        """Close all trackers and the progress bar, and draw loss.png; `finished` if all steps are done."""
        self.end_steps()
        self._notify(lambda tracker: tracker.close(finished=finished))
        self._trackers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(finished=kind is None)

    def _record(self, step: int, figures: Mapping[str, float]) -> None:
        self._notify(lambda tracker: tracker.figures(step, figures))

    def _notify(self, notify: Callable[[Tracker], None]) -> None:
        """Call every tracker. One that raises `OSError` does not stop the run; metrics.jsonl never raises it. One that
        raises something else is not called again."""
        for tracker in list(self._trackers):
            try:
                notify(tracker)
            except OSError as error:
                problem = error.strerror.lower() if error.strerror else str(error)
                then = "recording will be retried" if tracker.tries_again else "recording there has stopped"
                self.display.print(f"{tracker.name} cannot be written: {problem}; {then}")
                if not tracker.tries_again:
                    self._trackers.remove(tracker)
                    with contextlib.suppress(OSError, ValueError):
                        tracker.close(finished=False)
            except Exception as error:
                self._trackers.remove(tracker)
                error.add_note(f"raised by {tracker.name}")
                raise
            for line in tracker.news():
                self.display.print(line)


def _tracker(name: str, run_dir: Path) -> Tracker:
    made = (TRACKERS[name] or partial(LibraryTracker, name))(run_dir)
    if not isinstance(made, Tracker):
        raise UserError(f"--track {name}: a {type(made).__name__}; valid: a function that returns a megajax.Tracker")
    return made

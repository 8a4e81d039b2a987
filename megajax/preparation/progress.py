"""The progress of a preparation on standard error: a bar on a terminal, plain lines elsewhere."""

import contextlib
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_EVERY = 10.0  # seconds between two plain lines


class Show:
    """Shows the stages of a preparation as a bar or as lines."""

    def __init__(self, shown: bool = True) -> None:
        self._shown = shown
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._name, self._total, self._last_line = "", 0.0, 0.0
        if shown and self._console.is_terminal and not self._console.is_dumb_terminal:
            name = TextColumn("{task.description}", markup=False)
            columns = (name, BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=self._console, transient=True)
            self._task = self._bar.add_task("", total=None)
            self._bar.start()

    def begin(self, name: str, total: float = 0) -> None:
        """Begin a stage of `total` units of work; 0: unknown."""
        self._name, self._total, self._last_line = name, total, time.monotonic()
        if self._bar:
            self._bar.reset(self._task, description=name, total=total or None)
        elif self._shown:
            print(name, file=sys.stderr, flush=True)

    def advance(self, amount: float) -> None:
        """Show that `amount` units of the stage's work are done."""
        if self._bar:
            self._bar.update(self._task, completed=amount)
        elif self._shown and time.monotonic() - self._last_line > _EVERY:
            self._last_line = time.monotonic()
            print(f"{self._name}: {amount / self._total:.0%}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar:
            self._bar.stop()


@contextlib.contextmanager
def measuring(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Add the time of the `with` block to that of a stage, in `seconds`."""
    began = time.perf_counter()
    yield
    seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - began

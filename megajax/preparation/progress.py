"""What a person watching a preparation sees: a bar on a terminal, plain lines anywhere else; on standard error."""

import contextlib
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_EVERY = 10.0  # seconds between two plain lines


class Show:
    """Tells how far a preparation is. Prints nothing if `shown` is false."""

    def __init__(self, shown: bool = True) -> None:
        self._shown = shown
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._name, self._total, self._told = "", 0.0, 0.0
        if shown and self._console.is_terminal and not self._console.is_dumb_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=self._console, transient=True)
            self._task = self._bar.add_task("", total=None)
            self._bar.start()

    def stage(self, name: str, total: float = 0) -> None:
        """A stage begins; it ends at `total` of anything, 0 if nobody knows."""
        self._name, self._total, self._told = name, total, time.monotonic()
        if self._bar:
            self._bar.reset(self._task, description=name, total=total or None)
        elif self._shown:
            print(name, file=sys.stderr, flush=True)

    def done(self, amount: float) -> None:
        """So much of the stage is done."""
        if self._bar:
            self._bar.update(self._task, completed=amount)
        elif self._shown and time.monotonic() - self._told > _EVERY:
            self._told = time.monotonic()
            print(f"{self._name}: {amount / self._total:.0%}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Give the terminal back."""
        if self._bar:
            self._bar.stop()


class Clock:
    """Attributes: seconds: of each stage so far."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def measuring(self, stage: str) -> Iterator[None]:
        """Measure what happens in the block."""
        began = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - began

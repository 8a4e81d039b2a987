"""The progress of a preparation on standard error: a bar on a terminal, otherwise lines."""

import contextlib
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_EVERY = 10.0  # seconds between two plain lines

# The stages in order, with their usual shares of the time (docs/benchmarks/data.md).
STAGES = {"reading": 0.02, "cleaning": 0.41, "tokenizer": 0.03, "analysis": 0.43, "duplicates": 0.07, "writing": 0.04}


class Show:
    """Shows the stages of a preparation, their rates, and the total time left."""

    def __init__(self, shown: bool = True) -> None:
        self._shown = shown
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._stage, self._name, self._total, self._bytes = "", "", 0, 0
        self._began = self._stage_began = self._last_line = time.monotonic()
        if shown and self._console.is_terminal and not self._console.is_dumb_terminal:
            name = TextColumn("{task.description}", markup=False)
            columns = (name, BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=self._console, transient=True)
            self._task = self._bar.add_task("", total=1.0)
            self._bar.start()

    def begin(self, stage: str, name: str, total: int = 0, num_bytes: int = 0) -> None:
        """Begin a part of a stage, which has `total` pieces and `num_bytes` bytes of input."""
        self._stage, self._name, self._total, self._bytes = stage, name, total, num_bytes
        self._stage_began = self._last_line = time.monotonic()
        if self._bar:
            self._bar.update(self._task, description=name)
        elif self._shown:
            print(name, file=sys.stderr, flush=True)

    def advance(self, done: int) -> None:
        """Show that `done` pieces are done."""
        now = time.monotonic()
        share = done / max(1, self._total)
        before = list(STAGES).index(self._stage)
        of_all = sum(list(STAGES.values())[:before]) + STAGES[self._stage] * share
        rate = f", {self._bytes * share / 1e6 / max(now - self._stage_began, 1e-3):.1f} MB/s" if self._bytes else ""
        if self._bar:
            self._bar.update(self._task, description=f"{self._name}{rate}", completed=of_all)
        elif self._shown and now - self._last_line > _EVERY:
            self._last_line = now
            left = (now - self._began) * (1 / max(of_all, 1e-3) - 1)
            line = f"{self._name}: {share:.0%}{rate}; {of_all:.0%} of all, about {_duration(left)} left"
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar:
            self._bar.stop()


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{max(minutes, 1)} min"


@contextlib.contextmanager
def measuring(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Add the time of the `with` block to a stage's entry in `seconds`."""
    began = time.perf_counter()
    yield
    seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - began

"""How a preparation runs: worker processes, and its progress on standard error, a bar on a terminal, else lines."""

import collections
import contextlib
import itertools
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from megajax.errors import RunError
from megajax.host.signals import Stopped, held_back

_EVERY = 10.0  # seconds between two plain lines
Map = Callable[[Callable[..., Any], Iterable[tuple[Any, ...]]], Iterator[Any]]
"""`function(*piece)` for each piece, in order, as `itertools.starmap`."""


@contextlib.contextmanager
def worker_map(count: int) -> Iterator[Map]:
    """A `Map` on worker processes in a `with` block; of one worker on this process. It reads few pieces ahead, and
    raises `RunError` if a worker was ended, for example because memory ran out."""
    if count == 1:
        yield itertools.starmap
        return
    sys.warnoptions.append("ignore:resource_tracker")  # what a stop leaves is removed by a process that would say so
    # A forked child would inherit threads' locks.
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _begin)

    def run(function: Callable[..., Any], pieces: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        running: collections.deque[Future[Any]] = collections.deque()
        try:
            for piece in pieces:
                with held_back():  # a terminal, or SLURM, sends signals to all; the parent ends its workers
                    running.append(pool.submit(function, *piece))
                if len(running) > 2 * count:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        except BrokenProcessPool:
            raise RunError("a worker process died (out of memory?); rerun the command to resume") from None

    stopped = False
    try:
        yield run
    except Stopped:
        stopped = True  # workers end with this process
        raise
    finally:
        pool.shutdown(wait=not stopped, cancel_futures=True)


def _begin() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def num_cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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

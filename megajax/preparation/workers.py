"""Worker processes."""

import collections
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any

from megajax.errors import RunError


class Workers:
    """The worker processes of a `with` block; if there is one worker, it is this process."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Workers":
        if self.count > 1:
            context = multiprocessing.get_context("spawn")  # a forked child would inherit threads' locks
            self._pool = ProcessPoolExecutor(self.count, context, _begin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def map(self, function: Callable[..., Any], pieces: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """`function(*piece)` for each piece, in order; few pieces are read ahead.

        Raises:
            RunError: a worker was ended, for example because memory ran out.
        """
        if self._pool is None:
            yield from (function(*piece) for piece in pieces)
            return
        running: collections.deque[Future[Any]] = collections.deque()
        try:
            for piece in pieces:
                running.append(self._pool.submit(function, *piece))
                if len(running) > 2 * self.count:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        except BrokenProcessPool:
            raise RunError("a worker process ended by itself (out of memory?); the same command goes on") from None


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent ends its workers
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

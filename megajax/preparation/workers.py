"""Worker processes."""

import collections
import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import Any

from megajax.errors import RunError

Map = Callable[[Callable[..., Any], Iterable[tuple[Any, ...]]], Iterator[Any]]
"""`function(*piece)` for each piece, in order, as `itertools.starmap`."""


@contextlib.contextmanager
def worker_map(count: int) -> Iterator[Map]:
    """Worker processes in a `with` block, which a `Map` runs on; if it is one worker, it is this process.

    The map reads few pieces ahead, and raises `RunError` if a worker was ended, for example because memory ran out.
    """
    if count == 1:
        yield itertools.starmap
        return
    # A forked child would inherit threads' locks.
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _begin)

    def run(function: Callable[..., Any], pieces: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        running: collections.deque[Future[Any]] = collections.deque()
        try:
            for piece in pieces:
                running.append(pool.submit(function, *piece))
                if len(running) > 2 * count:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        except BrokenProcessPool:
            raise RunError("a worker process ended by itself (out of memory?); the same command goes on") from None

    try:
        yield run
    finally:
        pool.shutdown(cancel_futures=True)


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

"""Child processes on this machine, which end with this one."""

import contextlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.connection import wait
from typing import Any

from megajax.host.signals import Stopped, held_back

Submit = Callable[..., Future[Any]]
"""Calls a function with arguments in a child. The future raises `BrokenProcessPool` if a child has died."""


@contextlib.contextmanager
def children(count: int) -> Iterator[Submit]:
    """Children for a `with` block, which start with the first call."""
    sys.warnoptions.append("ignore:resource_tracker")  # after a stop it would warn about what it removes
    # A forked child would inherit locks that other threads hold.
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _begin)

    def submit(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        with held_back():  # a terminal or SLURM signals all processes, but the parent ends its children
            return pool.submit(function, *arguments)

    stopped = False
    try:
        yield submit
    except Stopped:
        stopped = True  # the children end with this process
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

"""`Workers` run a preparation's functions: here in processes on this machine, in `cluster.py` on a cluster.

The functions are the same. Their arguments and results are small, because everything large is in the work folder.
"""

import abc
import collections
import contextlib
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from megajax.core.errors import RunError
from megajax.host.children import Submit, children

Done = tuple[Any, str, float]  # a function's result, the worker that ran it, and how many seconds it took


class Workers(abc.ABC):
    """Runs the functions of the stages."""

    shared = False  # whether the workers are on several machines

    def __init__(self) -> None:
        self.did: dict[str, dict[str, list[float]]] = {}  # for each stage, the pieces and seconds of each worker

    def run(self, stage: str, function: Callable[..., Any], pieces: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """Yield `function(*piece)` for each piece, in order. Reads only a few pieces ahead. Raises `RunError` if a
        worker died and the work cannot go on without it."""
        workers = self.did.setdefault(stage, {})
        for result, who, seconds in self._map(function, pieces):
            done = workers.setdefault(who, [0, 0.0])
            done[0], done[1] = done[0] + 1, done[1] + seconds
            yield result

    @abc.abstractmethod
    def _map(self, function: Callable[..., Any], pieces: Iterable[tuple[Any, ...]]) -> Iterator[Done]:
        """Yield `perform(function, piece)` for each piece, in order."""


def perform(function: Callable[..., Any], piece: tuple[Any, ...]) -> Done:
    """Process a piece in a worker. It may run twice: results are written atomically and are always the same."""
    began = time.perf_counter()
    result = function(*piece)
    return result, f"{socket.gethostname()}:{os.getpid()}", time.perf_counter() - began


class _ThisProcess(Workers):
    def _map(self, function: Callable[..., Any], pieces: Iterable[tuple[Any, ...]]) -> Iterator[Done]:
        return itertools.starmap(perform, ((function, piece) for piece in pieces))


class _Processes(Workers):
    def __init__(self, submit: Submit, count: int) -> None:
        super().__init__()
        self._submit, self._count = submit, count

    def _map(self, function: Callable[..., Any], pieces: Iterable[tuple[Any, ...]]) -> Iterator[Done]:
        running: collections.deque[Future[Done]] = collections.deque()
        try:
            for piece in pieces:
                running.append(self._submit(perform, function, piece))
                if len(running) > 2 * self._count:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        except BrokenProcessPool:
            raise RunError("a worker process died (out of memory?); rerun the command to resume") from None


@contextlib.contextmanager
def processes(count: int) -> Iterator[Workers]:
    """Worker processes, for a `with` block. A single worker is this process itself."""
    if count == 1:
        yield _ThisProcess()
        return
    with children(count) as submit:
        yield _Processes(submit, count)

"""`Workers` on a Dask cluster, whose machines share a file system and have the same environment.

A task calls `perform` with one of the preparation's functions. Its result is small, and it may run twice, so nothing
depends on what the cluster remembers: if the scheduler is lost, the unfinished tasks are submitted to the next one.
"""

import collections
import contextlib
import functools
import importlib.metadata
import importlib.util
import logging
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, wait
from pathlib import Path
from typing import Any

from megajax.core.errors import RunError, UserError
from megajax.host import reading
from megajax.host.remote import reason
from megajax.host.signals import held_back
from megajax.host.streams import warn
from megajax.preparation.outputs import read_json
from megajax.preparation.workers import Done, Workers, perform

_PATIENCE = 300.0  # seconds to wait for a lost scheduler
_CONNECT, _CONNECT_LOCALLY = 10.0, 120.0  # seconds for one attempt; on a busy machine
_CLOSE = 60.0  # seconds to wait until a local cluster has ended
_GRACE = 2.0  # seconds more until a scheduler counts as silent
_WAIT = 5.0  # seconds between two counts of the workers
_AHEAD = 4  # submitted tasks per thread of the cluster
# By default Dask samples every thread 100 times per second and checks every event loop 50 times.
_QUIET = {"distributed.worker.profile.enabled": False, "distributed.admin.tick.interval": "500ms"}
_SAME = ("megajax", "numpy", "ftfy", "tokenizers", "rensa", "sentencex", "pyarrow")  # packages that the bytes depend on
_LOCAL = re.compile(r"local:([1-9]\d{0,3})")
_VALID = "valid: a scheduler's address such as tcp://HOST:8786, a scheduler file, or local:N"


@contextlib.contextmanager
def connected(cluster: str) -> Iterator[Workers]:
    """A cluster's workers, for a `with` block. `cluster` is an address, a scheduler file or `local:N`."""
    if importlib.util.find_spec("distributed") is None:
        problem = "the package distributed is missing"
        raise UserError(f"--cluster {cluster}: {problem}; valid: pip install 'megajax[cluster]'")
    import distributed  # noqa: F401  # sets the levels itself

    for name in ("distributed", "distributed.client", "tornado.application", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # errors are reported here, in one line
    with contextlib.ExitStack() as stack:
        patience = _CONNECT
        if cluster.startswith("local:"):
            local = _LOCAL.fullmatch(cluster)
            if not local:
                raise UserError(f"--cluster {cluster}; valid: local:1 to local:9999, the number of workers")
            cluster, patience = stack.enter_context(_local(int(local[1]))), _CONNECT_LOCALLY
        workers = _Dask(cluster, patience)
        stack.callback(workers.close)
        yield workers


@contextlib.contextmanager
def _local(count: int) -> Iterator[str]:
    """Start a cluster of processes that only this machine can reach; returns its address."""
    import dask
    from distributed import LocalCluster

    patient = {f"distributed.comm.timeouts.{name}": _CONNECT_LOCALLY for name in ("connect", "tcp")}
    with (
        dask.config.set(patient | _QUIET),
        held_back(),
    ):  # a terminal signals all processes, but the parent ends its workers
        cluster = LocalCluster(
            n_workers=count,
            threads_per_worker=1,
            memory_limit=0,
            host="127.0.0.1",
            dashboard_address=None,
            silence_logs=logging.CRITICAL,
        )
    try:
        yield cluster.scheduler_address
    finally:
        with contextlib.suppress(Exception):  # what remains ends with this process
            cluster.close(timeout=_CLOSE)


class _Dask(Workers):
    shared = True

    def __init__(self, cluster: str, patience: float) -> None:
        super().__init__()
        self._cluster, self._patience = cluster, patience
        self._threads, self._counted = 1, 0.0
        try:
            self._client = self._connect()
        except Exception as error:  # of many kinds
            problem = f"no scheduler answers: {reason(error)}"
            raise UserError(f"--cluster {cluster}: {problem}; {_VALID}") from None

    def close(self) -> None:
        """Leave the cluster."""
        with contextlib.suppress(Exception):
            self._client.close(timeout=1)

    def _connect(self) -> Any:
        from distributed import Client

        address = _address(self._cluster)
        client = Future[Any]()

        def connect() -> None:
            try:
                client.set_result(Client(address, timeout=self._patience, set_as_default=False))
            except Exception as error:
                client.set_exception(error)

        with held_back():
            threading.Thread(target=connect, daemon=True).start()
        if not wait([client], self._patience + _GRACE).done:  # Dask does not limit the time until the first answer
            raise OSError(f"nothing in {self._patience + _GRACE:.0f} s")
        return client.result()

    def _map(self, function: Callable[..., Any], pieces: Iterable[tuple[Any, ...]]) -> Iterator[Done]:
        running = collections.deque[list[Any]]()  # [piece, its future]
        for piece in pieces:
            running.append([piece, None])
            self._submit(function, running)
            if len(running) > _AHEAD * self._num_threads():
                yield self._next(function, running)
        while running:
            yield self._next(function, running)

    def _submit(self, function: Callable[..., Any], running: Iterable[list[Any]]) -> None:
        """Submit the pieces that have no future."""
        for entry in running:
            while entry[1] is None:
                try:
                    entry[1] = self._client.submit(_perform, _environment(), function, entry[0], pure=False)
                except (OSError, RuntimeError):
                    self._reconnect()

    def _next(self, function: Callable[..., Any], running: "collections.deque[list[Any]]") -> Done:
        """The result of the first running piece."""
        from distributed import KilledWorker

        while True:
            try:
                done: Done = running[0][1].result(timeout=_WAIT)
                running.popleft()
                return done
            except TimeoutError:
                if running[0][1].status == "error":  # the task's own
                    raise
                self._num_threads()
            except KilledWorker:
                problem = "several workers ended while they did the same task (out of memory?)"
                raise RunError(f"{problem}; rerun the command to resume") from None
            except (ImportError, AttributeError, RuntimeError) as error:
                cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
                if not isinstance(cause, ImportError) and not str(cause).startswith("Can't get attribute"):
                    raise
                problem = f"its scheduler or a worker has other packages ({reason(cause)})"
                valid = "valid: the same environment on all machines"
                raise UserError(f"--cluster {self._cluster}: {problem}; {valid}") from None
            except (CancelledError, OSError):
                if running[0][1].status == "error":  # the task's own; else the connection ended under its result
                    raise
                self._reconnect()
                for entry in running:
                    entry[1] = None
                self._submit(function, running)

    def _num_threads(self) -> int:
        """The number of all workers' threads, counted every `_WAIT` seconds."""
        if time.monotonic() - self._counted > _WAIT:
            with contextlib.suppress(Exception):  # if the scheduler is gone, the next result reports it
                threads = sum(self._client.nthreads().values())
                if not threads and self._threads:
                    warn(f"waiting for workers of {self._cluster}")
                self._threads = threads
            self._counted = time.monotonic()
        return max(1, self._threads)

    def _reconnect(self) -> None:
        warn(f"the scheduler of {self._cluster} is lost; waiting for it")
        self.close()
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                self._client = self._connect()
                return
            except Exception as error:
                if time.monotonic() > until:
                    raise RunError(
                        f"--cluster {self._cluster}: the scheduler is lost ({reason(error)}); rerun the command "
                        "to resume"
                    ) from None
                time.sleep(1)


def _address(cluster: str) -> str:
    """The address of a scheduler, which may be in a file that it has written."""
    if not reading.is_file(cluster):
        return cluster
    found = read_json(Path(cluster))
    address = found.get("address") if isinstance(found, dict) else None
    if not isinstance(address, str):
        raise ValueError("this file holds no address of one")
    return address


def _perform(environment: tuple[str, ...], function: Callable[..., Any], piece: tuple[Any, ...]) -> Done:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    if different := [pair for pair in zip(_environment(), environment, strict=True) if pair[0] != pair[1]]:
        here, there = different[0]
        problem = f"a worker on {platform.node()} has {here}, but the command was started with {there}"
        raise UserError(f"--cluster: {problem}; valid: the same environment on all machines")
    return perform(function, piece)


@functools.cache
def _environment() -> tuple[str, ...]:
    """What the bytes of a dataset depend on besides input and options."""
    python = ".".join(platform.python_version_tuple()[:2])
    return f"Python {python}", *(f"{name} {importlib.metadata.version(name)}" for name in _SAME)

"""How the processes of a run find each other at the start, and leave together at the end."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial

from megajax.core.errors import UserError
from megajax.core.private import backends_are_initialized
from megajax.host.ending import Exit, fail
from megajax.host.relay import Relay
from megajax.host.signals import stop_signals
from megajax.settings.config import Config

_LAST = 1.0  # seconds that process 0 stays after finishing
LOST_AFTER = 10.0  # seconds after which a process that has lost process 0 ends, unless it already has
START_PATIENCE, SAID_AFTER = 300.0, 5.0  # seconds that processes wait for each other; when they announce that they do
HEARTBEAT_TIMEOUT = 60  # seconds of silence after which a process counts as lost

_silenced: list[int] = []  # the real standard error, while it is discarded


def find_others(config: Config) -> None:
    """Find the other processes, unless an earlier start has."""
    import jax

    cluster = config.distributed
    if jax.distributed.is_initialized():
        if cluster.coordinator and cluster.num_processes != jax.process_count():
            problem = f"this process is already one of {jax.process_count()}"
            raise UserError(f"--distributed.num-processes {cluster.num_processes}: {problem}; valid: that number")
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX would take SIGTERM from us, and abort if a process is lost; `training/watchdog.py` ends with a clear message.
    for name, value in (("jax_enable_preemption_service", False), ("jax_enable_recoverability", True)):
        with contextlib.suppress(AttributeError):
            jax.config.update(name, value)
    where = f"--distributed.coordinator {cluster.coordinator}" if cluster.coordinator else "the cluster's environment"
    if backends_are_initialized():
        problem = "JAX was used before in this process"
        raise UserError(f"{where}: {problem}; valid: several processes from the first use of JAX on")
    valid = "valid: an address that all processes can reach, and exactly the announced number of processes"
    late = f"{where}: the processes did not find each other within {START_PATIENCE:.0f} s; {valid}"
    waiting = f"{where}: waiting for the other processes, at most {START_PATIENCE:.0f} s"
    # JAX's own timeout would abort the process.
    timers = threading.Timer(START_PATIENCE, _end, [late]), threading.Timer(SAID_AFTER, _say, [waiting])
    for timer in timers:
        timer.daemon = True
        timer.start()
    initialize = partial(
        jax.distributed.initialize,
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
        initialization_timeout=int(START_PATIENCE) + HEARTBEAT_TIMEOUT,
    )
    try:
        with _silence():  # discards warnings about these settings; other output is in the exceptions too
            if cluster.coordinator:
                address = _relayed(cluster.coordinator) if cluster.process_id else cluster.coordinator
                initialize(address, cluster.num_processes, cluster.process_id)
            else:
                initialize()
        stop_signals.take()
        Exit.together = _leave
    except (RuntimeError, ValueError) as error:
        found = str(error).splitlines()[0]
        raise UserError(f"{where}: the processes did not find each other: {found}; {valid}") from error
    finally:
        for timer in timers:
            timer.cancel()


def _relayed(coordinator: str) -> str:
    """An address that reaches process 0 but keeps JAX from aborting this process when process 0 is gone."""
    host, _, port = coordinator.rpartition(":")

    def lost() -> None:
        # Code that waits for a collective notices too, and can name the step.
        time.sleep(LOST_AFTER)
        _end("lost process 0, which was killed or ended first; rerun the command to resume from the newest checkpoint")

    return Relay(host.strip("[]"), int(port), lost).address


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Discard standard error, including output from C++."""
    sys.stderr.flush()
    stderr, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    _silenced.append(stderr)
    try:
        yield
    finally:
        _silenced.remove(stderr)
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nothing)


def _say(text: str) -> None:
    """Print a line even while standard error is discarded."""
    for stderr in _silenced:
        with contextlib.suppress(OSError):
            os.write(stderr, f"{text}\n".encode())


def _end(text: str) -> None:
    """End the process with a message, from any thread and even while standard error is discarded."""
    for stderr in _silenced:
        os.dup2(stderr, 2)
    fail(text)


def _leave(succeeded: bool) -> None:
    """Leave before process 0 does: without it JAX would abort the others."""
    from megajax.host.processes import is_first_process, wait_for_all

    if succeeded:
        wait_for_all("the end")
    if not is_first_process():
        sys.stdout.flush()
        sys.stderr.flush()
        if succeeded:
            os._exit(0)
    else:
        time.sleep(_LAST)

"""Calls whose memory and time are limited, for programs in a user's files: chat templates, a tokenizer's rules.

They run in a child process, which is started for the first call and serves all later ones. A call that exceeds a limit
ends the child, and the next call starts another. The child also ends with its parent, and after a minute without calls.
"""

import atexit
import contextlib
import errno
import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megajax.core.errors import UserError
from megajax.host.signals import held_back

SECONDS = 20  # of CPU time for a call
MEMORY = 1 << 28  # bytes for a call
_MEMORY_PER_BYTE = 64  # more for each byte of its arguments
_PATIENCE = 600.0  # seconds on the clock for a call and the start of the child
_IDLE = 60.0  # seconds that the child waits for a call
_ENDING = 10.0  # seconds that a child may need to end

_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from megajax.host.limited import serve; serve()"
_TOO_LONG = signal.SIGPROF  # ends the child, by its timer or by the parent
_TOO_LARGE = (errno.ENOMEM, -signal.SIGABRT, -signal.SIGKILL)  # exit codes: from Python, Rust, the kernel
_PAGES = Path("/proc/self/statm")


class ExceededError(UserError):
    """A call needs more than its limits allow, or ends its process in another way."""


def call(function: str, *arguments: Any, what: str) -> Any:
    """The result of a function, named as `module:function`, for these arguments; all are values that JSON has.

    Raises:
        UserError: the function raised it.
        ExceededError: it exceeded a limit; `what` is the subject of the message.
    """
    request = json.dumps([function, arguments]).encode()
    limits = SECONDS, MEMORY + _MEMORY_PER_BYTE * len(request)
    reply, code = _asked(json.dumps(limits).encode(), request)
    if reply is None:
        raise ExceededError(f"{what} {_reason(code, *limits)}; valid: one that does not")
    kind, value = json.loads(reply)
    if kind == "refused":
        raise UserError(value)
    if kind == "failed":
        raise RuntimeError(value)
    return value


def _asked(*request: bytes) -> tuple[bytes | None, int]:
    """The child's reply to a request; or None, and the exit code of the child that it has ended."""
    global _child
    code = 0
    with _lock:
        for _ in range(2):  # a child that ended with 0 had waited too long
            _child = _child or _Child()
            try:
                if reply := _child.ask(request):
                    return reply, 0
                code = _end(_ENDING)
            except BaseException:  # otherwise its reply would be taken for the next one
                _end()
                raise
            if code:
                break
    return None, code


def _reason(code: int, seconds: int, memory: int) -> str:
    if code == -_TOO_LONG:
        return f"takes more than {seconds} seconds"
    if code in _TOO_LARGE:
        return f"takes more than {memory >> 20} MiB of memory"
    return f"ends its process ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})"


class _Child:
    """The child, and our end of the channel to it."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(_PATIENCE)
        command = [sys.executable, "-c", _PROGRAM, *sys.path]
        with theirs, held_back():  # signals of a terminal or of SLURM go to all processes
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL)

    def ask(self, request: tuple[bytes, ...]) -> bytes | None:
        """The reply to a request; None if the child ends without one."""
        try:
            for part in request:
                _send(self._channel, part)
            return _receive(self._channel)
        except TimeoutError:
            self._process.send_signal(_TOO_LONG)
        except (OSError, EOFError):
            pass
        return None

    def end(self, patience: float) -> int:
        """Wait for its end, then enforce it; returns its exit code."""
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(patience)
        self._process.kill()
        return self._process.wait()

    def leave(self) -> None:
        """Forget it: it belongs to another process."""
        self._channel.close()
        self._process.returncode = 0


_child: _Child | None = None  # of this process; None: not started
_lock = threading.Lock()


def _end(patience: float = 0.0) -> int:
    global _child
    child, _child = _child, None
    return child.end(patience) if child else 0


def _after_fork() -> None:
    global _child, _lock
    if _child:
        _child.leave()
    _child, _lock = None, threading.Lock()


atexit.register(_end)
os.register_at_fork(after_in_child=_after_fork)


def _send(channel: socket.socket, content: bytes) -> None:
    channel.sendall(len(content).to_bytes(8, "big") + content)


def _receive(channel: socket.socket) -> bytes:
    return _exactly(channel, int.from_bytes(_exactly(channel, 8), "big"))


def _exactly(channel: socket.socket, size: int) -> bytes:
    buffer = bytearray(size)
    room = memoryview(buffer)
    while room:
        count = channel.recv_into(room)
        if not count:
            raise EOFError
        room = room[count:]
    return bytes(buffer)


def serve() -> None:
    """Be the child: answer requests on standard input, a socket, until its other end is closed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Rust announces its end there; first, as it may be closed
    channel = socket.socket(fileno=os.dup(0))
    channel.settimeout(_IDLE)
    signal.signal(_TOO_LONG, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [_TOO_LONG])
    with contextlib.suppress(OSError, EOFError):
        while True:
            limits, request = json.loads(_receive(channel)), _receive(channel)
            _send(channel, _answer(request, *limits))


def _answer(request: bytes, seconds: int, memory: int) -> bytes:
    try:
        place, arguments = json.loads(request)
        module, _, name = place.partition(":")
        function = getattr(importlib.import_module(module), name)
        with _limits(seconds, memory):
            return json.dumps(["done", function(*arguments)]).encode()
    except UserError as error:
        return json.dumps(["refused", str(error)]).encode()
    except MemoryError:
        os._exit(errno.ENOMEM)
    except Exception:
        return json.dumps(["failed", traceback.format_exc()]).encode()


@contextlib.contextmanager
def _limits(seconds: int, memory: int) -> Iterator[None]:
    """Limit the block's CPU seconds, and where the system can also the bytes that it adds to this process."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(_PAGES.read_text().split()[0]) * resource.getpagesize() if _PAGES.exists() else 0
    with contextlib.suppress(ValueError, OSError):  # macOS refuses some limits; a lower one is in force
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, before[1]))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, before)

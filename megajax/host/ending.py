"""How a process ends: its exit code, its last line on standard error, and its reaction to signals.

Exit codes: 0 done; 2 a user's mistake; 1 any other error; 128 + signal for SIGTERM (143) or SIGINT (130), so that a
scheduler sees a job to start again, not a finished one.
"""

import contextlib
import datetime
import os
import select
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from megajax.errors import RunError, UserError

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(BaseException):
    """A signal stops the process; the last line ends with `details`."""

    def __init__(self, number: int, details: str = "; what was written is kept") -> None:
        super().__init__(number)
        self.number, self._details = number, details

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.number).name}{self._details}"


class StopSignals:
    """Inside `handled()`, the first signal raises `Stopped` in the main thread, or ends the process at once if a module
    is being imported; a second one always ends it at once. Inside `deferred()` the first one only sets `number`."""

    number = 0
    _deferred = ""
    _handled = False

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals of the main thread."""
        self.number = 0
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        # The interpreter's handler waits until the main thread leaves XLA; this thread sees the signal at once.
        wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reading,), daemon=True).start()
        before = {number: signal.getsignal(number) for number in SIGNALS}
        self._handled = True
        try:
            self.take()
            yield
        finally:
            self._handled = False
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup)
            os.close(writing)  # ends the thread

    def take(self) -> None:
        """Handle the signals, even if a library has taken them since."""
        for number in SIGNALS if self._handled else ():
            signal.signal(number, self._handle)

    @contextlib.contextmanager
    def deferred(self, promise: str) -> Iterator[None]:
        """Go on after the first signal; its line on standard error says `promise`."""
        self._deferred = promise
        try:
            yield
        finally:
            self._deferred = ""

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._deferred:
            return
        stop = Stopped(number)
        if _imports(frame):  # C++ that is being loaded may crash where an exception comes through it
            print_final_error(str(stop))
            os._exit(128 + number)
        raise stop

    def _watch(self, reading: int) -> None:
        while received := os.read(reading, 1):
            if received[0] not in SIGNALS:
                continue
            name = signal.Signals(received[0]).name
            if self.number:
                print_final_error(f"ended at once by a second signal, {name}")
                os._exit(128 + received[0])
            self.number = received[0]
            if self._deferred:
                print(f"{name}: {self._deferred}; a second signal ends at once", file=sys.stderr, flush=True)
        os.close(reading)


def _imports(frame: FrameType | None) -> bool:
    """Whether the code of a frame runs in an import."""
    while frame and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


stop_signals = StopSignals()  # a process has its signals once


class Exit:
    """How the process is left; whoever knows better sets it."""

    traces: ClassVar[Path | None] = None  # the folder for traces of unexpected errors, which exists
    together: ClassVar[Callable[[bool], None] | None] = None  # called at the end, with whether the process succeeded
    at_once: ClassVar[bool] = False  # without what libraries do at the exit: a thread of one hangs


_of_threads: list[str] = []  # traces from libraries' threads


def run(main: Callable[[], None]) -> None:
    """Call `main` and end the process with an exit code and, unless it is 0, one line on standard error."""
    code = 1
    Exit.traces = None
    _of_threads.clear()
    try:
        with stop_signals.handled(), _quiet_threads():
            main()
            if Exit.together:
                Exit.together(True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except (UserError, RunError) as error:
        print_final_error(f"error: {error}")
        code = 2 if isinstance(error, UserError) else 1
    except (Stopped, KeyboardInterrupt) as error:
        stop = error if isinstance(error, Stopped) else Stopped(signal.SIGINT)
        print_final_error(str(stop))
        code = 128 + stop.number
    except BaseException as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            code = 128 + signal.SIGPIPE
        else:
            print_final_error(f"error: {_plain(error)}; {_where_the_trace_is(error)}")
    _nobody_reads()
    sys.stdout.flush()
    sys.stderr.flush()
    if code and Exit.together:
        Exit.together(False)
    if code or Exit.at_once:
        os._exit(code)  # other processes may be gone, reads may be abandoned: nothing to wait for, nothing more to say
    sys.exit(0)


def _nobody_reads() -> bool:
    """Whether the reader of standard output is gone, such as `head`; if so, drop what is still to be written."""
    output = select.poll()
    output.register(1, 0)  # a pipe without a reader always reports an error
    gone = any(event & select.POLLERR for _, event in output.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return gone


def fail(text: str) -> None:
    """End the process from any thread with exit code 1 and a last line."""
    print_final_error(f"error: {text}")
    os._exit(1)


def print_final_error(text: str) -> None:
    """Print the last line on standard error, and discard what other threads still write there."""
    sys.stderr.flush()
    stderr = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.write(stderr, f"{' '.join(text.split())}\n".encode(errors="backslashreplace"))


@contextlib.contextmanager
def _quiet_threads() -> Iterator[None]:
    """Keep failures of libraries' threads for the trace: they also reach their caller, or do not matter."""
    hooks = threading.excepthook, sys.unraisablehook

    def keep(failure: Any) -> None:
        lines = traceback.format_exception(failure.exc_type, failure.exc_value, failure.exc_traceback)
        _of_threads.append("".join(lines))

    threading.excepthook = sys.unraisablehook = keep
    try:
        yield
    finally:
        threading.excepthook, sys.unraisablehook = hooks


def _where_the_trace_is(error: BaseException) -> str:
    """Write the full trace to a file; returns the end of the last line, which names it."""
    text = "\n".join(["".join(traceback.format_exception(error)), *_of_threads])
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    for folder in filter(None, (Exit.traces, Path(tempfile.gettempdir()))):
        file = folder / f"error-{now}-{os.getpid()}.txt"
        with contextlib.suppress(OSError):
            file.write_text(text, encoding="utf-8", errors="backslashreplace")
            return f"the trace is in {file}"
    return "its trace could not be written"


def _plain(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        return f"{' -> '.join(names) or 'a file'}: {error.strerror}"
    if isinstance(error, MemoryError):
        return "out of memory"
    if any(word in text for word in _DISK_FULL):
        return f"no space left on the disk ({text[:200]})"
    if any(word in text for word in _LOST):
        return f"lost another process ({text[:200]})"
    return f"the run ended: {type(error).__name__}: {text[:300]}"


_LOST = ("Gloo", "gloo", "Connection closed by peer", "heartbeat", "NCCL", "coordination service")
_DISK_FULL = ("No space left on device", "ENOSPC")

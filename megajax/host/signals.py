"""Signals that stop a process: SIGTERM, SIGINT, and SIGHUP unless the process was started to ignore it (nohup)."""

import contextlib
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from types import FrameType

from megajax.host import phases
from megajax.host.streams import print_final_error, warn

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_DEFAULT = (signal.SIG_DFL, signal.default_int_handler)
_SAID_AFTER = 0.5  # seconds; a process that takes longer to react explains why
_SWALLOWED = 0  # written to the pipe, next to the signals' numbers


class Stopped(BaseException):
    """A signal stops the process; its last line ends with `details`."""

    def __init__(self, signum: int, details: str = "; interrupted") -> None:
        super().__init__(signum)
        self.number, self._details = signum, details

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.number).name}{self._details}"

    def in_python(self) -> BaseException:
        """What Python code expects: a `KeyboardInterrupt`, or the end of the process with the command's exit code."""
        if self.number == signal.SIGINT:
            return KeyboardInterrupt(str(self))
        print_final_error(str(self))
        return SystemExit(128 + self.number)


class StopSignals:
    """Inside `handled()`, the first signal raises `Stopped` in the main thread, or ends the process at once if a module
    is being imported. A second signal always ends it at once, unless it is SIGHUP, which arrives several times when a
    terminal is lost. Inside `deferred()` the first signal only sets `number`.

    `Stopped` is raised again if something swallowed it, as Python does with exceptions in callbacks of its garbage
    collector.
    """

    number = 0
    _received = 0
    _in_python = False
    _promise = ""
    _taken: tuple[signal.Signals, ...] = ()
    _raised: weakref.ref[Stopped] | None = None
    _writing = -1  # the pipe's writing end
    _again = 0  # signals that this process has sent itself and not yet received

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def handled(self, *, in_python: bool = False) -> Iterator[None]:
        """Handle signals in the main thread. In Python code's process, only those that it does not handle itself; a
        second Ctrl-C is a `KeyboardInterrupt` there."""
        if threading.current_thread() is not threading.main_thread() or self._taken:
            yield
            return
        self.number, self._received, self._in_python = 0, 0, in_python
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        # Python runs its handler only after the main thread leaves XLA; this thread sees the signal at once.
        wakeup = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        watcher = threading.Thread(target=self._watch, args=(reading,), daemon=True)
        watcher.start()
        before = {signum: signal.getsignal(signum) for signum in SIGNALS}
        if in_python:
            self._taken = tuple(signum for signum in SIGNALS if before[signum] in _DEFAULT)
        else:
            self._taken = tuple(n for n in SIGNALS if (n, before[n]) != (signal.SIGHUP, signal.SIG_IGN))
        taken = self._taken
        try:
            self.take()
            yield
        finally:
            with self._lock:
                self._taken, self._raised = (), None
            for signum in taken:
                signal.signal(signum, before[signum])
            signal.set_wakeup_fd(wakeup)
            os.close(self._writing)  # ends the thread
            watcher.join(1)  # what it still reads must not count as a signal of the next block
            if in_python:
                self.number = 0  # its process goes on

    def take(self) -> None:
        """Handle the signals again, in case a library has replaced the handlers."""
        for signum in self._taken:
            signal.signal(signum, self._handle)

    @contextlib.contextmanager
    def deferred(self, promise: str) -> Iterator[None]:
        """Continue after the first signal; its line on standard error says `promise`."""
        before, self._promise = self._promise, promise
        try:
            yield
        finally:
            self._promise = before

    @property
    def raised(self) -> bool:
        """Whether `Stopped` is propagating through the main thread."""
        return self._raised is not None and self._raised() is not None

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._received += 1
        if self._in_python and signum == signal.SIGINT and self._received > 1:
            raise KeyboardInterrupt
        if self._promise or self.raised:
            return
        stop = Stopped(signum)
        if _imports(frame) and not self._in_python:  # loading C++ code may crash if an exception passes through it
            print_final_error(str(stop))
            os._exit(128 + signum)
        self._raised = weakref.ref(stop, self._lose)
        try:
            raise stop
        finally:
            del stop  # otherwise its own traceback keeps it alive

    def _lose(self, _: object) -> None:
        """Called when the exception is gone, although the process has not ended."""
        os.write(self._writing, bytes([_SWALLOWED]))

    def _watch(self, reading: int) -> None:
        polling, patience = select.poll(), None
        polling.register(reading, select.POLLIN)
        while True:
            if not polling.poll(patience):
                patience = None
                self._say(f"the command ends after the current phase, {phases.current() or 'a call'}")
            elif not (received := os.read(reading, 1)):
                break
            elif received[0] == _SWALLOWED:
                time.sleep(0.02)  # otherwise it may reach the same callback
                self._repeat()
            elif self._again:
                self._again -= 1
            elif received[0] in self._taken and self._first(received[0]) and not self._promise:
                patience = 1000 * _SAID_AFTER
        os.close(reading)

    def _first(self, signum: int) -> bool:
        """Whether this signal is the first one; a second one ends the process."""
        if not self.number:
            self.number = signum
            if self._promise:
                self._say(self._promise)
            return True
        if signum != signal.SIGHUP and not (self._in_python and signum == signal.SIGINT):
            print_final_error(f"ended at once by a second signal, {signal.Signals(signum).name}")
            os._exit(128 + signum)
        return False

    def _say(self, text: str) -> None:
        interrupts = self._in_python and self.number == signal.SIGINT
        second = "another Ctrl-C is a KeyboardInterrupt" if interrupts else "a second signal ends the run at once"
        warn(f"{signal.Signals(self.number).name}: {text}; {second}")

    def _repeat(self) -> None:
        with self._lock:
            if self._taken:
                self._again += 1
                signal.pthread_kill(threading.main_thread().ident or 0, self.number)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """In the block, signals are blocked; processes started there never get them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _imports(frame: FrameType | None) -> bool:
    """Whether a frame's code runs as part of an import."""
    while frame and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


stop_signals = StopSignals()  # one per process

"""How a process ends: its exit code, and its last line on standard error.

Exit codes: 0 done; 2 a user's mistake; 3 a wrong device; 1 any other error; 128 + signal for SIGTERM (143), SIGINT
(130) and SIGHUP (129), which tell a scheduler to restart the job instead of counting it as finished.
"""

import contextlib
import datetime
import os
import re
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from megajax.core.errors import RunError, UserError, WrongDevice
from megajax.host.signals import Stopped, stop_signals
from megajax.host.streams import output, print_final_error
from megajax.host.transcript import transcript


class Exit:
    """How the process is left; other modules set this."""

    traces: ClassVar[Path | None] = None  # an existing folder for tracebacks of unexpected errors
    together: ClassVar[Callable[[bool], None] | None] = None  # called at the end with whether the process succeeded
    at_end: ClassVar[list[Callable[[], None]]] = []  # called last
    at_once: ClassVar[bool] = False  # skip what libraries do at exit, because a thread of theirs hangs


_of_threads: list[str] = []  # tracebacks from libraries' threads


def run(main: Callable[[], None]) -> None:
    """Call `main`, then end the process with an exit code and, unless that is 0, one line on standard error."""
    with output.guarded():
        code, last_line = _outcome(main)
        failure = output.finish()
        if failure and (code == 0 or last_line is None):
            code, last_line = 1, f"error: standard output: {failure.strerror}"
            if isinstance(failure, BrokenPipeError):  # its reader is gone, such as `head`
                code, last_line = 128 + signal.SIGPIPE, None
        if last_line is not None:
            print_final_error(last_line)
        if code and Exit.together:
            Exit.together(False)
        while Exit.at_end:
            Exit.at_end.pop()()
        if code or Exit.at_once:
            os._exit(code)  # other processes may be gone and reads abandoned, so wait for nothing
        sys.exit(0)


def _outcome(main: Callable[[], None]) -> tuple[int, str | None]:
    """The exit code of `main`, and the last line for standard error."""
    Exit.traces = None
    transcript.end()
    _of_threads.clear()
    try:
        with stop_signals.handled(), _quiet_threads():
            main()
            if Exit.together:
                Exit.together(True)
        return 0, None
    except SystemExit as end:
        return (end.code if isinstance(end.code, int) else int(end.code is not None)), None
    except (UserError, RunError) as error:
        code = 2 if isinstance(error, UserError) else 3 if isinstance(error, WrongDevice) else 1
        return code, f"error: {error}{notes_of(error)}"
    except Stopped as stop:
        return 128 + stop.number, str(stop)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT, str(Stopped(signal.SIGINT))
    except BaseException as error:
        if error is output.failure:
            return 0, None
        if behind := _stop_behind(error):
            return 128 + behind.number, str(behind)
        if _GONE.search(str(error)):
            return 1, "error: lost another process, which was killed or ended first; rerun the command"
        if isinstance(error, FileNotFoundError) and not error.filename and not os.stat(".").st_nlink:
            return 2, "error: the working directory was removed; valid: a directory that exists"
        return 1, f"error: {_plain(error)}{notes_of(error)}; {_where_the_trace_is(error)}"


def _stop_behind(error: BaseException | None) -> Stopped | None:
    """The stop signal during which, or because of which, a library raised an error."""
    while error is not None and not isinstance(error, Stopped):
        error = error.__cause__ or error.__context__
    return error


def fail(text: str) -> None:
    """End the process from any thread, with exit code 1 and a last line."""
    print_final_error(f"error: {text}")
    os._exit(1)


@contextlib.contextmanager
def _quiet_threads() -> Iterator[None]:
    """Keep failures in libraries' threads for the traceback file: they reach their caller too, or do not matter."""
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
    """Write the full traceback to a file; returns the end of the last line, which names it."""
    text = "\n".join(["".join(traceback.format_exception(error)), *_of_threads])
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    for folder in _folders_for_traces():
        file = folder / f"error-{now}-{os.getpid()}.txt"
        with contextlib.suppress(OSError):
            file.write_text(text, encoding="utf-8", errors="backslashreplace")
            return f"the traceback is in {file}"
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"raised at {place.filename}:{place.lineno}; its traceback could not be written"


def _folders_for_traces() -> Iterator[Path]:
    if Exit.traces:
        yield Exit.traces
    with contextlib.suppress(OSError):  # no temporary folder is writable
        yield Path(tempfile.gettempdir())


def says_lost(error: BaseException) -> bool:
    """Whether an error says that another process is lost, or at least that its answer is missing."""
    return any(word in str(error) for word in _LOST)


def notes_of(error: BaseException) -> str:
    """What was added to an error in one line, such as the last good checkpoint."""
    return "".join(f"; {note}" for note in getattr(error, "__notes__", ()) if "\n" not in note)


def _plain(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        return f"{' -> '.join(names) or 'a file'}: {error.strerror}"
    if isinstance(error, MemoryError):
        return "out of memory"
    if any(word in text for word in _DISK_FULL):
        return f"no space left on the disk ({text[:200]})"
    if says_lost(error):
        return f"lost another process ({text[:200]})"
    return f"the run ended: {type(error).__name__}: {text[:300]}"


_GONE = re.compile(r"Gloo.*Connection (closed|reset) by peer|Gloo.*Broken pipe", re.DOTALL)
_LOST = ("Gloo", "gloo", "Connection closed by peer", "heartbeat", "NCCL", "coordination service")
_DISK_FULL = ("No space left on device", "ENOSPC")

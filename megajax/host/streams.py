"""Standard output and standard error, which may be closed, full, or a terminal that is gone."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from megajax.host.transcript import printable, transcript

_SHOW_CURSOR = b"\x1b[?25h"  # which bars hide


class _Descriptor(io.FileIO):
    """A descriptor that takes no more after the first write that fails. That write raises if the text is `needed`."""

    def __init__(self, number: int, needed: bool) -> None:
        super().__init__(number, "w", closefd=False)
        self.needed = needed
        self.failure: OSError | None = None

    def write(self, data: Any, /) -> int | None:  # type: ignore[override]
        if self.failure is None:
            try:
                return super().write(data)
            except OSError as error:
                self.failure = error
                if self.needed:
                    raise
                if self.fileno() == 1:
                    warn(f"standard output: {error.strerror}; the run goes on without it")
        return len(data)


class Output:
    """Standard output of the command that this process runs."""

    _descriptor: _Descriptor | None = None

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """In the block, no write to standard error raises, and one to standard output only until `is_optional`."""
        _open_closed()
        before = sys.stdout, sys.stderr
        if sys.stdout is sys.__stdout__:
            self._descriptor = _Descriptor(1, needed=True)
            sys.stdout = _text(sys.stdout, self._descriptor)
        if sys.stderr is sys.__stderr__:
            sys.stderr = _text(sys.stderr, _Descriptor(2, needed=False))
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before
            self._descriptor = None

    def is_optional(self) -> None:
        """The command goes on without standard output."""
        if self._descriptor:
            self._descriptor.needed = False

    @property
    def failure(self) -> OSError | None:
        """Why something that was needed could not be written."""
        return self._descriptor.failure if self._descriptor and self._descriptor.needed else None

    def finish(self) -> OSError | None:
        """Write what is buffered; returns `failure`."""
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        sys.stderr.flush()
        return self.failure


output = Output()  # a process has it once


def warn(text: str) -> None:
    """Print a line on standard error, and keep it."""
    print(printable(text), file=sys.stderr, flush=True)
    transcript.add(text)


def print_final_error(text: str) -> None:
    """Print the last line on standard error, and discard what other threads still write there."""
    text = printable(" ".join(text.split()))
    transcript.add(text)
    with contextlib.suppress(OSError):
        sys.stderr.flush()
        stderr = os.dup(2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        cursor = _SHOW_CURSOR if os.isatty(stderr) else b""
        os.write(stderr, cursor + f"{text}\n".encode())


def _open_closed() -> None:
    """Give closed descriptors to the null device: the next file would get them, and what is printed with them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # Standard output is opened to be read, so that a write fails.
            os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY)  # takes the lowest free number


def _text(stream: TextIO | None, descriptor: _Descriptor) -> TextIO:
    """Text like that of a stream, which is None where the descriptor was closed."""
    if stream is None:
        return io.TextIOWrapper(io.BufferedWriter(descriptor), encoding="utf-8", errors="backslashreplace")
    stream.flush()
    assert isinstance(stream, io.TextIOWrapper)
    return io.TextIOWrapper(
        io.BufferedWriter(descriptor),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )

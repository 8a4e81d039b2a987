"""Standard output and standard error, which may be closed, full, a lost terminal, or in an encoding that lacks a
character."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from megajax.core.errors import shortened
from megajax.host.transcript import printable, transcript

_SHOW_CURSOR = b"\x1b[?25h"  # progress bars hide it
_ESCAPES = "backslashreplace"
_RAISE = ("strict", "surrogateescape", "surrogatepass")  # how streams handle characters that cannot be encoded


class _Descriptor(io.FileIO):
    """A descriptor that discards everything after the first failed write, which raises if the output is `needed`."""

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
                    warn(f"standard output: {error.strerror}; the run continues without it")
        return len(data)


class Output:
    """Standard output of the command that this process runs."""

    _descriptor: _Descriptor | None = None

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """In the block, writes to standard error never raise, and writes to standard output only if it is needed."""
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
        """Declare that the command works without standard output."""
        if self._descriptor:
            self._descriptor.needed = False

    @property
    def failure(self) -> OSError | None:
        """Why needed output could not be written, if that happened."""
        return self._descriptor.failure if self._descriptor and self._descriptor.needed else None

    def finish(self) -> OSError | None:
        """Flush; returns `failure`."""
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        sys.stderr.flush()
        return self.failure


output = Output()  # one per process


def warn(text: str) -> None:
    """Print a line on standard error, and keep it in the transcript."""
    print(printable(text), file=sys.stderr, flush=True)
    transcript.add(text)


def print_final_error(text: str) -> None:
    """Print the last line on standard error, and discard what other threads write there later."""
    text = printable(shortened(" ".join(text.split())))
    transcript.add(text)
    with contextlib.suppress(OSError):
        sys.stderr.flush()
        stderr = os.dup(2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        cursor = _SHOW_CURSOR if os.isatty(stderr) else b""
        os.write(stderr, cursor + f"{text}\n".encode(sys.stderr.encoding or "utf-8", _ESCAPES))


def _open_closed() -> None:
    """Connect closed descriptors to the null device; otherwise the next file would get them, and printed text."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # Standard output is opened for reading only, so that writes fail.
            os.open(os.devnull, os.O_WRONLY if descriptor == 2 else os.O_RDONLY)  # gets the lowest free number


def _text(stream: TextIO | None, descriptor: _Descriptor) -> TextIO:
    """A text stream with the settings of `stream`, which is None if the descriptor was closed; it escapes what cannot
    be encoded instead of raising."""
    if stream is None:
        return io.TextIOWrapper(io.BufferedWriter(descriptor), encoding="utf-8", errors=_ESCAPES)
    stream.flush()
    assert isinstance(stream, io.TextIOWrapper)
    return io.TextIOWrapper(
        io.BufferedWriter(descriptor),
        encoding=stream.encoding,
        errors=_ESCAPES if stream.errors in _RAISE else stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )

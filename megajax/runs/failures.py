"""Errors of Orbax and TensorStore: silence what they print, clean up what they abandon, summarize them in one line."""

import gc
import logging
import os
import re
import sys
import warnings
from typing import Any

# Orbax logs every file it touches, every exception, and every other write that it abandons after a failure.
for _name in ("absl", "asyncio"):
    logging.getLogger(_name).setLevel(logging.CRITICAL + 1)


def forget_abandoned() -> None:
    """Collect the reads and writes that Orbax abandoned after a failure, which would print tracebacks later. Also
    silence what TensorStore is still working on."""
    expect_abandoned()
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        with warnings.catch_warnings(action="ignore"):  # that they were never awaited
            gc.collect()
    finally:
        sys.unraisablehook = hook


def expect_abandoned() -> None:
    """Silence what Orbax abandons: an abandoned read raises, and TensorStore reports to a closed event loop."""
    before = sys.unraisablehook
    if getattr(before, "expects_abandoned", False):
        return

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_value
        closed = isinstance(error, RuntimeError) and "Event loop is closed" in str(error)
        given_up = isinstance(error, Exception) and isinstance(error.__cause__, GeneratorExit)
        if not closed and not given_up:
            before(unraisable)

    hook.expects_abandoned = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook


def in_one_line(error: Exception) -> str:
    """The message of an OS, Orbax or TensorStore exception, in one line."""
    text = " ".join(str(error).split()).partition(" See full")[0]
    if code := _SYSTEM.search(text):  # TensorStore surrounds it with many words
        return os.strerror(int(code[1] or code[2])).lower()
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror.lower()}: {error.filename}" if error.filename else error.strerror.lower()
    return (text or type(error).__name__)[:200]


_SYSTEM = re.compile(r"os_error_code='(\d{1,4})'|OS error (\d{1,4})")

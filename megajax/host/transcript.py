"""What a command tells its user, and `log.txt`, which keeps it in a run directory as plain text."""

import contextlib
import datetime
import os
import re
import shlex
import sys
import threading
from collections import deque
from pathlib import Path

from megajax.host.paths import identity

NAME, OLDER = "log.txt", "log.txt.1"
MOST_BYTES = 1 << 23  # in a file; a larger one is renamed to the older one, which it replaces
known_as: dict[str, str] = {}  # what texts call the local copy of a run: its URL
_EARLY = 1000  # lines kept before there is a file
_PATIENCE = 1.0  # seconds to wait for another thread whose write hangs
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """A text that can be encoded and is harmless to a terminal: control characters except line feed and tab, and
    characters that change the writing direction, are escaped like `\\u001b`. Paths of `known_as` have their names."""
    for path, name in known_as.items():
        text = text.replace(path, name)
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class Transcript:
    """Keeps lines in a file, and in memory until there is one. Failed writes are not errors."""

    def __init__(self) -> None:
        self._early: deque[str] = deque(maxlen=_EARLY)
        self._folder, self._identity = Path(), identity(".")
        self._file: int | None = None
        self._lock = threading.Lock()

    def begin(self, folder: Path) -> None:
        """Continue in `log.txt` of a folder, starting with a line with time and command, and all earlier lines."""
        early = [] if self._file is not None else list(self._early)
        self.end()
        self._folder, self._identity = folder, identity(folder)
        program = Path(sys.argv[0]).name.replace("__main__.py", "megajax")
        now = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        with contextlib.suppress(OSError):
            self._file = _opened(folder / NAME)
        self.add("\n".join([f"--- {now} {shlex.join([program, *sys.argv[1:]])}", *early]))

    def end(self) -> None:
        """Close the file; lines from now on are for the next one."""
        self._early.clear()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def add(self, text: str) -> None:
        """Keep one or more lines."""
        if self._file is None:
            self._early.append(text)
            return
        if not self._lock.acquire(timeout=_PATIENCE):
            return
        try:
            os.write(self._file, f"{printable(text)}\n".encode())
            if os.fstat(self._file).st_size > MOST_BYTES and identity(self._folder) == self._identity:
                os.replace(self._folder / NAME, self._folder / OLDER)
                new = _opened(self._folder / NAME)
                os.dup2(new, self._file)
                os.close(new)
        except OSError:
            pass  # the disk is full; there may be space again for the next line
        finally:
            self._lock.release()


transcript = Transcript()  # one per process


def tell(text: str) -> None:
    """Print one or more lines on standard output, and keep them in the transcript."""
    print(printable(text), flush=True)
    transcript.add(text)


def _opened(file: Path) -> int:
    return os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)

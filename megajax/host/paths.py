"""Paths and lists from the command line: whether paths can be accessed, and whether files can be written there."""

import os
import re
from collections.abc import Callable
from pathlib import Path

from megajax.core.errors import UserError

_LONGEST = 255  # bytes in a name, on every common file system
_LONGEST_NEW = 200  # in a name to be written, since temporary names next to it are longer
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # one slash, because `Path` turns gs://bucket into gs:/bucket


def scheme(path: str | Path) -> str:
    """The scheme of a URL, such as `gs` in gs://bucket/file; empty for a path."""
    found = _SCHEME.match(str(path))
    return found[1].lower() if found else ""


def in_store(path: str | Path) -> bool:
    """Whether a path is the URL of an object store, in which runs may live."""
    return scheme(path) in ("gs", "s3")


def user_folder(variable: str, default: str) -> Path | None:
    """The user's folder of one kind, by the XDG specification; None for a user without a home."""
    folder = Path(os.environ.get(variable, ""))
    folder = folder if folder.is_absolute() else Path(os.path.expanduser(default))
    return folder if folder.is_absolute() else None


def identity(path: str | Path) -> tuple[int, int] | None:
    """What distinguishes the file or folder at a path from one that may replace it; None if there is nothing."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def check_path(path: str | Path, name: str) -> None:
    """Check that it is possible to tell whether a path exists; `name` is its flag or argument in error messages."""
    if not str(path):
        raise UserError(f"{name} is empty; valid: a path")
    if found := scheme(path):
        raise UserError(
            f"{name} {path}: {found}:// is only for texts (--data.path, INPUT), presets and runs (--run-dir, --init, "
            "--checkpoint); valid: a path on a file system"
        )
    try:
        os.stat(path)
        problem = ""
    except (FileNotFoundError, NotADirectoryError):
        long = any(len(os.fsencode(part)) > _LONGEST for part in Path(path).parts)
        problem = "File name too long" if long else ""
    except OSError as error:
        problem = error.strerror or str(error)
    except ValueError as error:  # the path contains a NUL
        problem = str(error)
    if problem:
        given = f"{str(path)[:100]}…" if len(str(path)) > 200 else str(path)
        valid = f"names of at most {_LONGEST} bytes, in accessible folders"
        raise UserError(f"{name} {given!r}: {problem}; valid: {valid}")


def check_place(path: str | Path, name: str) -> None:
    """Check that a file or folder can be created at a path, or written if it exists; `name` as in `check_path`."""
    check_path(path, name)
    absolute = Path(path).absolute()
    if os.fsencode(absolute) != str(absolute).encode(errors="replace"):  # C++ libraries assume UTF-8 in every locale
        valid = "a path in UTF-8, or in ASCII if the locale has another encoding"
        raise UserError(f"{name} {str(absolute)!r}; valid: {valid}")
    if not os.path.lexists(absolute) and len(os.fsencode(absolute.name)) > _LONGEST_NEW:
        raise UserError(f"{name} {absolute.name[:100]}…: the name is too long; valid: at most {_LONGEST_NEW} bytes")
    folder = next(found for found in (absolute, *absolute.parents) if found.is_dir() or os.path.lexists(found))
    if folder == absolute and not folder.is_dir():
        folder = folder.parent
    if not folder.is_dir():
        raise UserError(f"{name} {path}: {folder} is not a folder; valid: a path in a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{name} {path}: {folder} is not writable; valid: a writable folder")


def apart(entry: str, fits: Callable[[str], bool]) -> str:
    """The end of an error message about an entry of a list: how to separate its parts, if each of several `fits`."""
    parts = [part for part in re.split(r"[,;\s]+", entry) if part]
    return f" (separated by spaces: {' '.join(parts)})" if len(parts) > 1 and all(map(fits, parts)) else ""

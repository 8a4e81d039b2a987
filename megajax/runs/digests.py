"""Sizes and digests of a checkpoint's files, in a file beside them, so that damage is found before anything is read."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megajax import reading

FILES = "files.json"
_LARGEST = 64 * 2**20  # bytes of such a file; 150 a line: far more files than any checkpoint has


def write_digests(folder: Path) -> None:
    """Write size and SHA-256 of every file below `folder`.

    Raises:
        OSError: a file cannot be read, or this one not be written.
    """
    found = {name: _digested(folder / name) for name in _names(folder)}
    write_json(folder / FILES, {"sha256": found})


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file that is on the disk when this returns.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        OSError, ValueError: it cannot be read, or is none.
    """
    return reading.parse_json(reading.read_bytes(path, _LARGEST).decode())


def problem_of(folder: Path) -> str:
    """The first difference between the files below `folder` and what was written there; empty if there is none, or if
    that is not known."""
    if not os.path.lexists(folder / FILES):
        return ""
    try:
        content = read_json(folder / FILES)
        expected = {Path(name): [int(size), str(sum)] for name, (size, sum) in content["sha256"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return f"{FILES} cannot be read"
    if any(name.is_absolute() or ".." in name.parts for name in expected):
        return f"{FILES} cannot be read"
    for name, (size, _) in expected.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, not {size} as it was written"
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        for (name, wanted), found in zip(
            expected.items(), threads.map(lambda name: _readable(folder / name), expected), strict=True
        ):
            if found != wanted:
                return f"{name} has other bytes than were written"
    return ""


def _names(folder: Path) -> list[str]:
    files = (file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
    return sorted(str(file) for file in files if file != Path(FILES))


def _digested(file: Path) -> list[Any]:
    with file.open("rb") as content:
        return [os.fstat(content.fileno()).st_size, hashlib.file_digest(content, "sha256").hexdigest()]


def _readable(file: Path) -> list[Any]:
    try:
        return _digested(file)
    except OSError:
        return []

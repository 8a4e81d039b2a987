"""Read files of unknown origin: sizes are limited before anything is allocated.

Only regular files are opened. JSON and TOML are limited in size, nesting, number of values and digits per number, so
that any contents quickly give a value or an error.
"""

import errno
import itertools
import json
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from megajax.core.errors import Damaged, UserError

SMALL_BYTES = 1 << 20  # for a file with settings or figures; usual ones have some kB
LINE_BYTES = 1 << 28  # for a line or record of text

_BLOCK_BYTES = 1 << 16  # read at a time
_DEPTH = 64  # levels of nested brackets
_VALUES, _LISTS = 1 << 21, 1 << 16  # in a JSON text; lists and objects may be more, one for every eight characters
_DIGITS = 300  # in a number; any integer with so many digits fits in a float
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
}


def kind(path: str | Path) -> str:
    """What is at a path, in words (`a file`, `a folder`, `a named pipe`); empty if there is nothing."""
    try:
        return _KINDS.get(stat.S_IFMT(os.stat(path).st_mode), "no file")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; valid: short names, in accessible folders") from None
    except ValueError as error:  # the path contains a NUL
        raise UserError(f"{path}: {error}; valid: a path without it") from None


def is_file(path: str | Path) -> bool:
    """Whether a path, or the target of its link, is a regular file."""
    return kind(path) == "a file"


def is_folder(path: str | Path) -> bool:
    """Whether a path, or the target of its link, is a folder."""
    return kind(path) == "a folder"


def names(folder: str | Path) -> set[str]:
    """The names in a folder; empty if it does not exist."""
    if not is_folder(folder):
        return set()
    try:
        return set(os.listdir(folder))
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; valid: a readable folder") from None


def open_file(path: str | Path) -> IO[bytes]:
    """Open a regular file for reading; raises `OSError` for anything else, since a named pipe would block."""
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, f"it is {_KINDS.get(stat.S_IFMT(mode), 'no file')}, not a file", str(path))
        return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    except ValueError as error:  # the path contains a NUL
        raise OSError(errno.EINVAL, str(error), str(path)) from None


def read_bytes(path: str | Path, most: int = SMALL_BYTES) -> bytes:
    """The contents of a file with at most `most` bytes; raises `OSError` if it cannot be read."""
    with open_file(path) as file:
        try:
            return whole(file, most)
        except TooLong as error:
            raise UserError(f"{path}: {error}") from None


def read_text(path: str | Path, most: int = SMALL_BYTES) -> str:
    """The text of a file with at most `most` bytes, without a byte order mark."""
    try:
        return read_bytes(path, most).decode().removeprefix("\ufeff")
    except OSError as error:
        raise Damaged(path, f"cannot be read: {error.strerror}", "a readable file") from None
    except UnicodeDecodeError as error:
        raise Damaged(path, f"not UTF-8 text (at byte {error.start})", "UTF-8") from None


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded: without halves of a character, as JSON and unknown bytes on standard input can
    give."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def read_json(path: str | Path, most: int = SMALL_BYTES) -> Any:
    """The value in a JSON file with at most `most` bytes."""
    text = read_text(path, most)
    try:
        return parse_json(text)
    except ValueError as error:
        raise Damaged(path, f"not JSON: {error}", "JSON in UTF-8") from None


def read_object(path: str | Path, way_out: str, most: int = SMALL_BYTES) -> dict[str, Any]:
    """The object in a JSON file with at most `most` bytes; `way_out` says what would be valid instead of another
    value."""
    content = read_json(path, most)
    if not isinstance(content, dict):
        raise Damaged(path, "not a JSON object", way_out)
    return content


def lines(content: IO[bytes], most: int) -> Iterator[bytes]:
    """The lines of a file, including line ends; raises `TooLong` if one has more than `most` bytes."""
    for number, line in enumerate(iter(lambda: content.readline(most + 1), b""), start=1):
        if len(line) > most:
            raise TooLong(f"line {number} has more than {_size(most)}; valid: at most that")
        yield line


class TooLong(ValueError):
    """A line or record exceeds its size limit, which the message gives."""


def whole(content: IO[bytes], most: int) -> bytes:
    """All of a file; raises `TooLong` if it has more than `most` bytes."""
    data = bytearray()
    while block := content.read(_BLOCK_BYTES):
        data += block
        check_size(len(data), most)
    return bytes(data)


def check_size(size: int, most: int) -> None:
    """Raise `TooLong` if a text has more than `most` bytes."""
    if size > most:
        raise too_long(most)


def too_long(most: int) -> TooLong:
    """The error for a text of more than `most` bytes."""
    return TooLong(f"more than {_size(most)} as one text; valid: at most that")


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count} bytes"


# It also matches an unterminated string: retrying at each of its quotes would take quadratic time.
JSON_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_NO_BRACKETS = re.compile(r"[^\[\]{}]++")
_STEP = {"[": 1, "{": 1, "]": -1, "}": -1}


def _check_depth(bare: str) -> None:
    """Raise `ValueError` if brackets in a text without strings are nested too deeply."""
    if bare.count("[") + bare.count("{") > _DEPTH:
        brackets = _NO_BRACKETS.sub("", bare)
        if any(depth > _DEPTH for depth in itertools.accumulate(map(_STEP.__getitem__, brackets))):
            raise ValueError(f"nested in more than {_DEPTH} brackets")


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"a number of {len(text)} digits; at most {_DIGITS} are read")
    return int(text)


_DECODER = json.JSONDecoder(parse_int=_integer)


def parse_json(text: str) -> Any:
    """The value of a JSON text; raises `ValueError` if it is not JSON, or exceeds the limits."""
    check_json_size(text)
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def check_json_size(text: str) -> None:
    """Raise `ValueError` if a JSON text has too many values or is nested too deeply."""
    if text.count("[") + text.count("{") > _DEPTH or text.count(",") > _VALUES:
        bare = JSON_STRING.sub("", text)
        lists = bare.count("[") + bare.count("{")
        if bare.count(",") > _VALUES or lists > min(_LISTS + len(text) // 8, _VALUES):
            raise ValueError("too many lists, objects or values")
        _check_depth(bare)


_TOML_CHARACTERS = 1 << 16  # a preset has a few thousand, and `tomllib` is slow
_TOML_NAMES = 16  # in a dotted key
_TOML_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"""(?:"{0,2})'
    r"|'''.*?'''(?:'{0,2})"
    r'|"[^"\\\n]*+(?:\\[^\n][^"\\\n]*+)*+"'
    r"|'[^'\n]*'"
    r"|\#[^\n]*",
    re.DOTALL,
)
_TOML_KEY = re.compile(rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{_TOML_NAMES}}}")
_TOML_NUMBER = re.compile(rf"\b[0-9][0-9A-Za-z_]{{{_DIGITS},}}")


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text; raises `ValueError` if it is not TOML, or exceeds the limits."""
    if len(text) > _TOML_CHARACTERS:
        raise ValueError(f"more than {_TOML_CHARACTERS} characters")
    bare = _TOML_STRING.sub("s", text)
    _check_depth(bare)
    if _TOML_KEY.search(bare):
        raise ValueError(f"a key of more than {_TOML_NAMES} names")
    if _TOML_NUMBER.search(bare):
        raise ValueError(f"a number of more than {_DIGITS} digits")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None

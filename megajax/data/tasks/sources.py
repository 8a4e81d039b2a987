"""Files of the tasks: finding them, checking how they begin, and checking the values in them.

A place is the flag, the file and a record's number, as in messages: `--data.train: dev.tsv:7`.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from megajax.core.errors import Damaged, UserError
from megajax.data.tasks.records import Records
from megajax.data.tasks.registry import TASKS
from megajax.data.text import long_documents, streams
from megajax.data.text.inputs import check_formats, files_below, readable
from megajax.host import reading
from megajax.host.paths import apart, check_path

_HEAD_BYTES = 1 << 16  # enough to recognize a file
_KEY = re.compile(r'"(\w{1,40})"\s*:')
_NUMBER = re.compile("([0-9]+)")

V = TypeVar("V")


def task_files(paths: Sequence[str], task: str, flag: str) -> list[Path]:
    """The files that paths name, without duplicates.

    If the task has `suffixes`, a folder stands for all files below it with these endings, compressed or not, except
    hidden ones, sorted by path with numbers in names compared as numbers.
    """
    suffixes, valid = TASKS[task].suffixes, TASKS[task].files
    if not paths:
        raise UserError(f"{flag} is not given; valid: {valid}")
    files: list[Path] = []
    for path in paths:
        check_path(path, flag)
        kind = reading.kind(path)
        if kind == "a folder" and suffixes:
            with readable(path, flag):
                below = files_below(Path(path))
            check_formats(below, flag)
            matching = sorted((file for file in below if streams.inner_suffix(file) in suffixes), key=_order)
            if not matching:
                raise UserError(f"{flag}: {path} has no files; valid: files that end in {' or '.join(suffixes)}")
            files += matching
        elif kind == "a file":
            check_formats([Path(path)], flag)
            files.append(Path(path))
        else:
            is_there = f"is {kind}" if kind else "does not exist"
            folders = ", or a folder of such files" if suffixes else ""
            several = apart(str(path), os.path.exists)
            raise UserError(f"{flag}: {path} {is_there}; valid: a file of {task}, {valid}{folders}{several}")
    seen = set()
    for file in files:
        real = os.path.realpath(file)
        if real in seen:
            raise UserError(f"{flag}: {file} is named twice; valid: every file once")
        seen.add(real)
    return files


def _order(file: Path) -> list[tuple[list[Any], str]]:
    """A sort key: for every name in a path its alternating texts and numbers, and the name itself, to separate 7 from
    07."""
    turns = (_NUMBER.split(part) for part in file.parts)
    return [([int(piece) if index % 2 else piece for index, piece in enumerate(turn)], "".join(turn)) for turn in turns]


@dataclass(frozen=True)
class TaskFile:
    """A task's file that is being read."""

    path: Path
    flag: str  # the flag that names it, for error messages
    task: str
    labelled: bool  # whether the right answers are required
    records: Records  # from all files so far; the reader appends its own

    @property
    def where(self) -> str:
        """The file as named in messages."""
        return f"{self.flag}: {self.path}"

    @contextlib.contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        """The uncompressed contents."""
        with readable(self.path, self.flag), streams.opened(self.path) as (content, _):
            yield content

    def lines(self, most: int) -> Iterator[tuple[bytes, str]]:
        """Every line, including its end and with at most `most` bytes, and its place."""
        with self.opened() as content:
            for number, line in enumerate(reading.lines(content, most), start=1):
                yield line, f"{self.where}:{number}"

    def objects(self, most: int) -> Iterator[tuple[bytes, str]]:
        """Every line of JSON or, if the file begins with `[`, every element of the array, and its place."""
        with readable(self.path, self.flag):
            is_array = streams.begins_with(self.path, b"[")
        if not is_array:
            yield from self.lines(most)
            return
        with self.opened() as content:
            for number, element in enumerate(long_documents.elements(content, most), start=1):
                yield element, f"{self.where}:{number}"

    def text(self) -> str:
        """The text, without a byte order mark."""
        with self.opened() as content:
            found = reading.whole(content, reading.LINE_BYTES)
        return decoded(found, self.where).removeprefix("\ufeff")


def check_beginning(file: TaskFile) -> None:
    """Check that a file is neither empty nor binary, and does not begin like one of another format or task."""
    with file.opened() as content:
        head = content.read(_HEAD_BYTES)
    files, text = TASKS[file.task].files, head.decode(errors="replace").removeprefix("\ufeff")
    same_format = " or ".join(name for name, task in TASKS.items() if task.files == files)
    other = _recognised(text)
    if other and other != same_format:
        raise UserError(f"{file.where} looks like a file of {other}, not {same_format}; valid: {files}")
    if not head.strip() or b"\0" in head or _is_json(text) != ("JSON" in files):
        raise Damaged(file.where, "empty, binary, or another format", files)


def _is_json(head: str) -> bool:
    return head.lstrip().startswith(("{", "["))


def _recognised(head: str) -> str:
    """The task whose files begin like this; empty if there is none or it is unclear."""
    if _is_json(head):
        keys = set(_KEY.findall(head))
        if keys & {"paragraphs", "qas"}:
            return "squad1 or squad2"
        if keys >= {"article", "options"}:
            return "race"
        if keys >= {"chosen", "rejected"}:
            return "preferences"
        return "instructions" if keys >= {"prompt", "completion"} or keys >= {"messages", "role"} else ""
    columns = set(head.split("\n", 1)[0].rstrip("\r").split("\t"))
    if columns >= {"question1", "question2"}:
        return "qqp"
    return "mnli" if columns >= {"sentence1", "sentence2"} else ""


def decoded(content: bytes, where: str) -> str:
    """Decode UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise Damaged(where, f"not UTF-8 text (at byte {error.start})", "UTF-8") from None


def parsed(text: str, where: str, task: str) -> Any:
    """Parse JSON."""
    try:
        return reading.parse_json(text)
    except ValueError as error:
        raise Damaged(where, f"not JSON: {error}", TASKS[task].files) from None


_KINDS = {str: "text", list: "a list", dict: "an object", int: "a whole number", bool: "true or false"}


def entry(value: Any, key: str, kind: type[V], where: str) -> V:
    """The value of a key in an object, which must have this type."""
    fields = checked(value, dict, where, "the record")
    if key not in fields:
        there = ", ".join(map(json.dumps, list(fields)[:5])) or "none"
        raise UserError(f'{where}: no key "{key}", there are {there}; valid: {_KINDS[kind]} under "{key}"')
    return checked(fields[key], kind, where, f'"{key}"')


def checked(value: Any, kind: type[V], where: str, what: str) -> V:
    """The value itself; another type is an error."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"{where}: {what} is not {_KINDS[kind]}; valid: {_KINDS[kind]}")
    if isinstance(value, str) and not reading.is_unicode(value):
        raise UserError(f"{where}: {what} contains half a character (\\ud800 to \\udfff); valid: text")
    return value

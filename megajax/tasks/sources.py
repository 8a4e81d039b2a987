"""Files of the tasks: which there are, what they begin with, and the values in them.

A place is the flag, the file and the number of a record, as messages name it: `--data.train: dev.tsv:7`.
"""

import contextlib
import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

from megajax import reading
from megajax.data import compressed
from megajax.data.inputs import files_below, readable
from megajax.errors import UserError
from megajax.paths import check_path

VALID = {
    "mnli": "TSV with the columns sentence1, sentence2 and gold_label",
    "qqp": "TSV with the columns question1, question2 and is_duplicate",
    "squad1": 'SQuAD\'s JSON, {"data": [{"paragraphs": …}]}',
    "squad2": 'SQuAD\'s JSON, {"data": [{"paragraphs": …}]}',
    "race": "JSON with article, questions, options and answers, of one passage or on each line",
    "instructions": 'JSON lines with "prompt" and "completion", or with "messages"',
}
"""What the files of every task are, in words."""

_SQUAD = "squad1 or squad2"
_HEAD_BYTES = 1 << 16  # that are looked at to say what a file is
_KEY = re.compile(r'"(\w{1,40})"\s*:')
_NUMBER = re.compile("([0-9]+)")
_WORDS = "true", "false", "null", "NaN", "-Infinity"
_PARTS = {word[:size] for word in _WORDS for size in range(len(word))}
_CUT = re.compile("|".join([r"\.|[eE][-+]?|u[0-9a-fA-F]{0,4}", *sorted(_PARTS)]))  # what may be left of JSON at its end

V = TypeVar("V")


def task_files(paths: Sequence[str], task: str, flag: str, suffixes: Collection[str] = ()) -> list[Path]:
    """The files that paths name.

    Args:
        paths: files, and with `suffixes` folders, of which every file below them that ends so is one, compressed or
            not, hidden ones left out, in the order of their paths, numbers in names as numbers.
        task: that they are of.
        flag: that named the paths.
        suffixes: of files in folders.

    Raises:
        UserError: a path is missing, or of something else; a folder has no such files; a file is named twice.
    """
    if not paths:
        raise UserError(f"{flag} is not given; valid: {VALID[task]}")
    files: list[Path] = []
    for path in paths:
        check_path(path, flag)
        kind = reading.kind(path)
        if kind == "a folder" and suffixes:
            with readable(path, flag):
                below = files_below(Path(path))
            found = sorted((file for file in below if compressed.inner_suffix(file) in suffixes), key=_order)
            if not found:
                raise UserError(f"{flag}: {path} has no files; valid: some that end in {' or '.join(suffixes)}")
            files += found
        elif kind == "a file":
            files.append(Path(path))
        else:
            folders = ", or a folder of such files" if suffixes else ""
            raise UserError(f"{flag}: {path} {_what_is(kind)}; valid: a file of {task}, {VALID[task]}{folders}")
    own = set()
    for file in files:
        real = os.path.realpath(file)
        if real in own:
            raise UserError(f"{flag}: {file} is named twice; valid: every file once")
        own.add(real)
    return files


def _what_is(kind: str) -> str:
    return f"is {kind}" if kind else "does not exist"


def _order(file: Path) -> list[tuple[list[Any], str]]:
    """For sorting: of every name in a path its texts and numbers in turn, and the name, for 7 and 07."""
    turns = (_NUMBER.split(part) for part in file.parts)
    return [([int(piece) if place % 2 else piece for place, piece in enumerate(turn)], "".join(turn)) for turn in turns]


@contextlib.contextmanager
def opened(file: Path, flag: str) -> Iterator[IO[bytes]]:
    """Open a file to read, uncompressed.

    Raises:
        UserError: it cannot be read; while reading: it is truncated, or a line or the whole is too long.
    """
    with readable(file, flag), compressed.reading(file) as (content, _):
        yield content


def check_beginning(file: Path, tasks: Sequence[str], flag: str) -> None:
    """Check what a file begins with.

    Args:
        file: the file.
        tasks: that it may be of, which have one format.
        flag: that named it.

    Raises:
        UserError: it is empty, binary, or of another format or task; the message says of which.
    """
    with opened(file, flag) as content:
        head = content.read(_HEAD_BYTES)
    valid = f"valid: {VALID[tasks[0]]}"
    if not head.strip():
        raise UserError(f"{flag}: {file} is empty; {valid}")
    if b"\0" in head:
        raise UserError(f"{flag}: {file} is binary; {valid}")
    text = head.decode(errors="replace").removeprefix("\ufeff")
    other = _recognised(text)
    if other and other not in (*tasks, " or ".join(tasks)):
        raise UserError(f"{flag}: {file} looks like a file of {other}, not of {' or '.join(tasks)}; {valid}")
    if _is_json(text) and "TSV" in VALID[tasks[0]]:
        raise UserError(f"{flag}: {file} is JSON; {valid}")
    if not _is_json(text) and "JSON" in VALID[tasks[0]]:
        raise UserError(f"{flag}: {file} is not JSON; {valid}")


def _is_json(head: str) -> bool:
    return head.lstrip().startswith(("{", "["))


def _recognised(head: str) -> str:
    """The task that a file which begins like this is of; empty: none, or one cannot tell."""
    if _is_json(head):
        keys = set(_KEY.findall(head))
        if keys & {"paragraphs", "qas"}:
            return _SQUAD
        if keys >= {"article", "options"}:
            return "race"
        return "instructions" if keys >= {"prompt", "completion"} or keys >= {"messages", "role"} else ""
    columns = set(head.split("\n", 1)[0].rstrip("\r").split("\t"))
    if columns >= {"question1", "question2"}:
        return "qqp"
    return "mnli" if columns >= {"sentence1", "sentence2"} else ""


def whole_text(file: Path, flag: str) -> str:
    """The text of a file, without a byte order mark.

    Raises:
        UserError: it cannot be read, is too long, or is not UTF-8.
    """
    with opened(file, flag) as content:
        found = reading.whole(content, reading.LINE_BYTES)
    return decoded(found, f"{flag}: {file}").removeprefix("\ufeff")


def decoded(content: bytes, place: str) -> str:
    """The text that some bytes are.

    Raises:
        UserError: they are not UTF-8.
    """
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{place} is not UTF-8 text (at byte {error.start}); valid: UTF-8") from None


def parsed(text: str, place: str, task: str) -> Any:
    """The value of a text in JSON.

    Raises:
        UserError: it is not JSON, or ends early, as a download that was interrupted does.
    """
    try:
        return reading.parse_json(text)
    except json.JSONDecodeError as error:
        if _is_cut_off(text, error):
            raise_cut_off(place)
        at = f"at line {error.lineno}, column {error.colno}"
        raise UserError(f"{place}: not JSON: {error.msg} {at}; valid: {VALID[task]}") from None
    except ValueError as error:
        raise UserError(f"{place}: not JSON that is read: {error}; valid: {VALID[task]}") from None


def _is_cut_off(text: str, error: json.JSONDecodeError) -> bool:
    """Whether what is wrong with a text is that it ends."""
    rest = text[error.pos : error.pos + 20].rstrip()
    return error.msg.startswith("Unterminated string") or _CUT.fullmatch(rest) is not None


def raise_cut_off(place: str) -> NoReturn:
    """Raise a `UserError` for a file that ends in the middle of a record."""
    raise UserError(f"{place}: the file ends in the middle, as an interrupted download does; valid: all of it")


_KINDS = {str: "text", list: "a list", dict: "an object", int: "a whole number", bool: "true or false"}


def entry(value: Any, key: str, kind: type[V], place: str) -> V:
    """What stands under a key of an object.

    Raises:
        UserError: there is no object, no such key, or a value of another kind, or a text that UTF-8 does not have.
    """
    found = checked(value, dict, place, "the record")
    if key not in found:
        there = ", ".join(map(json.dumps, list(found)[:5])) or "none"
        raise UserError(f'{place}: no key "{key}", there are {there}; valid: {_KINDS[kind]} under "{key}"')
    return checked(found[key], kind, place, f'"{key}"')


def checked(value: Any, kind: type[V], place: str, what: str) -> V:
    """A value, if it is of a kind.

    Raises:
        UserError: it is not, or is a text that UTF-8 does not have (half of a surrogate pair).
    """
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"{place}: {what} is not {_KINDS[kind]}; valid: {_KINDS[kind]}")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UserError(f"{place}: {what} has half of a character (\\ud800 to \\udfff); valid: text") from None
    return value

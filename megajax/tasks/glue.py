"""GLUE's TSV files: MNLI, natural-language inference, and QQP, whether two questions ask the same.

Columns are found by the names in the first line. Nothing is quoted: texts hold double quotes. QQP's release has some
rows that a line end in a question cuts in two; they are left out, as Hugging Face's data sets do, and counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megajax import reading
from megajax.errors import UserError
from megajax.tasks.config import TaskConfig
from megajax.tasks.records import Pair, Records
from megajax.tasks.registry import TASKS
from megajax.tasks.sources import VALID, check_beginning, decoded, opened, raise_cut_off, task_files

_LINE_BYTES = 1 << 20  # the longest of MNLI, with parses, has some thousand
_NO_MAJORITY = "-"  # MNLI's label where those who were asked did not agree
_NAMES = ("index", "id", "pairID", "idx")
_GENRES = {
    "matched": ("fiction", "government", "slate", "telephone", "travel"),
    "mismatched": ("facetoface", "nineeleven", "letters", "oup", "verbatim"),
}
_GROUPS = {genre: group for group, genres in _GENRES.items() for genre in genres}


@dataclass(frozen=True)
class _Format:
    """The columns of a task's files.

    Attributes:
        task: its name.
        texts: of the two texts.
        labels: that have the label; the first which is there.
        cut_rows: whether rows with another number of columns are left out, and are no error.
        grouped: whether records are counted by group besides.
    """

    task: str
    texts: tuple[str, str]
    labels: tuple[str, ...]
    cut_rows: bool = False
    grouped: bool = False


_MNLI = _Format("mnli", ("sentence1", "sentence2"), ("gold_label", "label"), grouped=True)
_QQP = _Format("qqp", ("question1", "question2"), ("is_duplicate",), cut_rows=True)


def read_mnli(paths: Sequence[str], config: TaskConfig, flag: str, *, labelled: bool = True) -> Records[Pair]:
    """MNLI's pairs, in the order of the files.

    Pairs without a label that most agreed on are left out and counted. The group is by the genre, or where that does
    not say by the file's name.

    Args:
        paths: TSV files.
        config: whether odd records end the reading.
        flag: that named the paths, for error messages.
        labelled: whether there must be a column of labels; test sets have none.

    Raises:
        UserError: a file cannot be used, or a record in it; the message has the line.
    """
    return _read(paths, config, flag, _MNLI, labelled)


def read_qqp(paths: Sequence[str], config: TaskConfig, flag: str, *, labelled: bool = True) -> Records[Pair]:
    """QQP's pairs, in the order of the files; arguments and errors as `read_mnli`."""
    return _read(paths, config, flag, _QQP, labelled)


def _read(paths: Sequence[str], config: TaskConfig, flag: str, form: _Format, labelled: bool) -> Records[Pair]:
    records: Records[Pair] = Records(strict=config.strict)
    for file in task_files(paths, form.task, flag):
        check_beginning(file, [form.task], flag)
        before = len(records.entries)
        with opened(file, flag) as content:
            _read_file(content, file, flag, form, labelled, records)
        if len(records.entries) == before:
            raise UserError(f"{flag}: {file} has no records; valid: {VALID[form.task]}, and rows below them")
    return records


def _read_file(
    content: IO[bytes], file: Path, flag: str, form: _Format, labelled: bool, records: Records[Pair]
) -> None:
    lines = reading.lines(content, _LINE_BYTES)
    header = _cells(next(lines).removeprefix(b"\xef\xbb\xbf"), f"{flag}: {file}:1")
    columns = _Columns.of(header, form, labelled, f"{flag}: {file}")
    by_name = _group_of_name(file.name) if form.grouped else ""
    for number, line in enumerate(lines, start=2):
        if line in (b"\n", b"\r\n"):
            continue
        place = f"{flag}: {file}:{number}"
        if line.count(b"\t") != len(header) - 1:
            _refuse_row(line, len(header), form, place, records)
            continue
        cells = _cells(line, place)
        label = None if columns.label is None else cells[columns.label]
        if label == _NO_MAJORITY and form is _MNLI:
            records.note(f'pairs labelled "{_NO_MAJORITY}" (no majority), skipped', place, "a label")
            continue
        first, second = (cells[column] for column in columns.texts)
        if not first.strip() or not second.strip():
            records.note("pairs with an empty text, kept", place, "two texts")
        name = str(number - 2) if columns.name is None else cells[columns.name]
        group = _GROUPS.get(cells[columns.genre], by_name) if columns.genre is not None else by_name
        found = None if label is None else _class_of(label, form.task, line.endswith(b"\n"), place)
        records.entries.append(Pair(name, (first, second), found, group))


def _refuse_row(line: bytes, wanted: int, form: _Format, place: str, records: Records[Pair]) -> None:
    """Leave out a row of another number of columns than is wanted.

    Raises:
        UserError: the file ends in it, or the task has no such rows.
    """
    count = line.count(b"\t") + 1
    if count < wanted and not line.endswith(b"\n"):
        raise_cut_off(place)
    if not form.cut_rows:
        raise UserError(f"{place}: {count} columns; valid: {wanted}, as the first line has")
    records.note("rows with another number of columns, skipped", place, f"{wanted}, as the first line has")


def _cells(line: bytes, place: str) -> list[str]:
    if b"\0" in line:
        raise UserError(f"{place} has a NUL; valid: text")
    return decoded(line.removesuffix(b"\n").removesuffix(b"\r"), place).split("\t")


def _class_of(label: str, task: str, ended: bool, place: str) -> int:
    """The number of a class; `ended` says whether a line end follows the label."""
    labels = TASKS[task].labels
    if label not in labels:
        if not ended and any(valid.startswith(label) for valid in labels):
            raise_cut_off(place)
        raise UserError(f'{place}: label "{label[:40]}"; valid: {", ".join(labels)}')
    return labels.index(label)


def _group_of_name(name: str) -> str:
    return next((group for group in ("mismatched", "matched") if group in name.lower()), "")


@dataclass(frozen=True)
class _Columns:
    """Where the columns of a file are; None: it has no such column."""

    texts: tuple[int, int]
    label: int | None
    name: int | None
    genre: int | None

    @classmethod
    def of(cls, header: list[str], form: _Format, labelled: bool, place: str) -> "_Columns":
        """Find the columns.

        Raises:
            UserError: one is missing, or there twice.
        """

        def find(*names: str) -> int | None:
            found = next((name for name in names if name in header), None)
            if found is not None and header.count(found) > 1:
                raise UserError(f'{place}: column "{found}" is there {header.count(found)} times; valid: once')
            return None if found is None else header.index(found)

        first, second, label = find(form.texts[0]), find(form.texts[1]), find(*form.labels)
        wanted = {form.texts[0]: first, form.texts[1]: second} | ({form.labels[0]: label} if labelled else {})
        missing = [name for name, column in wanted.items() if column is None]
        if missing:
            there = ", ".join(cell[:40] for cell in header[:20])
            raise UserError(f"{place} has no column {', '.join(missing)}, but {there}; valid: {VALID[form.task]}")
        assert first is not None and second is not None
        return cls((first, second), label, find(*_NAMES), find("genre") if form.grouped else None)

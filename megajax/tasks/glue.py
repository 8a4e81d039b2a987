"""GLUE's TSV files: MNLI, natural-language inference, and QQP, whether two questions ask the same.

Columns are found by the names in the first line. Nothing is quoted: texts hold double quotes. QQP's release has some
rows that a line end in a question cuts in two; they are left out, as Hugging Face's data sets do, and counted.
"""

from dataclasses import dataclass

from megajax.errors import UserError
from megajax.tasks.records import Pair
from megajax.tasks.registry import TASKS
from megajax.tasks.sources import TaskFile, decoded, raise_cut_off

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
    """The columns of a task's files."""

    texts: tuple[str, str]  # of the two texts
    labels: tuple[str, ...]  # names of the column with the label; the first which is there
    cut_rows: bool = False  # whether rows with another number of columns are left out, and are no error
    grouped: bool = False  # whether records are also counted by group, and may lack a label


_FORMATS = {
    "mnli": _Format(("sentence1", "sentence2"), ("gold_label", "label"), grouped=True),
    "qqp": _Format(("question1", "question2"), ("is_duplicate",), cut_rows=True),
}


def read_glue(file: TaskFile) -> None:
    """Read the pairs of a file.

    MNLI's pairs without a label that most agreed on are left out and counted. Their group is by the genre, or where
    that does not say by the file's name.
    """
    form, records = _FORMATS[file.task], file.records
    lines = file.lines(_LINE_BYTES)
    line, place = next(lines)
    header = _cells(line.removeprefix(b"\xef\xbb\xbf"), place)
    columns = _Columns.of(header, form, file)
    by_name = _group_of_name(file.path.name) if form.grouped else ""
    for row, (line, place) in enumerate(lines):
        if line in (b"\n", b"\r\n"):
            continue
        if line.count(b"\t") != len(header) - 1:
            _refuse_row(line, len(header), form, file, place)
            continue
        cells = _cells(line, place)
        label = None if columns.label is None else cells[columns.label]
        if label == _NO_MAJORITY and form.grouped:
            records.note(f'pairs labelled "{_NO_MAJORITY}" (no majority), skipped', place, "a label")
            continue
        first, second = (cells[column] for column in columns.texts)
        if not first.strip() or not second.strip():
            records.note("pairs with an empty text, kept", place, "two texts")
        name = str(row) if columns.name is None else cells[columns.name]
        group = _GROUPS.get(cells[columns.genre], by_name) if columns.genre is not None else by_name
        found = None if label is None else _class_of(label, file.task, line.endswith(b"\n"), place)
        records.entries.append(Pair(name, (first, second), found, group))


def _refuse_row(line: bytes, wanted: int, form: _Format, file: TaskFile, place: str) -> None:
    """Leave out a row with another number of columns than wanted, where the task has such rows."""
    count = line.count(b"\t") + 1
    if count < wanted and not line.endswith(b"\n"):
        raise_cut_off(place)
    if not form.cut_rows:
        raise UserError(f"{place}: {count} columns; valid: {wanted}, as the first line has")
    file.records.note("rows with another number of columns, skipped", place, f"{wanted}, as the first line has")


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
    def of(cls, header: list[str], form: _Format, file: TaskFile) -> "_Columns":
        """Find the columns, each of which must be there once."""

        def find(*names: str) -> int | None:
            found = next((name for name in names if name in header), None)
            if found is not None and header.count(found) > 1:
                raise UserError(f'{file.place}: column "{found}" is there {header.count(found)} times; valid: once')
            return None if found is None else header.index(found)

        first, second, label = find(form.texts[0]), find(form.texts[1]), find(*form.labels)
        wanted = {form.texts[0]: first, form.texts[1]: second} | ({form.labels[0]: label} if file.labelled else {})
        missing = ", ".join(name for name, column in wanted.items() if column is None)
        if missing:
            there = ", ".join(cell[:40] for cell in header[:20])
            raise UserError(f"{file.place} has no column {missing}, but {there}; valid: {TASKS[file.task].files}")
        assert first is not None and second is not None
        return cls((first, second), label, find(*_NAMES), find("genre") if form.grouped else None)

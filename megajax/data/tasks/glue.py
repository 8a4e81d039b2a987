"""GLUE's TSV files: MNLI (natural-language inference) and QQP (whether two questions ask the same).

Columns are found by their names in the first line. There is no quoting, because texts contain double quotes. In QQP's
release a line end inside a question cuts some rows in two; these are skipped, as in Hugging Face's datasets, and
counted.
"""

from dataclasses import dataclass

from megajax.core.errors import UserError
from megajax.data.tasks.records import Pair
from megajax.data.tasks.registry import TASKS
from megajax.data.tasks.sources import TaskFile, decoded

_LINE_BYTES = 1 << 20  # MNLI's longest lines, with parses, have some thousand
_NO_MAJORITY = "-"  # MNLI's label if the annotators did not agree
_NAMES = ("index", "id", "pairID", "idx")
_GENRES = {
    "matched": ("fiction", "government", "slate", "telephone", "travel"),
    "mismatched": ("facetoface", "nineeleven", "letters", "oup", "verbatim"),
}
_GROUPS = {genre: group for group, genres in _GENRES.items() for genre in genres}


@dataclass(frozen=True)
class _Format:
    """The columns of a task's files."""

    texts: tuple[str, str]
    labels: tuple[str, ...]  # possible names of the label column; the first that exists is used
    cut_rows: bool = False  # whether rows with a wrong number of columns are skipped instead of refused
    grouped: bool = False  # whether records are also scored by group, and may lack a label


_FORMATS = {
    "mnli": _Format(("sentence1", "sentence2"), ("gold_label", "label"), grouped=True),
    "qqp": _Format(("question1", "question2"), ("is_duplicate",), cut_rows=True),
}


def read_glue(file: TaskFile) -> None:
    """Read the pairs in a file. MNLI pairs without a majority label are skipped and counted. Their group follows from
    the genre, or else from the file's name."""
    form, records = _FORMATS[file.task], file.records
    lines = file.lines(_LINE_BYTES)
    line, where = next(lines)
    header = _cells(line.removeprefix(b"\xef\xbb\xbf"), where)
    label_column, name_column = _columns(header, form, file)
    by_name = next((group for group in ("mismatched", "matched") if group in file.path.name.lower()), "")
    for row, (line, where) in enumerate(lines):
        if line in (b"\n", b"\r\n"):
            continue
        if (count := line.count(b"\t") + 1) != len(header):
            valid = f"{len(header)}, as in the first line"
            if not form.cut_rows:
                raise UserError(f"{where}: {count} columns; valid: {valid}")
            records.note("rows with a wrong number of columns, skipped", where, valid)
            continue
        cells: dict[str | None, str] = dict(zip(header, _cells(line, where), strict=True))
        label = cells.get(label_column)
        if label == _NO_MAJORITY and form.grouped:
            records.note(f'pairs labelled "{_NO_MAJORITY}" (no majority), skipped', where, "a label")
            continue
        first, second = (cells[column] for column in form.texts)
        if not first.strip() or not second.strip():
            records.note("pairs with an empty text, kept", where, "two texts")
        group = _GROUPS.get(cells.get("genre", ""), by_name) if form.grouped else ""
        found = None if label is None else _class_of(label, file.task, where)
        records.entries.append(Pair(cells.get(name_column, str(row)), (first, second), found, group))


def _columns(header: list[str], form: _Format, file: TaskFile) -> tuple[str | None, str | None]:
    """The columns of the label and the name, None if missing. Columns that are read must not occur twice."""
    label, name = (next((each for each in names if each in header), None) for names in (form.labels, _NAMES))
    for column in (*form.texts, label, name, "genre" if form.grouped else None):
        if column and header.count(column) > 1:
            raise UserError(f'{file.where}: column "{column}" occurs {header.count(column)} times; valid: once')
    wanted = (*form.texts, label or form.labels[0]) if file.labelled else form.texts
    if missing := ", ".join(column for column in wanted if column not in header):
        there = ", ".join(cell[:40] for cell in header[:20])
        raise UserError(f"{file.where} has no column {missing}, only {there}; valid: {TASKS[file.task].files}")
    return label, name


def _cells(line: bytes, where: str) -> list[str]:
    if b"\0" in line:
        raise UserError(f"{where} contains a NUL character; valid: text")
    return decoded(line.removesuffix(b"\n").removesuffix(b"\r"), where).split("\t")


def _class_of(label: str, task: str, where: str) -> int:
    """The number of a class."""
    labels = TASKS[task].labels
    if label not in labels:
        raise UserError(f'{where}: label "{label[:40]}"; valid: {", ".join(labels)}')
    return labels.index(label)

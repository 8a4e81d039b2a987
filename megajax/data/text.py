"""Documents of plain text, to train on or to evaluate."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megajax.data.inputs import valid_paths
from megajax.data.records import TEXT_KEY, NoText, NotUtf8, TextFiles, text_of
from megajax.errors import UserError


@dataclass
class TextReport:
    """Counts of one pass over a text source."""

    files: int = 0  # how many files were read
    documents: int = 0  # how many documents were in them
    num_bytes: int = 0  # of the documents in UTF-8
    skipped_files: int = 0  # files of a folder that are not UTF-8


class TextDocuments:
    """The documents of a text source, as `TextFiles` finds them; every iteration reads it again from the start.

    Files of a folder that are not UTF-8 are skipped and counted in `report.skipped_files`. A broken line of JSONL is an
    error. Documents of white space only are left out.

    With `cut`, a single text file is cut in several documents; `key` is that of the text in JSONL, and the column of a
    Parquet file.

    `report` counts what the latest iteration read.
    """

    def __init__(self, path: str | Path, *, cut: bool = True, flag: str = "--data.path", key: str = TEXT_KEY) -> None:
        self.path = str(path)
        self.report = TextReport()
        self._files = TextFiles([path], flag)
        self._cut, self._key = cut, key
        self._flag = flag
        self.size = sum(self._files.sizes)

    def __iter__(self) -> Iterator[str]:
        return (text for _, text in self.placed())

    def placed(self) -> Iterator[tuple[str, str]]:
        """The place of each document, as FILE:NUMBER of the line, row or piece; and its text."""
        self.report = report = TextReport(files=len(self._files.files))
        for record, _ in self._files.records(cut=self._cut, key=self._key):
            where = f"{self._files.files[record.file]}:{record.number}"
            try:
                text = text_of(record, self._key)
            except NotUtf8:
                report.files -= 1
                report.skipped_files += 1
                continue
            except NoText as problem:
                raise UserError(f'{where}: {problem}; valid: {{"{self._key}": …}} in UTF-8 on each line') from None
            if text and not text.isspace():
                report.documents += 1
                report.num_bytes += len(text.encode())
                yield where, text
        if not report.documents:
            skipped = f" ({report.skipped_files} files are not UTF-8)" if report.skipped_files else ""
            raise UserError(f"{self._flag}: {self.path} contains no text{skipped}; {valid_paths(self._flag)}")


def in_parts(documents: Iterable[str], characters: int) -> Iterator[list[str]]:
    """Documents in batches of at least this many characters; the last batch may have fewer."""
    part: list[str] = []
    size = 0
    for text in documents:
        part.append(text)
        size += len(text)
        if size >= characters:
            yield part
            part, size = [], 0
    if part:
        yield part

"""Documents of plain text, to train on or to evaluate."""

from collections.abc import Iterator
from pathlib import Path

from megajax.data.inputs import valid_paths
from megajax.data.records import TEXT_KEY, NoText, NotUtf8, TextFiles, text_of
from megajax.errors import UserError


class TextDocuments:
    """The documents of a text source, as `TextFiles` finds them; every iteration reads it again from the start.

    A broken line of JSONL is an error. Documents of white space only are left out. With `cut`, a single text file is
    cut in several documents; `key` is that of the text in JSONL, and the column of a Parquet file.

    Attributes:
        size: bytes of its files; 0 where that is not known.
        num_documents: read by the latest iteration.
        num_bytes: of these documents in UTF-8.
        skipped_files: files of a folder that are not UTF-8, which it left out.
    """

    def __init__(self, path: str | Path, *, cut: bool = True, flag: str = "--data.path", key: str = TEXT_KEY) -> None:
        self.path, self._flag = str(path), flag
        self._files = TextFiles([path], flag)
        self._cut, self._key = cut, key
        self.size = sum(self._files.sizes)
        self.num_documents = self.num_bytes = self.skipped_files = 0

    def __iter__(self) -> Iterator[str]:
        return (text for _, text in self.placed())

    def placed(self) -> Iterator[tuple[str, str]]:
        """The place of each document, as FILE:NUMBER of the line, row or piece; and its text."""
        self.num_documents = self.num_bytes = self.skipped_files = 0
        for record, _ in self._files.records(cut=self._cut, key=self._key):
            where = f"{self._files.files[record.file]}:{record.number}"
            try:
                text = text_of(record, self._key)
            except NotUtf8:
                self.skipped_files += 1
                continue
            except NoText as problem:
                raise UserError(f'{where}: {problem}; valid: {{"{self._key}": …}} in UTF-8 on each line') from None
            if text and not text.isspace():
                self.num_documents += 1
                self.num_bytes += len(text.encode())
                yield where, text
        if not self.num_documents:
            skipped = f" ({self.skipped_files} files are not UTF-8)" if self.skipped_files else ""
            raise UserError(f"{self._flag}: {self.path} contains no text{skipped}; {valid_paths(self._flag)}")

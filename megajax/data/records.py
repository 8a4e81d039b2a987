"""Raw records of text sources: lines of JSONL, rows of Parquet, plain text; compressed or not, read as a stream.

Taking their texts out of them (`text_of`) is separate, so that one process can read for several.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

from megajax.data import streams
from megajax.data.hub_split import HubSplit
from megajax.data.inputs import DOCSTRINGS, Input, find_inputs, prose, readable, size_of, valid_paths
from megajax.data.tokenizer import END_OF_TEXT
from megajax.errors import UserError
from megajax.host import reading
from megajax.host.remote import RemoteFile

DOCUMENT_CHARACTERS = 4096  # after these a single text file is cut at the next blank line
TEXT_KEY = "text"  # of a line of JSONL, and column of a Parquet file

_ROWS = 256  # of a Parquet file in memory at once
_ROWS_BYTES = 1 << 30  # that they may take there: a value that is stored once may stand in all of them


class Record(NamedTuple):
    """One document as read, before its text is extracted."""

    file: int  # index in `TextFiles.files`
    number: int  # of the line, row or piece, from 1
    kind: str  # "json": a line of it; "file": the bytes of a file; else the content is the text itself
    content: str | bytes


class NoText(ValueError):
    """A record that is no text; the message says why."""


class NotUtf8(NoText):
    """A file that is not UTF-8."""


def text_of(record: Record, key: str = TEXT_KEY) -> str:
    """The text of a record. `NotUtf8`: it is a file that is not UTF-8; `NoText`: a line of JSONL without a text under
    `key`."""
    if isinstance(record.content, str):
        return record.content
    if record.kind == "file":
        try:
            return record.content.decode().removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            raise NotUtf8(str(error)) from None
    try:
        line = reading.parse_json(record.content.decode("utf-8-sig" if record.number == 1 else "utf-8"))
        text = line[key]
        text.encode()  # escapes such as \ud800 are valid JSON but no text
    except json.JSONDecodeError as error:
        raise NoText(f"not JSON: {error.msg} at column {error.colno}") from None
    except ValueError as error:
        raise NoText(str(error)) from None
    except KeyError:
        keys = ", ".join(json.dumps(found) for found in list(line)[:5])
        raise NoText(f'no text under the key "{key}"; there are {keys or "no keys"}') from None
    except (TypeError, AttributeError):
        raise NoText(f'no text under the key "{key}"') from None
    return text


class TextFiles:
    """The files of one or more text sources, and their records in a fixed order.

    - A folder: all files below it, except hidden ones, in the order of their paths. Each file is one document.
    - A `.jsonl` file, named or in a folder, and a named `.json` file: one document per line, `{"text": …}`.
    - A `.parquet` file: one document per row.
    - `python-stdlib`: the `.py` files of the running Python's standard library, without tests and installed packages.
      `python-docstrings`: the docstrings of each, and the topics of pydoc.
    - `hf://NAME[/CONFIGURATION][:SPLIT][#COLUMN]`: a split of a dataset, one document per row (`hub_split.py`).
    - Any other file is plain text. Where it contains `<|endoftext|>`, that separates its documents. Otherwise it is cut
      in several documents, of which some can be for validation: each ends at the first blank line after 4096
      characters (in a short file: after a sixteenth of it), or, where no blank line follows within three times as many,
      at a line end or a space. The pieces joined are the file.

    Text or JSONL may be compressed (`.gz`, `.zst`), and files and folders on a remote store (`megajax/host/remote.py`).
    `files` has all files, in order, `sizes` the bytes of each on disk; 0 where that is not known.
    """

    def __init__(self, paths: Sequence[str | Path], flag: str) -> None:
        self.files: list[Input] = []
        self.sizes: list[int] = []
        self._kinds: list[str] = []
        self._flag = flag
        for path in map(str, paths):
            found, named = find_inputs(path, flag)
            self.files += found
            self._kinds += ["docstrings" if path == DOCSTRINGS else _kind(file, named) for file in found]
            with readable(path, flag):
                self.sizes += map(size_of, found)

    def records(self, *, cut: bool = True, key: str = TEXT_KEY) -> Iterator[tuple[Record, int]]:
        """Every record, and how many bytes of its file were read by then. With `cut`, a single text file is cut in
        several documents; `key` is the column of a Parquet file."""
        for index, (file, kind) in enumerate(zip(self.files, self._kinds, strict=True)):
            with readable(file, self._flag):
                contents = self._contents(file, kind, self.sizes[index], cut, key)
                for number, (content, num_read) in enumerate(contents, start=1):
                    if kind != "json" or content.strip():
                        yield Record(index, number, kind, content), num_read

    def _contents(self, file: Input, kind: str, size: int, cut: bool, key: str) -> Iterator[tuple[str | bytes, int]]:
        """The content of every record, of lines of JSON the blank ones too, and the bytes read by then."""
        if isinstance(file, HubSplit):
            num_read = 0
            for text in file.rows(key):
                streams.check_length([text])
                num_read += len(text)
                yield text, min(num_read, size)
            return
        if kind == "parquet":
            yield from _rows(file, size, key, self._flag)
            return
        separate = kind == "text" and cut and streams.contains(file, END_OF_TEXT.encode())
        with streams.opened(file) as (content, raw):
            found: Iterable[str | bytes]
            if kind == "json":
                found = reading.lines(content, reading.LINE_BYTES)
            elif kind == "docstrings":
                assert isinstance(file, Path)
                found = prose(file, reading.whole(content, reading.LINE_BYTES))
            elif kind == "file":
                found = [reading.whole(content, reading.LINE_BYTES)]
            else:
                blocks = streams.decoded(content, file, self._flag)
                target = min(DOCUMENT_CHARACTERS, size // 16 + 1) if content is raw else DOCUMENT_CHARACTERS
                if not cut:
                    found = [streams.joined(blocks)]
                else:
                    found = streams.separated(blocks, END_OF_TEXT) if separate else streams.pieces(blocks, target)
            for each in found:
                yield each, raw.tell()


def _kind(file: Input, named: bool) -> str:
    """The kind of a file's records, where it is named itself or is of a folder."""
    if isinstance(file, HubSplit):
        return "text"
    if named and PurePath(str(file)).suffix.lower() == ".json":
        return "json"
    kinds = {".jsonl": "json", ".ndjson": "json", ".parquet": "parquet"}
    return kinds.get(streams.inner_suffix(file), "text" if named else "file")


def _rows(file: Path | RemoteFile, size: int, key: str, flag: str) -> Iterator[tuple[str, int]]:
    """The texts of a Parquet file's column, and how many bytes were read by then."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with contextlib.ExitStack() as stack:
            content = stack.enter_context(file.open()) if isinstance(file, RemoteFile) else file
            table = stack.enter_context(pq.ParquetFile(content))
            if key not in table.schema_arrow.names:
                names = ", ".join(f'"{name}"' for name in table.schema_arrow.names)
                raise UserError(f'{flag}: {file} has no column "{key}"; valid: one of {names}')
            kind = table.schema_arrow.field(key).type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                raise UserError(f'{flag}: {file}: column "{key}" has the type {kind}; valid: text')
            done = 0
            # Sizes of row groups: asked for those of a column, Arrow may crash on damaged files.
            groups = map(table.metadata.row_group, range(table.metadata.num_row_groups))
            largest = max((group.total_byte_size for group in groups), default=1)
            rows = max(1, min(_ROWS, _ROWS_BYTES // max(1, largest)))
            for batch in table.iter_batches(batch_size=rows, columns=[key]):
                done += len(batch)
                for value in batch.column(0):
                    text = value.as_py() or ""
                    streams.check_length([text])
                    yield text, size * done // table.metadata.num_rows
    except UnicodeDecodeError as error:
        raise streams.Damaged(f'a text in column "{key}" is not UTF-8: {error}') from None
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise streams.Damaged(str(error).splitlines()[0]) from None


class TextDocuments:
    """The documents of a text source, as `TextFiles` finds them; every iteration reads it again from the start.

    A broken line of JSONL is an error. Documents of white space only are left out. With `cut`, a single text file is
    cut in several documents; `key` is that of the text in JSONL, and the column of a Parquet file.

    Of the latest iteration are `num_documents`, `num_bytes` of them in UTF-8, and `skipped_files`, which are not UTF-8.
    """

    def __init__(self, path: str | Path, *, cut: bool = True, flag: str = "--data.path", key: str = TEXT_KEY) -> None:
        self.path, self._flag = str(path), flag
        self._files = TextFiles([path], flag)
        self._cut, self._key = cut, key
        self.size = sum(self._files.sizes)  # bytes; 0 where that is not known
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

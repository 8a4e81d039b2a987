"""Raw records of text sources: lines or arrays of JSON, rows of Parquet or CSV, plain text; compressed or not, read as
a stream.
Extracting their texts (`text_of`) is separate, so that one process can read for several.
"""

import codecs
import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from megajax.core.errors import UserError
from megajax.data.text import long_documents, parquet, streams, tables
from megajax.data.text.hub_split import HubSplit
from megajax.data.text.inputs import DOCSTRINGS, Input, find_inputs, prose, readable, size_of, valid_paths
from megajax.data.text.tokenizer import END_OF_TEXT
from megajax.host import reading

DOCUMENT_CHARACTERS = 4096  # a single text file is cut at the first blank line after this many
TEXT_KEY = "text"  # key in a line of JSONL, and column of a Parquet file

_SKIPPED = 1 << 20  # bytes of a line that is too long, read at a time


class Record(NamedTuple):
    """One document as read, before its text is extracted."""

    file: int  # index in `TextFiles.files`
    number: int  # of the line, row or piece, from 1
    kind: str  # "json": a line; "file": the bytes of a file; "broken": what is wrong with it; "text"; END
    content: str | bytes


class FilePart(NamedTuple):
    """A part of a file that is read independently; by default the whole file."""

    file: int  # index in `TextFiles.files`
    begin: int = 0  # byte of the file, or row group of Parquet
    end: int = 0  # 0: the end of the file
    separated: bool = False  # for plain text: whether `END_OF_TEXT` is in the file


END = "end"  # the kind of the entry after a part's last record; its number is the number of records
_Content = str | bytes | list[str] | ValueError  # of a record: possibly in blocks, or what is wrong with it


class NoText(ValueError):
    """A record without a valid text; the message says why."""


class NotUtf8(NoText):
    """A file that is not text in UTF-8."""


def text_of(record: Record, key: str = TEXT_KEY) -> str:
    """The text of a record. `NotUtf8`: it is a file that is not UTF-8; `NoText`: a line of JSONL without a text under
    `key`, or a document that is too long."""
    if record.kind == "broken":
        raise (NoText if record.content else NotUtf8)(record.content)
    if isinstance(record.content, str):
        return record.content
    if record.kind == "file":
        try:
            return "".join(streams.without_marks([streams.checked(record.content.decode())]))
        except UnicodeDecodeError as error:
            raise NotUtf8(str(error)) from None
    with _no_text(key):
        line = reading.parse_json(record.content.decode())
        try:
            text = line[key]
        except KeyError:
            keys = ", ".join(json.dumps(found) for found in list(line)[:5])
            raise NoText(f'no text under the key "{key}"; there are {keys or "no keys"}') from None
        if not isinstance(text, str):
            raise NoText(f'under the key "{key}" is {json.dumps(text)[:40]}, not text')
        text.encode()  # escapes such as \ud800 are valid JSON but not text
        return text


def _long(kind: str, content: bytes, key: str) -> Iterator[str]:
    """The text of a long record in blocks; errors as `text_of`, before the first of them."""
    if kind == "file":
        try:
            yield from long_documents.decoded(content)
        except UnicodeDecodeError as error:
            raise NotUtf8(str(error)) from None
        return
    with _no_text(key):
        yield from long_documents.in_json(content, key)


@contextlib.contextmanager
def _no_text(key: str) -> Iterator[None]:
    """In the block, turn errors in a line of JSON into `NoText`."""
    try:
        yield
    except NoText:
        raise
    except json.JSONDecodeError as error:
        raise NoText(f"not JSON: {error.msg} at column {error.colno}") from None
    except ValueError as error:
        raise NoText(str(error)) from None
    except (KeyError, TypeError, AttributeError):
        raise NoText(f'no text under the key "{key}"') from None


class TextFiles:
    """The files of one or more text sources, and their records in a fixed order.

    - A folder: all files below it, except hidden ones, in the order of their paths. Each file is one document.
    - A `.jsonl` file, named or in a folder, and a named `.json` file: one document per line, `{"text": …}`; or, if a
      `.json` file begins with `[`, one per element of the array.
    - A `.parquet` file: one document per row. A named `.csv` file likewise; its first row names the columns.
    - `python-stdlib`: the `.py` files of the running Python's standard library, without tests and installed packages.
      `python-docstrings`: the docstrings of each, and the topics of pydoc.
    - `hf://NAME[/CONFIGURATION][:SPLIT][#COLUMN]`: a split of a dataset, one document per row (`hub_split.py`).
    - Any other file is plain text. Where it contains `<|endoftext|>`, that separates its documents. Otherwise it is cut
      in several documents, of which some can be for validation: each ends at the first blank line after 4096
      characters (in a short file: after a sixteenth of it), or, where no blank line follows within three times as many,
      at a line end or a space. The pieces joined are the file.

    A document of more than 1 Mi characters is cut in the same way, after 256 Ki characters.

    All but Parquet may be compressed (`.gz`, `.zst`, `.bz2`, `.xz`), and files and folders on a remote store
    (`megajax/host/remote.py`). `files` has all files, in order, `sizes` the bytes of each on disk, 0 where that is not
    known, and `kinds` how each is read: json, array, csv, parquet, text, file or docstrings.
    """

    def __init__(self, paths: Sequence[str | Path], flag: str) -> None:
        self.files: list[Input] = []
        self.sizes: list[int] = []
        self.kinds: list[str] = []
        self.flag = flag
        for path in map(str, paths):
            inputs, named = find_inputs(path, flag)
            self.files += inputs
            with readable(path, flag):
                self.kinds += ["docstrings" if path == DOCSTRINGS else _kind(file, named) for file in inputs]
                self.sizes += map(size_of, inputs)

    def dominated(self) -> str:
        """Where one of several files is more than a tenth of all bytes: the files by suffix, and that file's share."""
        total, sizes = sum(self.sizes), [*self.sizes, 0]
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        if len(self.files) < 2 or sizes[largest] <= total / 10:
            return ""
        by_suffix = Counter(streams.inner_suffix(file) or "without a suffix" for file in self.files)
        counts = ", ".join(f"{count:,} {suffix}" for suffix, count in by_suffix.most_common())
        one = ", as one document" if self.kinds[largest] == "file" and sizes[largest] <= long_documents.LONG else ""
        return f"{counts}; {self.files[largest]} is {sizes[largest] / total:.0%} of the bytes{one}"

    def records(
        self, *, cut: bool = True, key: str = TEXT_KEY, most: int | None = None
    ) -> Iterator[tuple[Record, int]]:
        """Every record, and how many bytes of its file were read by then. Without `cut`, a single text file is one
        document, and none is cut; `key` is that of texts in JSONL, and the column of a Parquet file. A document of more
        than `most` bytes, `reading.LINE_BYTES` if not given, is a broken one."""
        for file in range(len(self.files)):
            for record, num_read in self._records(FilePart(file), cut, key, most or reading.LINE_BYTES):
                if record.kind != END:
                    yield record, num_read

    def records_in(self, span: FilePart, *, key: str, most: int) -> Iterator[Record]:
        """The records of a part, numbered from 1, and END."""
        return (record for record, _ in self._records(span, True, key, most))

    def _records(self, span: FilePart, cut: bool, key: str, most: int) -> Iterator[tuple[Record, int]]:
        kind = self.kinds[span.file]
        count = num_read = 0
        with readable(self.files[span.file], self.flag):
            for count, (content, num_read) in enumerate(self._contents(span, kind, cut, key, most), start=1):
                for found, text in _cut(kind, content, cut, key, most):
                    yield Record(span.file, count, found, text), num_read
        yield Record(span.file, count, END, ""), num_read

    def _contents(self, span: FilePart, kind: str, cut: bool, key: str, most: int) -> Iterator[tuple["_Content", int]]:
        """The content of every record (blank lines of JSON included), and the bytes read so far."""
        file, size = self.files[span.file], self.sizes[span.file]
        if isinstance(file, HubSplit):
            num_read = 0
            for text in file.rows(key):
                num_read += len(text)
                yield text, min(num_read, size)
            return
        if kind == "parquet":
            yield from parquet.texts(file, size, key, self.flag, most, span.begin, span.end)
            return
        whole = not span.begin and not span.end
        separate = span.separated or (kind == "text" and cut and whole and streams.contains(file, END_OF_TEXT.encode()))
        with (streams.opened_lines if kind == "json" else streams.opened)(file, span.begin, span.end) as (content, raw):
            items: Iterable[_Content]
            if kind == "json":
                items = _lines(content, most)
            elif kind == "array":
                items = long_documents.elements(content, most)
            elif kind == "csv":
                items = tables.texts(content, f"{self.flag}: {file}", key, most)
            elif kind == "docstrings":
                assert isinstance(file, Path)
                items = prose(file, reading.whole(content, most))
            elif kind == "file":
                items = [_whole(content, most)]
            else:
                blocks = streams.decoded(content, file, self.flag, span.begin)
                short = not streams.is_compressed(file)
                target = min(DOCUMENT_CHARACTERS, size // 16 + 1) if short else DOCUMENT_CHARACTERS
                if not cut:
                    items = [streams.joined(blocks, most)]
                else:
                    items = streams.separated(blocks, END_OF_TEXT, most) if separate else streams.pieces(blocks, target)
            for each in items:
                yield each, raw.tell()


def _lines(content: IO[bytes], most: int) -> Iterator[bytes | ValueError]:
    """The lines of a file. They may begin with a byte order mark, as where files were joined; too long ones are
    skipped."""
    while line := content.readline(most + 1):
        if len(line) <= most:
            yield line.removeprefix(codecs.BOM_UTF8)
            continue
        yield reading.too_long(most)
        while line and not line.endswith(b"\n"):
            line = content.readline(_SKIPPED)


def _whole(content: IO[bytes], most: int) -> bytes | ValueError:
    try:
        return reading.whole(content, most)
    except reading.TooLong as error:
        return error


def _cut(kind: str, content: _Content, cut: bool, key: str, most: int) -> Iterator[tuple[str, str | bytes]]:
    """Kind and content of the entries for a record: the record itself, with `cut` in pieces if it is long; nothing for
    a blank line of JSON; or what is wrong with it."""
    if isinstance(content, bytes) and (not cut or len(content) <= long_documents.LONG):
        if kind == "file" or not content.isspace():
            yield "file" if kind == "file" else "json", content
        return
    if isinstance(content, str) and len(content) <= min(long_documents.LONG, most // 4):
        yield "text", content
        return
    try:
        if isinstance(content, bytes):
            blocks: Iterable[str] = _long(kind, content, key)
        elif isinstance(content, ValueError):
            raise NoText(str(content))
        else:
            blocks = [content] if isinstance(content, str) else content
            reading.check_size(sum(len(block.encode()) for block in blocks), most)
        for text in long_documents.cut(blocks) if cut else ["".join(blocks)]:
            yield "text", text
    except NotUtf8:
        yield "broken", ""
    except (NoText, reading.TooLong) as error:
        yield "broken", str(error)


def _kind(file: Input, named: bool) -> str:
    """The kind of a file's records, depending on whether the file itself was named or its folder."""
    if isinstance(file, HubSplit):
        return "text"
    suffix = streams.inner_suffix(file)
    if named and suffix == ".json":
        return "array" if streams.begins_with(file, b"[") else "json"
    kinds = {".jsonl": "json", ".ndjson": "json", ".parquet": "parquet"} | ({".csv": "csv"} if named else {})
    return kinds.get(suffix, "text" if named else "file")


class TextDocuments:
    """The documents of a text source, as `TextFiles` finds them; every iteration reads it again from the start.

    A broken line of JSONL is an error. Documents of white space only are left out. With `cut`, a single text file is
    cut in several documents; `key` is that of the text in JSONL, and the column of a Parquet file.

    After an iteration, `num_documents` and `num_bytes` (in UTF-8) count what was read, and `skipped_files` the files
    that are not UTF-8.
    """

    def __init__(self, path: str | Path, *, cut: bool = True, flag: str = "--data.path", key: str = TEXT_KEY) -> None:
        self.path, self._flag = str(path), flag
        self._files = TextFiles([path], flag)
        self._cut, self._key = cut, key
        self.size = sum(self._files.sizes)  # bytes; 0 where that is not known
        self.dominated = self._files.dominated()
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
                valid = f'valid: {{"{self._key}": …}} in UTF-8 on each line'
                raise UserError(f"{where}: {problem}{'' if 'valid: ' in str(problem) else f'; {valid}'}") from None
            if text and not text.isspace():
                self.num_documents += 1
                self.num_bytes += len(text.encode())
                yield where, text
        if not self.num_documents:
            skipped = f" ({self.skipped_files} files are not UTF-8)" if self.skipped_files else ""
            raise UserError(f"{self._flag}: {self.path} contains no text{skipped}; {valid_paths(self._flag)}")

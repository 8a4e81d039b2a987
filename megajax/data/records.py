"""Raw records of text sources: lines of JSONL, rows of Parquet, plain text; compressed or not, read as a stream.

Reading records is separate from taking their texts out of them (`text_of`), so that one process can read for several.
"""

import codecs
import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import IO, Any, Literal, NamedTuple

from megajax.data import compressed
from megajax.data.hub_split import HubSplit
from megajax.data.inputs import Input, find_inputs, readable, size_of
from megajax.data.library import DOCSTRINGS, prose
from megajax.data.pieces import check_length, joined, pieces, separated
from megajax.data.tokenizer import END_OF_TEXT
from megajax.errors import UserError
from megajax.host import reading
from megajax.host.remote import RemoteFile

DOCUMENT_CHARACTERS = 4096  # after these a single text file is cut at the next blank line
TEXT_KEY = "text"  # of a line of JSONL, and column of a Parquet file

_BLOCK_BYTES = 1 << 20
_ROWS = 256  # of a Parquet file in memory at once
_ROWS_BYTES = 1 << 30  # that they may take there: a value that is stored once may stand in all of them


class Record(NamedTuple):
    """One document as read, before its text is extracted.

    Attributes:
        file: index in `TextFiles.files`.
        number: of the line, row or piece, from 1.
        kind: what the content is: the text itself, a line of JSONL, or the bytes of a file.
        content: that.
    """

    file: int
    number: int
    kind: Literal["text", "json", "file"]
    content: str | bytes


class NoText(ValueError):
    """A record that is no text; the message says why."""


class NotUtf8(NoText):
    """A file that is not UTF-8."""


def text_of(record: Record, key: str = TEXT_KEY) -> str:
    """The text of a record.

    Raises:
        NotUtf8: the record is a file that is not UTF-8.
        NoText: the record is a line of JSONL without a text under `key`.
    """
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
    - Any other file is plain text. Where it contains `<|endoftext|>`, that separates its documents. Otherwise it is cut
      in several documents, of which some can be for validation: each ends at the first blank line after 4096
      characters (in a short file: after a sixteenth of it), or, where no blank line follows within three times as many,
      at a line end or a space. Nothing is lost: the pieces joined are the file.

    `.gz` and `.zst` after the name of text or JSONL: the file is compressed. Files and folders may lie on a remote
    store (`megajax/host/remote.py`). `hf://NAME[/CONFIGURATION][:SPLIT][#COLUMN]` is a split of a dataset: one document
    per row (`hub_split.py`).

    Attributes:
        files: all files, in order.
        sizes: bytes of each file on disk; 0 where that is not known.
    """

    def __init__(self, paths: Sequence[str | Path], flag: str) -> None:
        self.files: list[Input] = []
        self._in_folder: list[bool] = []  # such a file of text is one document
        self._of_docstrings: list[bool] = []
        self._flag = flag
        self.sizes: list[int] = []
        for path in paths:
            found, named = find_inputs(str(path), flag)
            self.files += found
            self._in_folder += [not named] * len(found)
            self._of_docstrings += [str(path) == DOCSTRINGS] * len(found)
            with readable(path, flag):
                self.sizes += map(size_of, found)

    def records(self, *, cut: bool = True, key: str = TEXT_KEY) -> Iterator[tuple[Record, int]]:
        """Every record, and how many bytes of its file were read by then.

        With `cut`, a single text file is cut in several documents; `key` is the column of a Parquet file.
        """
        for index, file in enumerate(self.files):
            with readable(file, self._flag):
                yield from self._file_records(index, file, cut, key)

    def _file_records(self, index: int, file: Input, cut: bool, key: str) -> Iterator[tuple[Record, int]]:
        if isinstance(file, HubSplit):
            yield from self._split_records(index, file, key)
            return
        suffix = PurePath(str(file)).suffix.lower()
        kind = "lines" if suffix == ".json" and not self._in_folder[index] else _kind(file)
        if kind == "parquet":
            for number, (text, num_read) in enumerate(_rows(file, self.sizes[index], key, self._flag), start=1):
                yield Record(index, number, "text", text), num_read
            return
        plain = kind == "text" and not self._in_folder[index]
        separate = plain and cut and _contains(file, END_OF_TEXT.encode())
        with compressed.reading(file) as (content, raw):
            if kind == "lines":
                for number, line in enumerate(reading.lines(content, reading.LINE_BYTES), start=1):
                    if line.strip():
                        yield Record(index, number, "json", line), raw.tell()
            elif self._of_docstrings[index]:
                assert isinstance(file, Path)
                for number, text in enumerate(prose(file, reading.whole(content, reading.LINE_BYTES)), start=1):
                    yield Record(index, number, "text", text), raw.tell()
            elif self._in_folder[index]:
                yield Record(index, 1, "file", reading.whole(content, reading.LINE_BYTES)), raw.tell()
            else:
                blocks = _decoded(content, file, self._flag)
                texts: Iterable[str]
                if not cut:
                    texts = [joined(blocks)]
                elif separate:
                    texts = separated(blocks, END_OF_TEXT)
                else:
                    size = self.sizes[index] if content is raw else DOCUMENT_CHARACTERS * 16
                    texts = pieces(blocks, target=min(DOCUMENT_CHARACTERS, size // 16 + 1))
                for number, text in enumerate(texts, start=1):
                    yield Record(index, number, "text", text), raw.tell()

    def _split_records(self, index: int, split: HubSplit, key: str) -> Iterator[tuple[Record, int]]:
        num_read = 0
        for number, text in enumerate(split.rows(key), start=1):
            check_length([text])
            num_read += len(text)
            yield Record(index, number, "text", text), min(num_read, self.sizes[index])


def _kind(file: Path | RemoteFile) -> str:
    kinds = {".jsonl": "lines", ".ndjson": "lines", ".parquet": "parquet"}
    return kinds.get(compressed.inner_suffix(file), "text")


def _contains(file: Path | RemoteFile, wanted: bytes) -> bool:
    end = b""  # of the block before, where what is wanted may begin
    with compressed.reading(file) as (content, _):
        while block := content.read(_BLOCK_BYTES):
            if wanted in end + block:
                return True
            end = block[-len(wanted) :]
    return False


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
            rows = max(1, min(_ROWS, _ROWS_BYTES // _largest_part(table.metadata)))
            for batch in table.iter_batches(batch_size=rows, columns=[key]):
                done += len(batch)
                for value in batch.column(0):
                    text = value.as_py() or ""
                    check_length([text])
                    yield text, size * done // table.metadata.num_rows
    except UnicodeDecodeError as error:
        raise compressed.Damaged(f'a text in column "{key}" is not UTF-8: {error}') from None
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise compressed.Damaged(str(error).splitlines()[0]) from None


def _largest_part(metadata: Any) -> int:
    """Uncompressed bytes of the largest row group of a Parquet file. (Asked for those of a column, Arrow may crash on
    damaged files.)
    """
    return max(1, *(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)), 1)


def _decoded(content: IO[bytes], file: Input, flag: str) -> Iterator[str]:
    """The text of a UTF-8 file in blocks, without a byte order mark; an error names the offset of a bad byte."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    while True:
        block = content.read(_BLOCK_BYTES)
        undecoded = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            place = offset - undecoded + error.start
            raise UserError(
                f"{flag}: {file} is not UTF-8 text (byte 0x{error.object[error.start]:02x} at offset {place}); "
                "valid: UTF-8, for example by iconv"
            ) from None
        yield text.removeprefix("\ufeff") if offset == 0 else text
        if not block:
            return
        offset += len(block)

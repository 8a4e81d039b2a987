"""Small files that would take very long, or all memory, where time and memory were not bounded: readers of one file."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from mutations import Reader

from megajax.data.tasks.registry import TaskConfig
from megajax.data.tasks.samples import read_records
from megajax.data.text.long_documents import LONG
from megajax.data.text.records import TextDocuments
from megajax.preparation.cleaning import clean
from megajax.preparation.contamination import TestSets

_GRAMS = TestSets.collect([["one two three four five six seven eight"]])


def _quotes(key: str = "text") -> bytes:
    """Nested brackets, and 150,000 escaped quotes of a string without an end."""
    return b'{"' + key.encode() + b'": ' + b"[" * 65 + b'\\"' * 150_000 + b"]" * 65 + b"}\n"


def zstd_frame(blocks: int, window_log: int) -> bytes:
    """An archive of so many blocks of 128 KiB, 4 bytes each, with a window of 2^window_log bytes."""
    block = ((1 << 17) << 3 | 1 << 1).to_bytes(3, "little") + b"a"
    header = bytes.fromhex("28b52ffd00") + bytes([(window_log - 10) << 3])
    return header + block * blocks + bytes.fromhex("010000")


def _equal_rows(file: Path, text: str, groups: int = 1) -> None:
    """Groups of a million rows, for which one text is stored."""
    rows = 1 << 20
    zeros = [None, pa.py_buffer(bytes(4 * rows))]
    column = pa.DictionaryArray.from_buffers(pa.dictionary(pa.int32(), pa.string()), rows, zeros, pa.array([text]))
    table = pa.table({"text": column})
    with pq.ParquetWriter(file, table.schema, compression="zstd", store_schema=False) as writer:
        for _ in range(groups):
            writer.write_table(table)


def _cleaned(file: Path) -> None:
    text = clean(file.read_text(), fix_unicode=True, clean_newlines=True)
    _GRAMS.found_in(text)
    _GRAMS.spans(text)


def _documents(file: Path) -> None:
    assert max(map(len, TextDocuments(file))) <= LONG


def _of(name: str, file: str, make: bytes | str | Callable[[Path], object], read: Callable[[Path], object]) -> Reader:
    def write(folder: Path) -> None:
        content = make if isinstance(make, bytes) else make.encode() if isinstance(make, str) else None
        (folder / file).write_bytes(content) if content is not None else make(folder / file)  # type: ignore[operator]

    return Reader(f"hostile: {name}", write, lambda folder: read(folder / file), (), most=1, short=1)


_LONG = json.dumps({"meta": ["\\\n"] * 100, "text": "ab\n" * (3 * LONG)})
HOSTILE = [
    _of("quotes without an end, JSONL", "a.jsonl", _quotes(), _documents),
    _of("quotes without an end, SQuAD", "a.json", _quotes("data"),
        lambda file: read_records("squad1", [str(file)], TaskConfig(), "--data.train")),
    _of("a long line of JSON", "a.jsonl", _LONG, _documents),
    _of("a long line of JSON with short escapes", "a.jsonl", '{"text": "' + "\\ud83d\\ude00" * LONG + '"}', _documents),
    _of("a window of 2 GiB", "a.txt.zst", zstd_frame(20_000, 31), _documents),
    _of("equal rows of Parquet", "a.parquet", functools.partial(_equal_rows, text="a", groups=40), _documents),
    _of("a long value in all rows", "a.parquet", functools.partial(_equal_rows, text="a b " * (1 << 16)), _documents),
    _of("spaces", "a.txt", "a" + " " * LONG + "b", _cleaned),
    _of("entities of entities", "a.txt", "&" + "amp;" * (LONG >> 4), _cleaned),
    _of("combining marks", "a.txt", "a" + "\u0301\u0323" * (LONG >> 4), _cleaned),
]  # fmt: skip

"""Parts of files, read one by one, hold the records of the whole file, each once and with its number."""

import gzip
import json
import struct
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from backports import zstd

from megajax.data.text.archives import member_borders
from megajax.data.text.parts import as_json, from_json, parts_of
from megajax.data.text.records import END, Record, TextFiles

TEXTS = ["\ufeffbegin", *(f"document {n}: Füße, 数\n" * (n * 37 % 400) for n in range(150)), "a" * 30_000, "end"]


def bgzip(content: bytes) -> bytes:
    """A `.gz` file of members that say their size."""
    found = b""
    for start in [*range(0, len(content), 5000), len(content)]:
        packing = zlib.compressobj(wbits=-15)
        block = content[start : start + 5000]
        packed = packing.compress(block) + packing.flush()
        size = 12 + 6 + len(packed) + 8
        extra = b"BC" + struct.pack("<HH", 2, size - 1)
        found += b"\x1f\x8b\x08\x04\0\0\0\0\0\xff" + struct.pack("<H", len(extra)) + extra + packed
        found += struct.pack("<II", zlib.crc32(block), len(block))
    return found


def write(file: Path) -> Path:
    lines = ("\ufeff" + "\n".join(["", *(json.dumps({"text": text}) for text in TEXTS), "", "{broken"])).encode()
    if file.suffix == ".parquet":
        pq.write_table(pa.table({"text": TEXTS}), file, row_group_size=17)
    elif file.suffix == ".zst":
        skippable = struct.pack("<II", 0x184D2A53, 3) + b"abc"
        frames = [zstd.compress(lines[start : start + 7777]) for start in range(0, len(lines), 7777)]
        file.write_bytes(skippable.join(frames))
    elif file.suffix == ".gz":
        file.write_bytes(bgzip(lines) if "members" in file.name else gzip.compress(lines))
    else:
        separator = "\n<|endoftext|>" if "separated" in file.name else "\n\n"
        file.write_bytes(lines if file.suffix == ".jsonl" else separator.join(TEXTS).encode())
    return file


@pytest.mark.parametrize(
    ("name", "divisible"),
    [
        ("a.jsonl", True),
        ("a.parquet", True),
        ("a.jsonl.zst", True),
        ("members.jsonl.gz", True),
        ("a.jsonl.gz", False),
        ("separated.txt", True),
        ("pieces.txt", True),
        ("pieces.txt.gz", False),
    ],
)
@pytest.mark.parametrize("wanted", [700, 20_000, 1 << 22])
def test_parts_hold_what_the_file_holds(tmp_path, name, divisible, wanted, monkeypatch):
    """Whether parts begin within a line, a line spans several of them, or one ends with a line."""
    monkeypatch.setattr("megajax.data.text.streams._BLOCK_BYTES", 999)
    monkeypatch.setattr("megajax.data.text.parts._BLOCK_BYTES", 999)
    files = from_json(json.loads(json.dumps(as_json(TextFiles([write(tmp_path / name)], "INPUT")))))
    expected = [record for record, _ in files.records()]
    parts = parts_of(files, 0, wanted)
    if wanted == 700:
        assert (len(parts) > 1) == divisible
    found, before = list[Record](), 0
    for part in parts:
        *records, end = files.records_in(part, key="text", most=1 << 20)
        found += [record._replace(number=record.number + before) for record in records]
        assert end.kind == END
        before += end.number
    assert found == expected


@pytest.mark.parametrize("suffix", [".zst", ".gz"])
def test_what_is_no_archive_has_no_members(tmp_path, suffix):
    whole = write(tmp_path / f"members.jsonl{suffix}").read_bytes()
    contents = [b"", b"\x1f", whole[:-30], whole[:1000] + b"\0" * 2000, b"(\xb5/\xfd" + b"\xff" * 60, whole + b"rest"]
    for content in contents:
        (tmp_path / f"a{suffix}").write_bytes(content)
        with (tmp_path / f"a{suffix}").open("rb") as file:
            borders = member_borders(file, len(content), 10)
        assert borders == sorted(borders) and borders[0] == 0 and borders[-1] == len(content)

"""Divide the input into pieces; each becomes a shard. A piece consists of parts of files, which the worker that cleans
it reads directly. Compressed or streamed input is read once, by one task per member or row group, and its records are
copied to the work folder in pieces, because they may be many times as large as the file."""

import functools
import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from megajax.data.text.parts import as_json, from_json, needs_copy, needs_look, parts_of
from megajax.data.text.records import END, FilePart, Record, TextFiles
from megajax.host import reading
from megajax.preparation.prepare_options import PrepareOptions
from megajax.preparation.running import Show
from megajax.preparation.shards import WorkFolder, opened
from megajax.preparation.workers import Workers

# Raw text per shard: 1/64 of the input, so that all cores have work, but 1 to 4 MB; 1/4096 of a large input, but at
# most 32 MB.
SHARD_BYTES = 1 << 20, 4 << 20, 32 << 20
_SHARDS = 64, 4096
_RECORDS = 1 << 16  # most records in a copied piece
_COPY = -1  # instead of a file's number: the piece is in the work folder
_KINDS = ("json", "file", "broken", "text", END)
_LARGEST = 1 << 30  # most bytes in the list of files


def divide(files: TextFiles, work: WorkFolder, options: PrepareOptions, workers: Workers, show: Show) -> int:
    """Write which parts of the input each piece consists of; returns the number of pieces."""
    if work.has("pieces", 0):
        return int(work.summary("pieces", 0)["pieces"])
    least, usual, most = SHARD_BYTES
    size = sum(files.sizes)
    wanted = max(min(max(size // _SHARDS[0], least), usual), min(size // _SHARDS[1], most))
    with work.writing(work / "input.json") as file:
        file.write(json.dumps(as_json(files)).encode())
    looks = [file for file in range(len(files.files)) if needs_look(files, file, wanted)]
    found = dict(zip(looks, workers.run("reading", look, ((work, file, wanted) for file in looks)), strict=True))
    parts = ([FilePart(*part) for part in found[file]] if file in found else parts_of(files, file, wanted) for file in
             range(len(files.files)))  # fmt: skip
    units = list(_units(files, itertools.chain.from_iterable(parts), wanted))
    copied = [unit for unit in units if needs_copy(files, unit[0].file)]
    show.begin("reading", "reading", len(copied))
    pieces = [(work, index, unit, wanted, options) for index, unit in enumerate(copied)]
    counts = iter(enumerate(workers.run("reading", copy, pieces)))
    rows, starts = list[FilePart](), [0]
    for unit in units:
        if needs_copy(files, unit[0].file):
            index, count = next(counts)
            show.advance(index + 1)
            rows += [FilePart(_COPY, index, piece) for piece in range(count)]
            starts += range(starts[-1] + 1, starts[-1] + count + 1)
        else:
            rows += unit
            starts.append(len(rows))
    assert next(counts, None) is None
    arrays = {"parts": np.array(rows, np.int64).reshape(-1, 4), "starts": np.array(starts, np.int64)}
    work.save("pieces", 0, arrays, {"pieces": len(starts) - 1})
    return len(starts) - 1


def _units(files: TextFiles, parts: Iterable[FilePart], wanted: int) -> Iterator[list[FilePart]]:
    """Consecutive parts; small ones are grouped."""
    unit, size = list[FilePart](), 0
    for span in parts:
        if unit and (size >= wanted or needs_copy(files, span.file) != needs_copy(files, unit[0].file)):
            yield unit
            unit, size = [], 0
        unit.append(span)
        whole = not span.begin and not span.end
        size += files.sizes[span.file] if whole else wanted
        size += wanted * (whole and files.sizes[span.file] == 0 and needs_copy(files, span.file))  # its size is unknown
    if unit:
        yield unit


def look(work: WorkFolder, file: int, wanted: int) -> list[FilePart]:
    """Divide a file into parts."""
    return parts_of(files_of(work), file, wanted)


def copy(work: WorkFolder, index: int, unit: list[FilePart], wanted: int, options: PrepareOptions) -> int:
    """Copy the records of parts to the work folder, in pieces of about `wanted` bytes; returns their number."""
    if work.has("copied", index):
        return int(work.summary("copied", index)["pieces"])
    files = files_of(work)
    count, begun, size = 0, list[Record](), 0
    file, before = -1, 0  # the current file, and the number of its records in earlier pieces
    for span in unit:
        for record in files.records_in(FilePart(*span), key=options.text_key, most=options.max_document << 20):
            if begun and record.kind != END and (size >= wanted or len(begun) >= _RECORDS):
                last = begun[-1]
                _save_records(work, index, count, [*begun, last._replace(kind=END, content="")])
                before += last.number
                count, begun, size = count + 1, [], 0
            if record.file != file:
                file, before = record.file, 0
            begun.append(record._replace(number=record.number - before))
            size += len(record.content)
    _save_records(work, index, count, begun)
    work.save("copied", index, {}, {"pieces": count + 1})
    return count + 1


def _save_records(work: WorkFolder, index: int, piece: int, records: list[Record]) -> None:
    contents = [each.content.encode() if isinstance(each.content, str) else each.content for each in records]
    rows = [(each.file, each.number, _KINDS.index(each.kind), len(content)) for each, content in
            zip(records, contents, strict=True)]  # fmt: skip
    content = np.frombuffer(b"".join(contents), np.uint8)
    work.save(f"raw-{index:06}", piece, {"rows": np.array(rows, np.int64).reshape(-1, 4), "content": content})


def records_of(work: WorkFolder, piece: int, options: PrepareOptions) -> Iterator[Record]:
    """A piece's records, numbered in each file from the beginning of the piece. END follows each part's records."""
    parts, starts = _pieces(work)
    for span in map(FilePart._make, parts[starts[piece] : starts[piece + 1]].tolist()):
        if span.file != _COPY:
            yield from files_of(work).records_in(span, key=options.text_key, most=options.max_document << 20)
            continue
        rows, array = work.load(f"raw-{span.begin:06}", span.end, "rows", "content")
        content, offset = memoryview(array.tobytes()), 0
        for file, nth, kind, size in rows.tolist():
            data = bytes(content[offset : offset + size])
            offset += size
            yield Record(file, nth, _KINDS[kind], data if kind < 2 else data.decode())


def forget(work: WorkFolder, piece: int) -> None:
    """Remove the copy of a piece that has been cleaned."""
    parts, starts = _pieces(work)
    for file, number, place, _ in parts[starts[piece] : starts[piece + 1]].tolist():
        if file == _COPY:
            work.remove(f"raw-{number:06}", place)


@functools.lru_cache(maxsize=2)
def _pieces(work: WorkFolder) -> tuple[Any, Any]:
    parts, starts = work.load("pieces", 0, "parts", "starts")
    return parts, starts


@functools.lru_cache(maxsize=2)
def files_of(work: WorkFolder) -> TextFiles:
    """The input's files."""
    with opened(work.wait_for("input.json")) as file:
        return from_json(json.loads(reading.whole(file, _LARGEST)))

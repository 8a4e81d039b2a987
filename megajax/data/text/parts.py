"""Parts of text files that can be read independently, and the files of a source as JSON, with which other machines find
them."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megajax.data.text import parquet, streams
from megajax.data.text.archives import member_borders
from megajax.data.text.hub_split import HubSplit
from megajax.data.text.inputs import readable
from megajax.data.text.records import DOCUMENT_CHARACTERS, FilePart, TextFiles
from megajax.data.text.tokenizer import END_OF_TEXT
from megajax.host import reading
from megajax.host.remote import RemoteFile

_BLOCK_BYTES = 1 << 20
_MARK = b"\xef\xbb\xbf"  # of the byte order


def needs_copy(files: TextFiles, file: int) -> bool:
    """Whether a file may yield more bytes than it has, because it is compressed or streamed, or has no parts."""
    return (
        files.kinds[file] in ("parquet", "array", "csv")
        or isinstance(files.files[file], HubSplit)
        or streams.is_compressed(files.files[file])
    )


def needs_look(files: TextFiles, file: int, wanted: int) -> bool:
    """Whether a file must be read to find its parts: it is large, and neither lines of JSON nor a single document."""
    return (
        files.sizes[file] > wanted
        and not isinstance(files.files[file], HubSplit)
        and (files.kinds[file] in ("text", "parquet") or (files.kinds[file] == "json" and needs_copy(files, file)))
    )


def parts_of(files: TextFiles, file: int, wanted: int) -> list[FilePart]:
    """The parts of a file, each of about `wanted` bytes or more: lines of JSON, documents or pieces of a text, row
    groups of Parquet, members of an archive of lines. A file without such parts is one part."""
    where, size, kind = files.files[file], files.sizes[file], files.kinds[file]
    copied = needs_copy(files, file)
    if size <= wanted or isinstance(where, HubSplit):
        return [FilePart(file)]
    if kind == "json" and not copied:
        count = -(-size // wanted)
        borders = [size * number // count for number in range(count + 1)]
        return _between(file, borders)
    with readable(where, files.flag):
        if kind == "parquet":
            groups = parquet.row_groups(where)
            return _between(file, [*_row_group_borders(groups, wanted)]) if groups else [FilePart(file)]
        if kind == "json" and isinstance(where, Path):
            with reading.open_file(where) as content:
                return _between(file, member_borders(content, size, wanted // 4))  # they are larger when unpacked
        if kind == "text" and not copied:
            if streams.contains(where, END_OF_TEXT.encode()):
                return [FilePart(file, begin, end, True) for begin, end in _separated(where, wanted)]
            return [FilePart(file, begin, end) for begin, end in _pieces(where, files.flag, wanted)]
    return [FilePart(file)]


def _between(file: int, borders: list[int]) -> list[FilePart]:
    if len(borders) <= 2:
        return [FilePart(file)]
    return [FilePart(file, begin, end) for begin, end in itertools.pairwise([*borders[:-1], 0])]


def _row_group_borders(sizes: list[int], wanted: int) -> Iterator[int]:
    begun = 0
    yield 0
    for index, size in enumerate(sizes, start=1):
        begun += size
        if begun >= wanted or index == len(sizes):
            yield index
            begun = 0


def _separated(file: Path | RemoteFile, wanted: int) -> Iterator[tuple[int, int]]:
    """Where groups of whole documents, of this many bytes each, begin and end in a text; separators are between
    them."""
    separator = END_OF_TEXT.encode()
    begin = offset = 0  # of the documents, and of `data`
    data = b""
    with streams.opened(file) as (content, _):
        while block := content.read(_BLOCK_BYTES):
            data += block
            while (found := data.find(separator, max(begin + wanted - offset, 0))) >= 0:
                yield begin, offset + found
                begin = offset + found + len(separator)
            read = max(len(data) - len(separator) + 1, 0)
            data, offset = data[read:], offset + read
    yield begin, 0


def _pieces(file: Path | RemoteFile, flag: str, wanted: int) -> Iterator[tuple[int, int]]:
    """Where groups of whole pieces, of this many bytes each, begin and end in a text without separators."""
    begin = end = 0
    with streams.opened(file) as (content, _):
        end = len(_MARK) if content.read(len(_MARK)) == _MARK else 0
    with streams.opened(file) as (content, _):
        pieces = streams.pieces(streams.decoded(content, file, flag), DOCUMENT_CHARACTERS)
        for piece in pieces:
            if end - begin >= wanted:
                yield begin, end
                begin = end
            end += len(piece.encode())
    yield begin, 0


def as_json(files: TextFiles) -> dict[str, Any]:
    """The files as JSON, local ones by their absolute paths."""

    def described(file: Any) -> Any:
        if isinstance(file, Path):
            return str(file.absolute())
        return [file.url, file.size, file.version] if isinstance(file, RemoteFile) else [file.url]

    return {
        "files": [described(file) for file in files.files],
        "sizes": files.sizes,
        "kinds": files.kinds,
        "flag": files.flag,
    }


def from_json(content: dict[str, Any]) -> TextFiles:
    """The inverse of `as_json`."""
    files = TextFiles([], content["flag"])
    for file in content["files"]:
        if isinstance(file, str):
            files.files.append(Path(file))
        else:
            files.files.append(RemoteFile(*file) if len(file) == 3 else HubSplit.parse(file[0], files.flag))
    files.sizes, files.kinds = content["sizes"], content["kinds"]
    return files

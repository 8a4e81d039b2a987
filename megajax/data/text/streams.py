"""Read files as streams: their bytes (`.gz`, `.zst`, `.bz2` and `.xz` are unpacked), their text, and its documents."""

import bz2
import codecs
import contextlib
import functools
import gzip
import io
import itertools
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePath
from typing import IO, Any

from megajax.core.errors import UserError
from megajax.host import reading
from megajax.host.remote import RemoteFile

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_BLOCK_BYTES = 1 << 20
_BLANK_LINES = re.compile(r"\n(?:[ \t\r]*\n)+")
_WINDOW = 29  # binary logarithm of the largest window of an archive, which is held in memory
_MARK = "\ufeff"  # of the byte order
_DAMAGES = (EOFError, zlib.error, gzip.BadGzipFile, zstd.ZstdError, lzma.LZMAError)


class _Xz(io.RawIOBase):
    """The content of an `.xz` file: like `lzma.open`, but with a limit on memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._left = file, b""
        self._stream: lzma.LZMADecompressor | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = b""
        while not block:
            data = self._left
            if not data and (self._stream is None or self._stream.needs_input):
                data = self._file.read(_BLOCK_BYTES)
                if not data and self._stream:
                    raise EOFError("its end is missing")
                data = data if self._stream else data.lstrip(b"\0")  # streams are padded with these
                if not data:
                    return 0
            self._stream = self._stream or lzma.LZMADecompressor(memlimit=(1 << _WINDOW) + (1 << 26))
            block, self._left = self._stream.decompress(data, len(buffer)), b""
            if self._stream.eof:
                self._left, self._stream = self._stream.unused_data.lstrip(b"\0"), None
        buffer[: len(block)] = block
        return len(block)


_OPEN: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open,
    ".zst": functools.partial(zstd.open, options={zstd.DecompressionParameter.window_log_max: _WINDOW}),
    ".bz2": bz2.open,
    ".xz": lambda file: io.BufferedReader(_Xz(file), _BLOCK_BYTES),
}


class Undecodable(Exception):
    """A compressed file that is truncated, or not in the format that its name says."""


def inner_suffix(file: object) -> str:
    """The suffix of a file's name in lower case, without that of the compression: `.jsonl` for `a.JSONL.zst`."""
    name = PurePath(str(file))
    return (name.with_suffix("") if name.suffix.lower() in _OPEN else name).suffix.lower()


def is_compressed(file: object) -> bool:
    """Whether a file's name is that of an archive."""
    return PurePath(str(file)).suffix.lower() in _OPEN


@contextlib.contextmanager
def opened(file: Path | RemoteFile, begin: int = 0, end: int = 0) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a file to read: its content, uncompressed, and the file on disk, whose `tell` says how much was read. Of the
    file on disk only the bytes from `begin` to `end` (0: to its end) are read, in an archive whole members. Raises
    `Undecodable`, or an `OSError` if it cannot be opened or read."""
    uncompressed = _OPEN.get(PurePath(str(file)).suffix.lower(), contextlib.nullcontext)
    with file.open() if isinstance(file, RemoteFile) else reading.open_file(file) as raw:
        try:
            raw.seek(begin)
            with uncompressed(io.BufferedReader(_Part(raw, end - begin)) if end else raw) as content:
                yield content, raw
        except (*_DAMAGES, OSError) as error:
            if not isinstance(error, _DAMAGES) and str(error) != "Invalid data stream":  # so says bz2
                raise
            packers = {"too much memory": f"zstd --long={_WINDOW}", "Memory usage limit": "xz -9"}
            packer = next((packer for words, packer in packers.items() if words in str(error)), "")
            anew = f" (its window is larger than 2^{_WINDOW} bytes: {packer} packs it anew)" if packer else ""
            raise Undecodable(f"{error}{anew}") from None


class _Part(io.RawIOBase):
    """The next `size` bytes of a file."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self._left = file, size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self._file.read(min(len(buffer), self._left))
        buffer[: len(block)] = block
        self._left -= len(block)
        return len(block)


@contextlib.contextmanager
def opened_lines(file: Path | RemoteFile, begin: int, end: int) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a file as `opened` does, to read the lines that belong to these bytes: those that begin after `begin`, or
    with the file, up to `end`. Of parts that follow each other every line belongs to one."""
    with contextlib.ExitStack() as stack:
        content, raw = stack.enter_context(opened(file, begin, end))
        line = b"\n" if not begin else b" "
        while line and not line.endswith(b"\n"):
            line = content.readline(_BLOCK_BYTES)
        if not line:  # the whole part is inside one line
            yield io.BytesIO(), raw
        elif not end:
            yield content, raw
        else:
            yield io.BufferedReader(_WithLine(content, lambda: stack.enter_context(opened(file, end))[0])), raw


class _WithLine(io.RawIOBase):
    """A file's content and, after it, another one's first line."""

    def __init__(self, content: IO[bytes], after: Callable[[], IO[bytes]]) -> None:
        self._content, self._after = content, after
        self._is_after = self._is_done = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = b"" if self._is_after else self._content.read(len(buffer))
        if not block and not self._is_done:
            if not self._is_after:
                self._content, self._is_after = self._after(), True
            block = self._content.readline(len(buffer))
            self._is_done = not block or block.endswith(b"\n")
        buffer[: len(block)] = block
        return len(block)


def begins_with(file: Path | RemoteFile, wanted: bytes) -> bool:
    """Whether a file's content begins with these bytes, apart from a byte order mark and white space."""
    with opened(file) as (content, _):
        return content.read(_BLOCK_BYTES).removeprefix(codecs.BOM_UTF8).lstrip().startswith(wanted)


def contains(file: Path | RemoteFile, wanted: bytes) -> bool:
    """Whether these bytes are somewhere in a file's content."""
    end = b""  # end of the previous block, where the wanted bytes may begin
    with opened(file) as (content, _):
        while block := content.read(_BLOCK_BYTES):
            if wanted in end + block:
                return True
            end = block[-len(wanted) :]
    return False


def decoded(content: IO[bytes], file: object, flag: str, offset: int = 0) -> Iterator[str]:
    """The text of a UTF-8 file, or of a part that begins at `offset`, in blocks, without a byte order mark; an error
    names the offset of a bad byte. Of an archive, whose members may be files with marks, without any of them."""
    blocks = _decoded(content, file, flag, offset)
    if is_compressed(file):
        yield from without_marks(blocks)
    else:
        yield from (text.removeprefix(_MARK) if not offset and not n else text for n, text in enumerate(blocks))


def without_marks(blocks: Iterable[str]) -> Iterator[str]:
    """The blocks of a text without byte order marks at the beginning of lines, which stay where files are joined."""
    begins = True
    for text in blocks:
        found = text.removeprefix(_MARK) if begins else text
        begins = found.endswith("\n") if text else begins
        yield found.replace(f"\n{_MARK}", "\n")


def _decoded(content: IO[bytes], file: object, flag: str, offset: int) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    while True:
        block = content.read(_BLOCK_BYTES)
        undecoded = len(decoder.getstate()[0])
        try:
            text = checked(decoder.decode(block, final=not block))
        except UnicodeDecodeError as error:
            place = offset - undecoded + error.start
            raise UserError(
                f"{flag}: {file} is not UTF-8 text (byte 0x{error.object[error.start]:02x} at offset {place}); "
                "valid: UTF-8, for example by iconv"
            ) from None
        yield text
        if not block:
            return
        offset += len(block)


def checked(text: str) -> str:
    """A decoded text itself; a NUL, which only binary files have, is a `UnicodeDecodeError`."""
    if "\0" in text:
        before = text[: text.index("\0")].encode()
        raise UnicodeDecodeError("utf-8", before + b"\0", len(before), len(before) + 1, "a NUL")
    return text


def separated(blocks: Iterable[str], separator: str, most: int) -> Iterator[list[str]]:
    """The documents between separators, each in blocks; of a document with more than `most` bytes, only that many and
    one more block."""
    parts: list[str] = []  # of a text that has not ended
    size = 0  # of them in UTF-8
    tail = ""  # its end, where a separator may begin
    for block in blocks:
        first, *others = (tail + block).split(separator)
        for text in others:
            yield _stripped([*parts, first])
            parts, size, first = [], 0, text
        if size <= most:
            parts.append(first[: -len(separator)])
            size += len(parts[-1].encode())
        tail = first[-len(separator) :]
    yield _stripped([*parts, tail])


def _stripped(parts: list[str]) -> list[str]:
    """The blocks of a text without the ends of lines before and after it."""
    for end, strip in (0, str.lstrip), (-1, str.rstrip):
        while parts and not (text := strip(parts[end], "\r\n")):
            parts.pop(end)
        if parts:
            parts[end] = text
    return parts


def joined(blocks: Iterable[str], most: int) -> str:
    """One document from several blocks; `TooLong` if it has more than `most` bytes in UTF-8."""
    parts: list[str] = []
    size = 0
    for block in blocks:
        parts.append(block)
        size += len(block.encode())
        reading.check_size(size, most)
    return "".join(parts)


def pieces(blocks: Iterable[str], target: int) -> Iterator[str]:
    """A text in pieces of about `target` characters, at most four times as many."""
    longest = 4 * target
    pending, start = "", 0
    for block in itertools.chain(blocks, [None]):
        pending, start = pending[start:] + (block or ""), 0
        while len(pending) - start >= (1 if block is None else longest):
            end = _end_of_piece(pending, start + target, start + longest)
            yield pending[start:end]
            start = end


def _end_of_piece(text: str, earliest: int, latest: int) -> int:
    """Where to cut, from `earliest` to `latest`: after blank lines, without those after a line, else after a word."""
    blank_lines = _BLANK_LINES.search(text, earliest, latest)
    if blank_lines:
        return blank_lines.end()
    for separator in "\n", " ":
        found = text.find(separator, earliest, latest)
        if found >= 0:
            return found + 1
    return latest

"""Files read as a stream of bytes, `.gz` and `.zst` uncompressed on the way."""

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import IO, Any

from megajax.reading import open_file
from megajax.remote import RemoteFile

SUFFIXES = (".gz", ".zst")

_BLOCK_BYTES = 1 << 20
_ZSTD_BYTES = 1 << 14  # read at a time; uncompressed, they may take thousands of times as much memory


class Damaged(Exception):
    """A compressed file that is truncated or not what its name says."""


@contextlib.contextmanager
def reading(file: Path | RemoteFile) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a file to read: its content, uncompressed, and the file on disk, whose `tell` says how much was read.

    Raises:
        Damaged: while reading: the file is truncated or not what its name says.
        OSError: the file cannot be opened or read.
    """
    suffix = PurePath(str(file)).suffix.lower()
    with file.open() if isinstance(file, RemoteFile) else open_file(file) as raw:
        try:
            if suffix == ".gz":
                with gzip.open(raw, "rb") as content:
                    yield content, raw  # type: ignore[misc]
            elif suffix == ".zst":
                with io.BufferedReader(_Zstd(raw), _BLOCK_BYTES) as content:
                    yield content, raw
            else:
                yield raw, raw
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise Damaged(str(error)) from None


class _Zstd(io.RawIOBase):
    """The content of Zstandard frames in order. A truncated file is an error, unlike in the package's own reader."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw, self._pending, self._frame = raw, memoryview(b""), self._new_frame()
        self._inside = False  # a frame that has begun and not ended

    @staticmethod
    def _new_frame() -> Any:
        import zstandard

        return zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        import zstandard

        while not self._pending:
            if self._frame.eof:
                block, self._frame, self._inside = self._frame.unused_data, self._new_frame(), False
            else:
                block = b""
            block = block or self._raw.read(_ZSTD_BYTES)
            if not block:
                if self._inside:
                    raise EOFError("the last frame has no end")
                return 0
            self._inside = True
            try:
                self._pending = memoryview(self._frame.decompress(block))
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from None
        count = min(len(buffer), len(self._pending))
        buffer[:count], self._pending = self._pending[:count], self._pending[count:]
        return count

"""Files read as a stream of bytes, `.gz` and `.zst` uncompressed on the way."""

import contextlib
import gzip
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import IO

from megajax.host.reading import open_file
from megajax.host.remote import RemoteFile

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_SUFFIXES = (".gz", ".zst")
_LONG_WINDOWS: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 31}  # files of `zstd --long=31`


class Damaged(Exception):
    """A compressed file that is truncated or not what its name says."""


def inner_suffix(file: object) -> str:
    """The suffix of a file's name in lower case, that of the compression left out: `.jsonl` of `a.JSONL.zst`."""
    name = PurePath(str(file))
    return (name.with_suffix("") if name.suffix.lower() in _SUFFIXES else name).suffix.lower()


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
                with zstd.open(raw, "rb", options=_LONG_WINDOWS) as content:
                    yield content, raw  # type: ignore[misc]
            else:
                yield raw, raw
        except (EOFError, zlib.error, gzip.BadGzipFile, zstd.ZstdError) as error:
            raise Damaged(str(error)) from None

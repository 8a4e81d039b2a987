"""Files on remote stores, such as gs://bucket/file and s3://bucket/file, found and streamed with fsspec, and models on
the Hugging Face hub.

Only runs are written to remote stores (`runs/store.py`). A prepared dataset is memory-mapped, so it must be on a file
system.
"""

import contextlib
import errno
import io
import logging
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from megajax.core.errors import RunError, UserError
from megajax.host import reading
from megajax.host.paths import scheme

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
SCHEMES = ("http", "https", "gs", "s3", "hf", "file")  # those of fsspec that docs/data.md names
_PACKAGES = {"gs": "'megajax[gcs]'", "s3": "'megajax[s3]'", "http": "aiohttp requests", "https": "aiohttp requests"}
_UNRESOLVED = re.compile(
    r"name resolution|NameResolutionError|Name or service not known|nodename nor servname|DNS server"
)
_VERSIONS = ("etag", "ETag", "generation", "md5Hash", "mtime", "LastModified", "created")  # each store has one of them
_LOUD = ("gcsfs", "s3fs")  # they log what they raise, with full tracebacks
_BLOCK_BYTES = 1 << 20
_VALID = f"valid: {', '.join(f'{name}://' for name in SCHEMES)}, or a path on a file system"


@dataclass(frozen=True)
class RemoteFile:
    """A file on a remote store, as it was when found."""

    url: str  # such as gs://bucket/folder/file.jsonl.gz
    size: int  # in bytes
    version: str  # changes when the file does, in the store's own terms; empty if the store gives none

    def __str__(self) -> str:
        return self.url

    def open(self) -> IO[bytes]:
        """Open the file for reading, with seeking. All errors of its library, also while reading, become `OSError`."""
        system, path = file_system(self.url, "")
        with os_errors(self.url):
            return io.BufferedReader(_Stream(system.open(path, "rb"), self.url), _BLOCK_BYTES)


def find(url: str, flag: str) -> tuple[list[RemoteFile], bool]:
    """The file at a URL, or all files below it except hidden ones, sorted by path; and whether the URL is a single
    file."""
    system, path = file_system(url, flag)
    try:
        try:
            entry = system.info(path)
        except FileNotFoundError as error:
            if _is_unresolved(error):  # fsspec reports an unknown host as a missing file
                raise
            return [], False
        if entry["type"] == "file":
            return [_described(system, entry)], True
        below = system.find(path, detail=True).values()
        inside = {PurePosixPath(info["name"]): info for info in below if info["type"] == "file"}
        depth = len(PurePosixPath(entry["name"]).parts)
        shown = [name for name in inside if not any(part.startswith(".") for part in name.parts[depth:])]
        return [_described(system, inside[name]) for name in sorted(shown, key=lambda name: name.parts)], False
    except Exception as error:  # from the store's library: no network, no permission, no such bucket
        raise UserError(f"{flag} {url}: cannot be read: {reason(error)}; valid: a readable URL") from None


def read_bytes(url: str, flag: str) -> bytes:
    """The contents of a small file."""
    files, is_file = find(url, flag)
    if not is_file:
        problem = "is a folder" if files else "does not exist"
        raise UserError(f"{flag} {url} {problem}; valid: a file")
    try:
        with files[0].open() as content:
            return reading.whole(content, reading.SMALL_BYTES)
    except (OSError, reading.TooLong) as error:
        raise UserError(f"{flag} {url}: cannot be read: {reason(error)}; valid: a file that you may read") from None


def file_system(url: str, flag: str, **options: Any) -> tuple[Any, str]:
    """fsspec's file system for a URL, with its `options`, and the path in it; an error if its library is not
    installed."""
    if scheme(url) not in SCHEMES:
        raise UserError(f"{flag} {url}: {url.partition(':/')[0]}:// is not supported; {_VALID}")
    import fsspec

    for name in _LOUD:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        return fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        packages = _PACKAGES.get(scheme(url))
        valid = f"valid: pip install {packages}, or a path on a file system" if packages else _VALID
        raise UserError(f"{flag} {url}: {reason(error)}; {valid}") from None
    except Exception as error:  # an unknown scheme, or no credentials
        raise UserError(f"{flag} {url}: {reason(error)}; {_VALID}") from None


def _described(system: Any, info: Mapping[str, Any]) -> RemoteFile:
    version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
    return RemoteFile(system.unstrip_protocol(info["name"]), int(info.get("size") or 0), version)


@contextlib.contextmanager
def os_errors(url: str) -> Iterator[None]:
    """Turn errors of the store's library into `OSError`s with a text."""
    try:
        yield
    except (UserError, RunError):
        raise
    except Exception as error:
        kind = type(error) if isinstance(error, FileNotFoundError | FileExistsError) else OSError
        raise kind(errno.EIO, getattr(error, "strerror", None) or reason(error), url) from None


class _Stream(io.RawIOBase):
    """A remote file whose errors are `OSError`s."""

    def __init__(self, file: Any, url: str) -> None:
        self._file, self._url = file, url

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with os_errors(self._url):
            block = self._file.read(len(buffer))
        buffer[: len(block)] = block
        return len(block)

    def seek(self, offset: int, whence: int = 0) -> int:
        with os_errors(self._url):
            return self._file.seek(offset, whence)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def is_hub_name(text: str) -> bool:
    """Whether a text can be the name of a model on the hub, such as `openai-community/gpt2`."""
    return _HUB_NAME.fullmatch(text) is not None


def download(name: str, patterns: Sequence[str], why: str, valid: str) -> Path:
    """A local folder with those files of a model on the hub that match one of the shell `patterns`. Error messages
    begin with `why`, which says why the hub is used, and end with `valid`."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(f"{why}, and huggingface_hub is not installed; {valid}") from None
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # of many kinds
        raise UserError(f"{why}, and it cannot be read from the Hugging Face hub: {reason(error)}; {valid}") from None


def reason(error: Exception) -> str:
    """The message of an exception in one line of limited length, or its type if it has no message."""
    if _is_unresolved(error):
        return "the host name cannot be resolved"
    text = " ".join(str(error).split())
    return (f"{text[:300]}…" if len(text) > 300 else text.rstrip(".")) or type(error).__name__


def _is_unresolved(error: BaseException | None) -> bool:
    """Whether an exception, or one of its causes, says that a host name is unknown."""
    while error is not None:
        if isinstance(error, socket.gaierror) or _UNRESOLVED.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False

"""A preparation's work folder with the shards of the corpus. Each shard is a pure function of input and options.

D documents in a shard. Files are written atomically, so an interrupted preparation resumes with the files that exist.
"""

import array
import contextlib
import functools
import json
import os
import socket
import threading
import time
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from megajax.core.errors import UserError
from megajax.host import reading

KEPT, EMPTY, SHORT, CONTAMINATED, EXACT, NEAR = range(6)  # KEPT, or the rule that dropped a document

RULES = {  # the rules' names in reports
    EMPTY: "empty",
    SHORT: "too short",
    CONTAMINATED: "contaminated",
    EXACT: "exact duplicate",
    NEAR: "near duplicate",
}
_PATIENCE = 60.0  # seconds to wait for files that another machine wrote
_DAMAGED = (ValueError, LookupError, TypeError, AttributeError, RuntimeError, EOFError, MemoryError)


class ResumableError(UserError):
    """An error after which the same command resumes from the work folder."""


@contextlib.contextmanager
def opened(file: Path) -> Iterator[IO[bytes]]:
    """Open a file of the work folder for reading in a `with` block; a damaged file is a `ResumableError` error."""
    try:
        with reading.open_file(file) as content:
            yield content
    except UserError:
        raise
    except (OSError, *_DAMAGED, zlib.error, zipfile.BadZipFile) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "damaged"
        raise ResumableError(f"{file}: {reason}; valid: --overwrite, which starts over") from None


@contextlib.contextmanager
def opened_arrays(file: Path) -> Iterator[Any]:
    """The arrays in an `.npz` file of the work folder; as it is not compressed, they are no larger than the file."""
    with opened(file) as content, np.load(content) as arrays:
        if any(entry.compress_type for entry in arrays.zip.infolist()):
            raise ValueError("compressed")
        yield arrays


@dataclass(frozen=True)
class WorkFolder:
    """The files of an unfinished preparation."""

    folder: Path
    output: str  # PREFIX
    shared: bool = False  # whether several machines use it

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def wait_for(self, name: str) -> Path:
        """The path of a file that exists already. If another machine wrote it, wait until it is visible here."""
        path, until = self / name, time.monotonic() + _PATIENCE
        while self.shared and not os.path.exists(path) and time.monotonic() < until:
            time.sleep(0.1)
            with contextlib.suppress(OSError):  # opening a folder makes NFS refresh it
                os.close(os.open(self.folder, os.O_RDONLY))
        return path

    def has(self, stage: str, number: int) -> bool:
        """Whether a stage has finished a piece."""
        return (self / _name(stage, number)).exists()

    def save(
        self, stage: str, piece: int, arrays: Mapping[str, npt.NDArray[Any]], summary: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Write a stage's results for a piece, which marks it as finished; returns the summary, which is small."""
        text = np.array(json.dumps(summary or {}))
        with self.writing(self / _name(stage, piece)) as file:
            np.savez(file, summary=text, **arrays)  # type: ignore[arg-type]
        return dict(summary or {})

    def remove(self, stage: str, number: int) -> None:
        """Remove a stage's results for a piece."""
        (self / _name(stage, number)).unlink(missing_ok=True)

    def load(self, stage: str, piece: int, *names: str) -> list[npt.NDArray[Any]]:
        """Some of a stage's arrays for a piece."""
        with opened_arrays(self.wait_for(_name(stage, piece))) as stored:
            arrays = [stored[name] for name in names]
            if not all(isinstance(each, np.ndarray) for each in arrays):
                raise ValueError("no array")
            return arrays

    def summary(self, stage: str, number: int) -> dict[str, Any]:
        """A stage's summary for a piece; empty if the piece is not finished."""
        return self.read_summary(stage, number) if self.has(stage, number) else {}

    def read_summary(self, stage: str, piece: int) -> dict[str, Any]:
        """A stage's summary for a finished piece."""
        (text,) = self.load(stage, piece, "summary")
        with opened(self / _name(stage, piece)):
            return dict(json.loads(str(text)))

    def save_slices(
        self, name: str, tables: Iterable[tuple[npt.NDArray[np.uint64], npt.NDArray[np.integer], int]]
    ) -> None:
        """Write the rows of tables to one file, grouped into slices. A table has rows [n, columns], their slices [n],
        and the number of slices."""
        ends = [0]
        with self.writing(self / name) as file:
            for rows, places, count in tables:
                file.write(rows[np.argsort(places, kind="stable")].tobytes())
                ends += (ends[-1] + np.cumsum(np.bincount(places.astype(np.int64), minlength=count))).tolist()
            file.write(np.array(ends, np.uint64).tobytes())

    def slice(self, name: str, index: int, count: int, columns: int) -> npt.NDArray[np.uint64]:
        """A slice [n, columns] of a file with `count` slices."""
        with opened(self.wait_for(name)) as file:
            file.seek(-8 * (count + 1 - index), os.SEEK_END)
            begin, end = np.frombuffer(_bytes(file, 16), np.uint64).tolist()
            content = _bytes(file, 8 * columns * (end - begin), 8 * columns * begin)
            return np.frombuffer(content, np.uint64).reshape(-1, columns)

    def save_texts(self, shard: int, texts: Iterable[str]) -> npt.NDArray[np.int64]:
        """Write a shard's cleaned texts one by one; returns their byte offsets followed by the file's size, [D + 1]."""
        ends = array.array("q", [0])
        with self.writing(self / _name("clean", shard, "text")) as file:
            for text in texts:
                ends.append(ends[-1] + file.write(text.encode()))
        return np.array(ends, np.int64)

    def texts(self, shard: int) -> Iterator[str]:
        """A shard's cleaned texts in order; dropped documents are empty."""
        (starts,) = self.load("clean", shard, "starts")
        with opened(self.wait_for(_name("clean", shard, "text"))) as file:
            for size in np.diff(starts).tolist():
                yield _bytes(file, size).decode()

    def text(self, shard: int, document: int) -> str:
        """A document's cleaned text."""
        starts = _starts(self, shard)
        with opened(self.wait_for(_name("clean", shard, "text"))) as file:
            begin, end = starts[document : document + 2].tolist()
            return _bytes(file, end - begin, begin).decode()

    def save_bands(self, shard: int, bands: npt.NDArray[np.uint64]) -> None:
        """Write a shard's band hashes, uint64 [bands, D]."""
        with self.writing(self / _name("tokens", shard, "bands")) as file:
            file.write(bands.tobytes())

    def band(self, shard: int, band: int, documents: int) -> npt.NDArray[np.uint64]:
        """The hashes of one band of a shard with D `documents`, uint64 [D]."""
        size = 8 * documents
        with opened(self.wait_for(_name("tokens", shard, "bands"))) as file:
            return np.frombuffer(_bytes(file, size, band * size), np.uint64)

    @contextlib.contextmanager
    def writing(self, file: Path) -> Iterator[IO[bytes]]:
        """Open a file to write it atomically in a `with` block."""
        who = f"{socket.gethostname()}.{os.getpid()}.{threading.get_ident()}"
        partial = file.with_name(f"{file.name}.{who}.partial")
        try:
            with self.writable(file):
                with partial.open("wb") as handle:
                    yield handle
                    if self.shared:  # because the machine may be lost
                        handle.flush()
                        os.fsync(handle.fileno())
                partial.replace(file)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)

    def touch(self, name: str) -> None:
        """Write an empty file."""
        with self.writing(self / name):
            pass

    @contextlib.contextmanager
    def writable(self, path: Path) -> Iterator[None]:
        """Turn an `OSError` in the `with` block, which writes `path`, into `ResumableError`."""
        try:
            yield
        except OSError as error:
            problem = f"{path} cannot be written: {error.strerror}"
            valid = "valid: a writable place with free space; rerun the command to resume"
            raise ResumableError(f"--output {self.output}: {problem}; {valid}") from None


def _name(stage: str, number: int, suffix: str = "npz") -> str:
    return f"{stage}-{number:06}.{suffix}"


@functools.lru_cache(maxsize=64)
def _starts(work: WorkFolder, shard: int) -> npt.NDArray[np.int64]:
    return work.load("clean", shard, "starts")[0]


def _bytes(file: IO[bytes], size: int, offset: int | None = None) -> bytes:
    """Exactly `size` bytes of a file from `offset` or the current position; raises `ValueError` if there are fewer."""
    if offset is not None:
        file.seek(offset)
    content = file.read(size) if size >= 0 else b""
    if len(content) != size:
        raise ValueError(f"{len(content)} bytes, not {size}")
    return content

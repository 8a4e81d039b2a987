"""The work folder of a preparation: shards of the corpus, each a pure function of the input and the options.

D documents in a shard. Files are written atomically, so an interrupted preparation goes on with those that are there.
"""

import contextlib
import functools
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from megajax.errors import UserError
from megajax.host import reading

KEPT, EMPTY, SHORT, CONTAMINATED, EXACT, NEAR = range(6)  # what became of a document

RULES = {  # why a document was dropped, in words
    EMPTY: "empty",
    SHORT: "too short",
    CONTAMINATED: "contaminated",
    EXACT: "exact duplicate",
    NEAR: "near duplicate",
}
_DAMAGED = (ValueError, LookupError, TypeError, AttributeError, RuntimeError, EOFError, MemoryError)


class GoesOn(UserError):
    """An error after which the same command goes on with what is in the work folder."""


@contextlib.contextmanager
def opened(file: Path) -> Iterator[IO[bytes]]:
    """Open a file of a work folder to read, in a `with` block; a damaged one is an error."""
    try:
        with reading.open_file(file) as content:
            yield content
    except UserError:
        raise
    except (OSError, *_DAMAGED, zlib.error, zipfile.BadZipFile) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "damaged"
        raise GoesOn(f"{file}: {reason}; valid: --overwrite, which starts over") from None


@dataclass(frozen=True)
class WorkFolder:
    """The files of an unfinished preparation."""

    folder: Path
    output: str  # PREFIX

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def has(self, stage: str, shard: int) -> bool:
        """Whether a stage is done with a shard."""
        return self._file(stage, shard, "npz").exists()

    def save(self, stage: str, shard: int, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write a stage's results for a shard, which completes it."""
        with self.writing(self._file(stage, shard, "npz")) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    def load(self, stage: str, shard: int, *names: str) -> list[npt.NDArray[Any]]:
        """Some of a stage's results for a shard."""
        with opened(self._file(stage, shard, "npz")) as file, np.load(file) as arrays:
            found = [arrays[name] for name in names]
            if not all(isinstance(each, np.ndarray) for each in found):
                raise ValueError("no array")
            return found

    def save_texts(self, shard: int, texts: list[str]) -> npt.NDArray[np.int64]:
        """Write the cleaned texts of a shard; returns the byte where each begins, and the size of the file, [D + 1]."""
        starts = np.zeros(len(texts) + 1, np.int64)
        with self.writing(self._file("clean", shard, "text")) as file:
            for number, text in enumerate(texts):
                starts[number + 1] = starts[number] + file.write(text.encode())
        return starts

    def texts(self, shard: int) -> Iterator[str]:
        """The cleaned texts of a shard in order; dropped documents are empty."""
        (starts,) = self.load("clean", shard, "starts")
        with opened(self._file("clean", shard, "text")) as file:
            for size in np.diff(starts).tolist():
                yield _bytes(file, size).decode()

    def text(self, shard: int, document: int) -> str:
        """The cleaned text of a document."""
        starts = _starts(self, shard)
        with opened(self._file("clean", shard, "text")) as file:
            begin, end = starts[document : document + 2].tolist()
            return _bytes(file, end - begin, begin).decode()

    def save_bands(self, shard: int, bands: npt.NDArray[np.uint64]) -> None:
        """Write the band hashes of a shard, uint64 [bands, D]."""
        with self.writing(self._file("tokens", shard, "bands")) as file:
            file.write(bands.tobytes())

    def band(self, shard: int, band: int, documents: int) -> npt.NDArray[np.uint64]:
        """The hashes of one band of a shard of D `documents`, uint64 [D]."""
        size = 8 * documents
        with opened(self._file("tokens", shard, "bands")) as file:
            return np.frombuffer(_bytes(file, size, band * size), np.uint64)

    @contextlib.contextmanager
    def writing(self, file: Path) -> Iterator[IO[bytes]]:
        """Open a file to write atomically, in a `with` block."""
        partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
        try:
            with self.writable(file), partial.open("wb") as handle:
                yield handle
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)

    def touch(self, name: str) -> None:
        """Write an empty file."""
        with self.writing(self / name):
            pass

    @contextlib.contextmanager
    def writable(self, path: Path) -> Iterator[None]:
        """Turn an `OSError` in the `with` block, in which `path` is written, into `GoesOn`."""
        try:
            yield
        except OSError as error:
            problem = f"{path} cannot be written: {error.strerror}"
            valid = "valid: a writable place with free space; rerun the command to resume"
            raise GoesOn(f"--output {self.output}: {problem}; {valid}") from None

    def _file(self, stage: str, shard: int, suffix: str) -> Path:
        return self.folder / f"{stage}-{shard:06}.{suffix}"


@functools.lru_cache(maxsize=64)
def _starts(work: WorkFolder, shard: int) -> npt.NDArray[np.int64]:
    return work.load("clean", shard, "starts")[0]


def _bytes(file: IO[bytes], size: int, offset: int | None = None) -> bytes:
    """Exactly `size` bytes of a file, from `offset` or the current position; `ValueError` if there are fewer."""
    if offset is not None:
        file.seek(offset)
    content = file.read(size) if size >= 0 else b""
    if len(content) != size:
        raise ValueError(f"{len(content)} bytes, not {size}")
    return content

"""How to tell a damaged checkpoint from a good one: `checkpoint.json` has the format, a checksum of every array, and
the size and digest of every file.

An array's checksum does not depend on its sharding. It is the sum over its elements, modulo 2^32, of their bits times
an odd weight that differs between neighbours in every dim, so the checksums of shards add up to the array's.
"""

import itertools
import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array

from megajax.data.text.digests import file_digest
from megajax.host import reading
from megajax.runs.ownership import FORMAT

MANIFEST = "checkpoint.json"
_OWN = "checksum"  # key of the manifest's own checksum
_LARGEST = 64 * 2**20  # bytes of a manifest; at 150 a line, far more files than any checkpoint has


@dataclass(frozen=True)
class Manifest:
    """The contents of `checkpoint.json`."""

    format: int  # of the checkpoint; if it is newer than ours, nothing else is read
    arrays: dict[str, int]  # the checksum of every array by name
    files: dict[str, list[Any]]  # size and digest of every file by its path in the folder

    @classmethod
    def for_folder(cls, folder: Path, arrays: dict[str, int]) -> "Manifest":
        """The manifest for a folder with all files of a checkpoint, whose arrays have these checksums."""
        files = sorted(file for file in folder.rglob("*") if file.is_file() and file != folder / MANIFEST)
        return cls(FORMAT, arrays, {str(file.relative_to(folder)): _size_and_digest(file) for file in files})

    def write(self, folder: Path) -> None:
        """Write it to the checkpoint's folder; raises `OSError` if that fails."""
        write_json(folder / MANIFEST, asdict(self) | {_OWN: self._checksum})

    @property
    def _checksum(self) -> int:
        return zlib.crc32(json.dumps(asdict(self)).encode())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint; raises `OSError` or `ValueError` if it cannot be read or is damaged."""
    if not (folder / "state").is_dir():
        raise ValueError("it is not a checkpoint")
    content = read_json(folder / MANIFEST)
    try:
        if type(content["format"]) is int and content["format"] > FORMAT:
            return Manifest(content["format"], {}, {})
        checksum = content.pop(_OWN)
        manifest = Manifest(**content)
        valid = manifest._checksum == checksum and manifest.format == FORMAT
        valid = valid and all(type(value) is int for value in manifest.arrays.values())
        for name, (size, digest) in manifest.files.items():
            outside = Path(name).is_absolute() or ".." in Path(name).parts
            valid = valid and not outside and type(size) is int and type(digest) is str
    except (KeyError, TypeError, ValueError, AttributeError):
        valid = False
    if not valid:
        raise ValueError(f"{MANIFEST} is damaged")
    return manifest


def problem_of(folder: Path, manifest: Manifest) -> str:
    """The first difference between a checkpoint's files and its manifest; empty if there is none."""

    def differs(name: str) -> bool:
        try:
            return not (folder / name).is_file() or _size_and_digest(folder / name) != manifest.files[name]
        except OSError:
            return True

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        differing = itertools.compress(manifest.files, threads.map(differs, manifest.files))
        return next((f"{name} is missing or was changed since it was written" for name in differing), "")


def no_file(folder: Path, manifest: Manifest) -> str:
    """The first path of a checkpoint's files at which something else exists, such as a named pipe, which would block on
    opening; empty if there is none."""
    places = ((name, folder / name) for name in manifest.files)
    return next((f"{name} is not a file" for name, at in places if os.path.exists(at) and not at.is_file()), "")


def _size_and_digest(file: Path) -> list[Any]:
    return [file.stat().st_size, file_digest(file)]


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file that is on disk when this returns; raises `OSError` if that fails."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> Any:
    """The contents of a JSON file; raises `OSError` or `ValueError` if it cannot be read or is not JSON."""
    return reading.parse_json(reading.read_bytes(path, _LARGEST).decode())


def local_checksums(tree: Any) -> dict[str, int]:
    """This process's term of each array's checksum, by the array's name; replicated shards count once."""

    def local_sum(leaf: Any) -> int:
        if not isinstance(leaf, Array):  # a `LazyArray` that has been written
            return leaf.sum
        shards = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
        return sum(checksum(np.asarray(each.data), [dim.start or 0 for dim in each.index]) for each in shards) % 2**32

    return {jax.tree_util.keystr(path): local_sum(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def checksum(shard: np.ndarray, starts: list[int] | None = None) -> int:
    """The checksum of an array's shard; `starts` are the indices of its first element."""
    starts = [0] * shard.ndim if starts is None else starts
    if shard.dtype.itemsize == 8:  # two words per element, as an additional dim
        shard, starts = np.frombuffer(shard.tobytes(), "<u4").reshape(*shard.shape, 2), [*starts, 0]
    bits = np.atleast_1d(shard if shard.dtype.kind in "iu" else shard.view(np.uint32)).astype(np.uint32, copy=False)
    starts = starts or [0]
    total = 0
    for dim in reversed(range(bits.ndim)):  # each dim is summed out after its turn, so only the first turn is expensive
        line = bits.sum(axis=tuple(range(dim)), dtype=np.uint32)
        factor = 2 * 31**dim % 2**32
        weights = (np.arange(starts[dim], starts[dim] + len(line), dtype=np.uint64) * factor).astype(np.uint32)
        total += int((line * weights).sum(dtype=np.uint32))
        bits = bits.sum(axis=dim, dtype=np.uint32)
    return (total + int(bits)) % 2**32

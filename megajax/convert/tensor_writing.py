"""Tensors to safetensors files, one file or several with an index, as transformers writes them.

A file is the length of its header in eight bytes, the header in JSON, and the tensors' bytes one after the other
(https://huggingface.co/docs/safetensors). Which bytes are whose is known before, so that tensors go to their places one
by one, in any order; the library's own function wants all of a file at once.
"""

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import ml_dtypes
import numpy as np
import numpy.typing as npt

from megajax.convert.tensor_files import DTYPES, INDEX, WEIGHTS
from megajax.errors import UserError

SHARD_BYTES = 5 * 10**9  # of tensors in a file, at most, unless one alone has more
_NUMPY = {"fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
_ALIGNMENT = 8  # of the header, which blanks end


@dataclass(frozen=True)
class _Place:
    """Of a tensor: its file, and where its bytes begin there, behind the header."""

    file: str
    start: int
    shape: tuple[int, ...]


def write_tensors(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, npt.NDArray[np.float32]]],
    dtype: str,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the files that hold the tensors of a model.

    Args:
        folder: that gets them.
        shapes: of all tensors, by name.
        tensors: all of them in some order, with their names.
        dtype: that they are written in, as in `DTYPES`.
        shard_bytes: how many of them there are in a file at most.
    """
    places = _planned(shapes, _NUMPY[dtype].itemsize, shard_bytes)
    with contextlib.ExitStack() as stack:
        files: dict[str, tuple[IO[bytes], int]] = {}
        file = folder
        try:
            for name in dict.fromkeys(place.file for place in places.values()):
                file = folder / name
                begun = stack.enter_context(file.open("wb"))
                files[name] = begun, begun.write(_header(name, places, dtype))
            for name, tensor in tensors:
                place = places[name]
                file = folder / place.file
                written, start = files[place.file]
                written.seek(start + place.start)
                written.write(_converted(name, tensor, dtype).data)
            for written, _ in files.values():
                written.flush()
            if len(files) > 1:
                file = folder / INDEX
                file.write_text(_index(places, _NUMPY[dtype].itemsize), encoding="utf-8")
        except OSError as error:
            raise UserError(f"{file}: cannot be written: {error.strerror}; valid: a writable place with room") from None


def _planned(shapes: Mapping[str, tuple[int, ...]], itemsize: int, most: int) -> dict[str, _Place]:
    """The place of every tensor: files are filled one after the other."""
    shards: list[dict[str, int]] = [{}]
    end = 0
    for name, shape in shapes.items():
        size = int(np.prod(shape)) * itemsize
        if shards[-1] and end + size > most:
            shards.append({})
            end = 0
        shards[-1][name] = end
        end += size
    files = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [WEIGHTS]
    return {
        name: _Place(file, start, shapes[name])
        for file, shard in zip(files, shards, strict=True)
        for name, start in shard.items()
    }


def _header(file: str, places: Mapping[str, _Place], dtype: str) -> bytes:
    """Of a file: length and JSON."""
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, place in places.items():
        if place.file == file:
            end = place.start + int(np.prod(place.shape)) * _NUMPY[dtype].itemsize
            offsets = [place.start, end]
            content[name] = {"dtype": DTYPES[dtype], "shape": list(place.shape), "data_offsets": offsets}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _converted(name: str, tensor: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor in a dtype."""
    with np.errstate(over="ignore"):
        found = np.ascontiguousarray(tensor).astype(_NUMPY[dtype], copy=False)
    if dtype == "fp16" and not np.isfinite(found).all():
        raise UserError(f"--dtype fp16: {name} has numbers beyond {np.finfo(np.float16).max:g}; valid: bf16 or fp32")
    return found.reshape(-1).view(np.uint8)


def _index(places: Mapping[str, _Place], itemsize: int) -> str:
    total = sum(int(np.prod(place.shape)) for place in places.values())
    metadata = {"total_parameters": total, "total_size": total * itemsize}
    weight_map = {name: place.file for name, place in sorted(places.items())}
    return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2) + "\n"

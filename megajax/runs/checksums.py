"""A checksum of every array of a state in host memory: independent of how the mesh divides it.

It is the sum over the array's elements, modulo 2^32, of their bits times a weight that is odd and another one for
neighbours in every dim. So the checksum of an array is the sum of its parts', wherever they are.
"""

from typing import Any

import jax
import numpy as np
from jax import Array


def part_sums(tree: Any) -> dict[str, int]:
    """By its name what every array's checksum gets from this process's devices; a part that several devices hold counts
    once."""
    return {jax.tree_util.keystr(path): _part_sum(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _part_sum(leaf: Any) -> int:
    if not isinstance(leaf, Array):  # deferred, and written by now
        return leaf.sum
    parts = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
    return sum(checksum(np.asarray(part.data), [dim.start or 0 for dim in part.index]) for part in parts) % 2**32


def checksum(part: np.ndarray, starts: list[int] | None = None) -> int:
    """The checksum of a part of an array; `starts` are the indices of its first element."""
    starts = [0] * part.ndim if starts is None else starts
    if part.dtype.itemsize == 8:  # two words an element, in a dim of their own
        part, starts = np.frombuffer(part.tobytes(), "<u4").reshape(*part.shape, 2), [*starts, 0]
    bits = np.atleast_1d(part if part.dtype.kind in "iu" else part.view(np.uint32)).astype(np.uint32, copy=False)
    starts = starts or [0]
    total = 0
    for dim in reversed(range(bits.ndim)):  # the last dim is gone after its turn, so that only its own reads all bits
        line = bits.sum(axis=tuple(range(dim)), dtype=np.uint32)
        factor = 2 * 31**dim % 2**32
        weights = (np.arange(starts[dim], starts[dim] + len(line), dtype=np.uint64) * factor).astype(np.uint32)
        total += int((line * weights).sum(dtype=np.uint32))
        bits = bits.sum(axis=dim, dtype=np.uint32)
    return (total + int(bits)) % 2**32

"""Arrays of a checkpoint that are made when it is their turn to be written, and dropped before the next one, of a state
that has never been in memory. One process writes them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from megajax.runs.checksums import checksum


@dataclass
class Deferred:
    """An array that does not exist yet.

    Attributes:
        shape: of it.
        dtype: of it.
        make: makes it.
        sum: its checksum, once it has been written.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]
    sum: int | None = field(default=None, compare=False)

    @property
    def nbytes(self) -> int:
        """As of an array: Orbax asks for it."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    @property
    def size(self) -> int:
        """Likewise."""
        return int(np.prod(self.shape))


class _Handler(ocp.type_handlers.NumpyHandler):
    """Writes them as Orbax writes arrays of numpy."""

    def __init__(self) -> None:
        super().__init__(deepcopy_host_arrays=False)

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """One after the other: what is made for the first is gone before the second is made."""
        for number, (value, info) in enumerate(zip(values, infos, strict=True)):
            array = value.make()
            assert (array.shape, array.dtype) == (value.shape, value.dtype), (value.shape, array.shape)
            value.sum = checksum(array)
            for written in await super().serialize([array], [info], args and [args[number]]):
                written.result()
            del array
        return []


def writer() -> ocp.PyTreeCheckpointHandler:
    """Writes a tree of them."""
    registry = ocp.type_handlers.create_type_handler_registry((Deferred, _Handler()))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)

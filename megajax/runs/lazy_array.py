"""Arrays of a checkpoint that are made when it is their turn to be written, and dropped before the next one, of a state
that has never been in memory. One process writes them."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from megajax.program.state import StateLayout, TrainState
from megajax.runs.digests import checksum


@dataclass
class LazyArray:
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


def new_state(layout: StateLayout, weight: Callable[[Any, tuple[int, ...]], np.ndarray]) -> TrainState:
    """The canonical state before the first step; `weight` makes a canonical main weight of its path and shape."""
    shapes = layout.canonical_shapes
    begun = layout.begin(jax.tree.map(lambda shape: jnp.zeros((), shape.dtype), shapes.params))
    begun = dataclasses.replace(begun, params=None, loss_scale=layout.stored_scale(begun.loss_scale))

    def filled(shape: jax.ShapeDtypeStruct, value: Any) -> LazyArray:
        """A moment, which is the same number everywhere, or what is no weight's."""
        number = np.asarray(value)
        whole = np.zeros if not number.any() else lambda *given: np.full(given[0], number, given[1])
        return LazyArray(shape.shape, number.dtype, lambda: whole(shape.shape, number.dtype))

    def made(path: Any, shape: jax.ShapeDtypeStruct) -> LazyArray:
        dtype = np.dtype(shape.dtype)
        return LazyArray(shape.shape, dtype, lambda: weight(path, shape.shape).astype(dtype, copy=False))

    state = jax.tree.map(filled, dataclasses.replace(shapes, params=None), begun)
    return dataclasses.replace(state, params=jax.tree_util.tree_map_with_path(made, shapes.params))


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
    registry = ocp.type_handlers.create_type_handler_registry((LazyArray, _Handler()))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)

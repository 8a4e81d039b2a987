"""Arrays of a checkpoint that are made when their turn to be written comes, and dropped before the next one: the state
as a whole is never in memory. One process writes them."""

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
    """An array that does not exist yet."""

    shape: tuple[int, ...]  # of it
    dtype: np.dtype  # of it
    make: Callable[[], np.ndarray]  # makes it
    sum: int | None = field(default=None, compare=False)  # its checksum, once it has been written

    @property
    def nbytes(self) -> int:
        """Orbax asks for it, as for `size`."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))


def new_state(layout: StateLayout, weight: Callable[[Any, tuple[int, ...]], np.ndarray]) -> TrainState:
    """The canonical state before the first step; `weight` makes each canonical main weight from its path and shape."""
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
    """Writes them as Orbax writes numpy arrays."""

    def __init__(self) -> None:
        super().__init__(deepcopy_host_arrays=False)

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """Write one after the other: the first is gone before the second is made."""
        for number, (value, info) in enumerate(zip(values, infos, strict=True)):
            array = value.make()
            assert (array.shape, array.dtype) == (value.shape, value.dtype), (value.shape, array.shape)
            value.sum = checksum(array)
            for written in await super().serialize([array], [info], args and [args[number]]):
                written.result()
            del array
        return []


def writer() -> ocp.PyTreeCheckpointHandler:
    """An Orbax handler for a tree of them."""
    registry = ocp.type_handlers.create_type_handler_registry((LazyArray, _Handler()))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)

"""Primitives with indices that the program computes."""

from typing import Any

import numpy as np

from megajax.exact.arrays import alike, rule
from megajax.exact.numbers import Value, constant, is_float, is_lowest, modulo, with_lowest


def _of_devices(x: Value, dims: int) -> np.ndarray:
    """The numbers of the devices of x, before this many dims."""
    return np.arange(x.shape[1]).reshape(-1, *[1] * dims)


@rule("dynamic_slice")
def _dynamic_slice(equation: Any, x: Value, *starts: Value) -> Value:
    return x[_window(x, starts, equation.params["slice_sizes"])]


@rule("dynamic_update_slice")
def _dynamic_update_slice(equation: Any, x: Value, update: Value, *starts: Value) -> Value:
    out = alike([x, update, *starts])[0].copy()
    out[_window(out, starts, update.shape[2:])] = update
    return out


def _window(x: Value, starts: Any, sizes: Any) -> Any:
    dims, indices = len(sizes), []
    for dim, (start, size, length) in enumerate(zip(starts, sizes, x.shape[2:], strict=True)):
        first = np.clip(start[0].astype(np.int64), 0, length - size).reshape(-1, *[1] * dims)
        indices.append(first + np.arange(size).reshape(-1, *[1] * (dims - dim - 1)))
    return (slice(None), _of_devices(x, dims), *indices)


@rule("gather")
def _gather(equation: Any, x: Value, index: Value) -> Value:
    numbers, variable = equation.params["dimension_numbers"], equation.outvars[0].aval
    shape, dtype = variable.shape, variable.dtype
    dims = numbers.offset_dims, numbers.collapsed_slice_dims, numbers.start_index_map
    batching = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    indices, there = _places(x, index, equation.params["mode"], shape, *dims, *batching)
    everywhere: Any = (slice(None), _of_devices(x, len(shape)), *indices)
    out = x[everywhere]
    out = np.broadcast_to(out, (*out.shape[:2], *shape))
    fill = equation.params["fill_value"]
    kinds = {"f": np.nan, "V": np.nan, "b": True}  # V: what NumPy does not have
    if fill is None:
        fill = kinds[dtype.kind] if dtype.kind in kinds else np.iinfo(dtype).min or np.iinfo(dtype).max
    fill = constant(fill, dtype)
    return np.where(there, out, fill.reshape(-1, *[1] * (out.ndim - 1)))


@rule("scatter", "scatter-add")
def _scatter(equation: Any, x: Value, index: Value, update: Value) -> Value:
    numbers, shape = equation.params["dimension_numbers"], update.shape[2:]
    dims = numbers.update_window_dims, numbers.inserted_window_dims, numbers.scatter_dims_to_operand_dims
    batching = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    indices, there = _places(x, index, equation.params["mode"], shape, *dims, *batching)
    sums = equation.primitive.name == "scatter-add"
    of_numbers = sums and is_float(equation.invars[0].aval.dtype)
    if of_numbers:  # count the lowest numbers, too
        x, update = (np.concatenate([np.where(is_lowest(each), 0, each), is_lowest(each)]) for each in (x, update))
    out, update, _ = (each.copy() for each in alike([x, update, index]))
    there = np.flatnonzero(np.broadcast_to(there, update.shape[1:]))
    devices = _of_devices(out, len(shape))
    places = tuple(np.broadcast_to(each, update.shape[1:]).reshape(-1)[there] for each in (devices, *indices))
    for part, given in zip(out, update.reshape(len(update), -1)[:, there], strict=True):
        if sums:
            np.add.at(part, places, given)
        else:
            part[places] = given
    return with_lowest(modulo(out[:-1]), out[-1:] > 0) if of_numbers else out


def _places(
    x: Value, index: Value, mode: Any, shape: Any, window: Any, missing: Any, named: Any, of_x: Any, of_index: Any
) -> tuple[list[np.ndarray], Any]:
    """Where in `x` the elements of a gather's result or of a scatter's updates are, one array per dim of `x`, and which
    of them exist. The result has a `shape`, whose dims `window` are those of `x` except the `missing` ones; indices
    are of the dims `named`; `of_x` and `of_index` are batching dims."""
    batch, windows = [dim for dim in range(len(shape)) if dim not in window], iter(window)
    there: Any = np.True_

    def spread(values: np.ndarray, dims: Any) -> np.ndarray:
        sizes = dict(zip(dims, values.shape[1:], strict=True))
        return values.reshape(len(values), *(sizes.get(dim, 1) for dim in range(len(shape))))

    out = []
    for dim, length in enumerate(x.shape[2:]):
        place, size = np.zeros((1, *[1] * len(shape)), int), 1
        if dim not in missing and dim not in of_x:
            own = next(windows)
            size = shape[own]
            place = spread(np.arange(size)[None], [own])
        if dim in named:
            first = spread(index[0, ..., named.index(dim)].astype(np.int64), batch)
            there = there & ((first >= 0) & (first <= length - size) | ("CLIP" in str(mode)))
            place = place + np.clip(first, 0, length - size)
        elif dim in of_x:
            place = place + spread(np.arange(length)[None], [batch[of_index[of_x.index(dim)]]])
        out.append(place)
    return out, there

"""Primitives with indices that the program computes."""

from typing import Any

import numpy as np

from jaxequal.arrays import alike, rule
from jaxequal.functions import FUNCTIONS
from jaxequal.numbers import Value, constant, estimate, is_float, is_lowest, joined, modulo, with_lowest, zeros


def _device_index(x: Value, dims: int) -> np.ndarray:
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
    return (slice(None), _device_index(x, dims), *indices)


@rule("gather")
def _gather(equation: Any, x: Value, index: Value) -> Value:
    (variable,), fill = equation.outvars, equation.params["fill_value"]
    shape, dtype = variable.aval.shape, variable.aval.dtype
    indices, inside = _places(equation, x, index, shape)
    everywhere: Any = (slice(None), _device_index(x, len(shape)), *indices)
    out = x[everywhere]
    out = np.broadcast_to(out, (*out.shape[:2], *shape))
    if np.all(inside):
        return out
    if fill is None:
        fill = np.nan if is_float(dtype) else True if dtype.kind == "b" else np.iinfo(dtype).min or np.iinfo(dtype).max
    fill = constant(fill, dtype).reshape(-1, *[1] * (len(shape) + 1))
    return np.where(inside, out, fill)


@rule("scatter-max", "scatter-min", "scatter-mul")
def _scatter_by(equation: Any, x: Value, index: Value, update: Value) -> Value:
    """In turns, each with one update of a place at most."""
    two = FUNCTIONS[equation.primitive.name.removeprefix("scatter-")][is_float(equation.invars[0].aval.dtype)]
    indices, inside = _places(equation, x, index, update.shape[2:])
    out, update, _ = (each.copy() for each in alike([x, update, index]))
    places = (_device_index(out, update.ndim - 2), *indices)
    targets = np.ravel_multi_index([np.broadcast_to(each, update.shape[1:]) for each in places], out.shape[1:])
    rest = np.flatnonzero(np.broadcast_to(inside, update.shape[1:]))
    flat, updates, targets = out.reshape(len(out), -1), update.reshape(len(update), -1), targets.reshape(-1)
    while len(rest):
        _, first = np.unique(targets[rest], return_index=True)
        now = rest[first]
        flat[:, targets[now]] = two(flat[:, targets[now]], updates[:, now])
        rest = np.delete(rest, first)
    return out


@rule("scatter", "scatter-add")
def _scatter(equation: Any, x: Value, index: Value, update: Value) -> Value:
    shape, sums = update.shape[2:], equation.primitive.name == "scatter-add"
    indices, inside = _places(equation, x, index, shape)
    of_numbers = sums and is_float(equation.invars[0].aval.dtype)
    if of_numbers:  # count the lowest numbers, too
        x, update = (
            np.concatenate([np.where(low, zeros(each), each), low]) for each in (x, update) for low in [is_lowest(each)]
        )
    out, update, _ = (each.copy() for each in alike([x, update, index]))
    inside = np.flatnonzero(np.broadcast_to(inside, update.shape[1:]))
    places = (_device_index(out, len(shape)), *indices)
    places = tuple(np.broadcast_to(array, update.shape[1:]).reshape(-1)[inside] for array in places)
    for row, (target, values) in enumerate(zip(out, update.reshape(len(update), -1)[:, inside], strict=True)):
        double = np.float64 if of_numbers and row == len(out) - 2 else target.dtype
        if sums:
            np.add.at(target.view(double), places, values.view(double))
        else:
            target[places] = values
    return with_lowest(joined(modulo(out[:-2]), estimate(out[:-1])), out[-1:] > 0) if of_numbers else out


def _places(equation: Any, x: Value, index: Value, shape: Any) -> tuple[list[np.ndarray], Any]:
    """Where in `x` the elements of a gather's result or of a scatter's updates, which have this shape, are, one array
    per dim of `x`, and which of them exist."""
    window, missing, named, of_x, of_index = equation.params["dimension_numbers"]
    batch, windows = [dim for dim in range(len(shape)) if dim not in window], iter(window)
    clips, inside, out = "CLIP" in str(equation.params["mode"]), np.True_, []  # type: tuple[bool, Any, list[Any]]

    def spread(values: np.ndarray, dims: Any) -> np.ndarray:
        sizes = dict(zip(dims, values.shape[1:], strict=True))
        return values.reshape(len(values), *(sizes.get(dim, 1) for dim in range(len(shape))))

    for dim, length in enumerate(x.shape[2:]):
        position, size = np.zeros((1, *[1] * len(shape)), int), 1
        if dim not in missing and dim not in of_x:
            own = next(windows)
            size = shape[own]
            position = spread(np.arange(size)[None], [own])
        if dim in named:
            first = spread(index[0, ..., named.index(dim)].astype(np.int64), batch)
            inside = inside & (clips | (first >= 0) & (first <= length - size))
            position = position + np.clip(first, 0, length - size)
        elif dim in of_x:
            position = position + spread(np.arange(length)[None], [batch[of_index[of_x.index(dim)]]])
        out.append(position)
    return out, inside

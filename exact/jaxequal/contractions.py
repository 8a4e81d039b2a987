"""Primitives of products and sums over more than one dim: matrices, ragged groups, convolutions, windows, triangles."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxequal.arrays import alike, padded, rule
from jaxequal.errors import RunError
from jaxequal.functions import FUNCTIONS, from_integers
from jaxequal.numbers import (
    LOWEST,
    Value,
    add,
    inverse,
    is_float,
    like,
    matrix_product,
    multiply,
    ordered,
    subtract,
    zeros,
)


def _typed(x: Value, dtype: Any) -> Value:
    """A value as the product of this dtype takes it."""
    if not is_float(dtype):
        return x.astype(dtype)
    return x if len(x) > 1 else from_integers(x)


def _product(x: Value, y: Value, dims: Any, dtype: Any) -> Value:
    (left, right), (left_batch, right_batch) = dims

    def matrices(x: Value, inner: Any, batch: Any, last: bool) -> tuple[Value, list[int]]:
        free = [dim for dim in range(x.ndim - 2) if dim not in (*inner, *batch)]
        groups = [batch, free, inner] if last else [batch, inner, free]
        sizes = [math.prod(x.shape[dim + 2] for dim in group) for group in groups]
        out = x.transpose(0, 1, *(dim + 2 for group in groups for dim in group)).reshape(*x.shape[:2], *sizes)
        return _typed(out, dtype), [x.shape[dim + 2] for dim in free]

    batch = [x.shape[dim + 2] for dim in left_batch]
    (x, rows), (y, columns) = matrices(x, left, left_batch, True), matrices(y, right, right_batch, False)
    out = matrix_product(x, y) if is_float(dtype) else np.matmul(x, y)
    return out.reshape(*out.shape[:2], *batch, *rows, *columns)


@rule("dot_general")
def _dot_general(equation: Any, x: Value, y: Value) -> Value:
    return _product(x, y, equation.params["dimension_numbers"], equation.outvars[0].aval.dtype)


@rule("ragged_dot_general")
def _ragged(equation: Any, x: Value, y: Value, sizes: Value) -> Value:
    """Every group's rows, terms or batches with its own matrix; what is in no group gives 0."""
    numbers, dtype = equation.params["ragged_dot_dimension_numbers"], equation.outvars[0].aval.dtype
    dims, (ragged,), grouped = (
        numbers.dot_dimension_numbers,
        numbers.lhs_ragged_dimensions,
        numbers.rhs_group_dimensions,
    )
    x, y = _typed(x, dtype), _typed(y, dtype)
    ends = np.cumsum(sizes, -1)
    position = np.arange(x.shape[ragged + 2])
    parts = []
    for group in range(sizes.shape[-1]):
        last = ends[..., group, None]
        inside = (position < last) & (position >= last - sizes[..., group, None])
        if inside.ndim > 3:  # sizes for every batch
            raise RunError("no rule for a ragged_dot_general whose batches have group sizes of their own")
        mask = inside.reshape(*inside.shape[:2], *(-1 if dim == ragged else 1 for dim in range(x.ndim - 2)))
        masked = np.where(mask, x, zeros(x) if is_float(dtype) else 0)
        matrix = np.take(y, group, grouped[0] + 2) if grouped else y
        inner = tuple(tuple(dim - sum(g < dim for g in grouped) for dim in each) for each in (dims[0][1], dims[1][1]))
        parts.append(_product(masked, matrix, ((dims[0][0], inner[0]), (dims[1][0], inner[1])), dtype))
    if not grouped:
        return np.stack(parts, 2)
    out = parts[0]
    for part in parts[1:]:
        out = add(out, part) if is_float(dtype) else out + part
    return out


def _windows(x: Value, params: Any, sizes: Sequence[int], empty: Value) -> Iterator[tuple[tuple[int, ...], Value]]:
    """Each place in a window of the last dims of x, and the numbers that all windows have there."""
    count = len(sizes)
    holes = zip(params["padding"], params["dilation"], strict=True)
    x = padded(x, empty, [*[(0, 0, 0)] * (x.ndim - 2 - count), *((low, high, hole - 1) for (low, high), hole in holes)])
    for offsets in itertools.product(*map(range, sizes)):
        slices: Any = []
        for size, at, gap, stride, length in zip(
            sizes, offsets, params["gap"], params["strides"], x.shape[x.ndim - count :], strict=True
        ):
            turns = max((length - (size - 1) * gap - 1) // stride + 1, 0)
            slices.append(slice(at * gap, at * gap + (turns - 1) * stride + 1 if turns else at * gap, stride))
        yield offsets, x[..., *slices]


@rule("conv_general_dilated")
def _convolution(equation: Any, x: Value, kernel: Value) -> Value:
    params, dtype = equation.params, equation.outvars[0].aval.dtype
    specs, groups, batches = params["dimension_numbers"], params["feature_group_count"], params["batch_group_count"]
    x = _typed(x.transpose(0, 1, *(dim + 2 for dim in specs.lhs_spec)), dtype)
    kernel = _typed(kernel.transpose(0, 1, *(dim + 2 for dim in specs.rhs_spec)), dtype)
    outputs, (n, c), space = kernel.shape[2], x.shape[2:4], x.shape[4:]
    count = groups * batches  # one of them is 1
    x = x.reshape(*x.shape[:2], batches, n // batches, groups, c // groups, *space)
    x = x.reshape(*x.shape[:2], count, n // batches, c // groups, *space) if batches > 1 else x[:, :, 0].swapaxes(2, 3)
    kernel = kernel.reshape(*kernel.shape[:2], count, outputs // count, *kernel.shape[3:])
    window = {"padding": params["padding"], "dilation": params["lhs_dilation"]}
    window |= {"gap": params["rhs_dilation"], "strides": params["window_strides"]}
    total: Any = None
    matrices: Any = kernel
    for place, part in _windows(x, window, kernel.shape[5:], zeros(x) if is_float(dtype) else np.zeros_like(x)):
        # [groups, batch, channels, *space] with [groups, outputs, channels]
        out = _product(part, matrices[:, :, :, :, :, *place], (((2,), (2,)), ((0,), (0,))), dtype)
        total = out if total is None else add(total, out) if is_float(dtype) else total + out
    total = np.moveaxis(total, -1, 4)  # [groups, batch, outputs, *space]
    total = total.swapaxes(2, 3).reshape(*total.shape[:2], n // batches, outputs, *total.shape[5:])
    return total.transpose(0, 1, *(dim + 2 for dim in np.argsort(specs.out_spec)))


@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min")
def _reduced_window(equation: Any, x: Value) -> Value:
    params, dtype = equation.params, equation.invars[0].aval.dtype
    name = {"sum": "add", "max": "max", "min": "min"}[equation.primitive.name.rpartition("_")[2]]
    two, window = FUNCTIONS[name][is_float(dtype)], _window_params(params)
    if name == "add":
        empty = zeros(x) if is_float(dtype) else np.zeros_like(x)
    elif is_float(dtype):
        lowest = like(LOWEST, -math.inf, x) if name == "max" else inverse(zeros(x))
        empty = np.broadcast_to(lowest, x.shape)
    else:
        limits = np.iinfo(dtype)
        empty = np.full_like(x, limits.min if name == "max" else limits.max)
    return _folded(x, two, window, params["window_dimensions"], empty)


def _window_params(params: Any) -> dict[str, Any]:
    names = {"padding": "padding", "dilation": "base_dilation", "gap": "window_dilation", "strides": "window_strides"}
    return {name: params[key] for name, key in names.items()}


def _folded(x: Value, two: Callable[..., Value], window: Any, sizes: Sequence[int], empty: Value) -> Value:
    out: Any = None
    for _, part in _windows(x, window, sizes, empty):
        out = part if out is None else two(out, part)
    return out


def folded_window(run: Callable[..., Any], equation: Any, x: Value, initial: Value) -> list[Value]:
    """`reduce_window` by a program of two numbers."""

    def two(a: Value, b: Value) -> Value:
        return run(equation.params["jaxpr"], alike([a, b]))[0]

    initial = np.broadcast_to(initial.reshape(*initial.shape, *[1] * (x.ndim - 2)), (len(x), *x.shape[1:]))
    return [_folded(x, two, _window_params(equation.params), equation.params["window_dimensions"], initial)]


@rule("triangular_solve")
def _triangular_solve(equation: Any, a: Value, b: Value) -> Value:
    """By substitution, row by row."""
    params = equation.params
    lower, a = params["lower"], a.swapaxes(-1, -2) if params["transpose_a"] else a
    lower ^= params["transpose_a"]
    if not params["left_side"]:  # x a = b is aᵀ xᵀ = bᵀ
        a, b, lower = a.swapaxes(-1, -2), b.swapaxes(-1, -2), not lower
    a, b = alike([a, b])
    size = a.shape[-1]
    rows = dict[int, Value]()
    for row in range(size) if lower else reversed(range(size)):
        rest = b[..., row, :]
        for column, known in rows.items():
            rest = subtract(rest, multiply(a[..., row, column, None], known))
        rows[row] = rest if params["unit_diagonal"] else multiply(rest, inverse(a[..., row, row, None]))
    out = np.stack([rows[row] for row in range(size)], -2) if size else b
    return out if params["left_side"] else out.swapaxes(-1, -2)


@rule("lu")
def _lu(equation: Any, x: Value) -> tuple[Value, Value, Value]:
    """By elimination, of what is left with the row that has the largest estimate."""
    places, x = np.arange(x.shape[-2]), x.copy()
    rows, pivots = np.broadcast_to(places, (1, *x.shape[1:-1])), np.zeros((1, *x.shape[1:-2], min(x.shape[-2:])), int)
    for n in range(pivots.shape[-1]):
        best = pivots[..., n] = n + abs(ordered(x[..., n:, n])).argmax(-1)
        order = np.where(places == n, best[..., None], np.where(places == best[..., None], n, places))
        rows = np.take_along_axis(rows, order, -1)
        x = np.take_along_axis(x, np.broadcast_to(order, x.shape[:-1])[..., None], -2)
        x[..., n + 1 :, n] = multiply(x[..., n + 1 :, n], inverse(x[..., n, n, None]))
        more = multiply(x[..., n + 1 :, n, None], x[..., n, None, n + 1 :])
        x[..., n + 1 :, n + 1 :] = subtract(x[..., n + 1 :, n + 1 :], more)
    return x, pivots.astype(np.int32), rows.astype(np.int32)


@rule("cumlogsumexp")
def _running_logsumexp(equation: Any, x: Value) -> Value:
    """Of every prefix, the largest number and the log of the sum of exponentials beside it."""
    dim = equation.params["axis"] + 2
    rows = np.moveaxis(x, dim, 0)[:: -1 if equation.params["reverse"] else 1]
    out, top = [], None
    for n, row in enumerate(rows):
        top = row if top is None else FUNCTIONS["max"][1](top, row)
        total = zeros(row)
        for each in rows[: n + 1]:
            total = add(total, FUNCTIONS["exp"][1](subtract(each, top)))
        out.append(add(top, FUNCTIONS["log"][1](total)))
    return np.moveaxis(np.stack(out[:: -1 if equation.params["reverse"] else 1]), 0, dim) if out else x

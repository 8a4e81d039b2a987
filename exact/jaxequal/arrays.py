"""Primitives that move elements, sum or order them: (equation, values) -> value. Dims of a value follow two others."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxequal.functions import FUNCTIONS, bitcast, converted, rounded
from jaxequal.numbers import (
    Value,
    constant,
    elements,
    estimate,
    is_float,
    is_lowest,
    joined,
    modulo,
    ones,
    ordered,
    power,
    with_lowest,
)


def alike(values: Sequence[Value]) -> list[Value]:
    """Values with an entry for every device, if one of them has."""
    many = max(each.shape[1] for each in values)
    return [np.broadcast_to(each, (len(each), many, *each.shape[2:])) for each in values]


def total(x: Value, dims: Any, dtype: Any) -> Value:
    """The sum over dims of a value of a dtype."""
    if not is_float(dtype):
        return x.sum(dims, dtype=dtype)
    return with_lowest(joined(modulo(elements(x).sum(dims)), estimate(x).sum(dims)), is_lowest(x).any(dims))


def largest(x: Value, dim: int, way: Callable[..., np.ndarray] = np.argmax) -> Value:
    """The largest, or by `np.argmin` the smallest, along a dim."""
    return _picked(x, np.expand_dims(way(ordered(x), dim), dim), dim).squeeze(dim)


def _picked(x: Value, index: np.ndarray, dim: int) -> Value:
    return np.take_along_axis(x, np.broadcast_to(index, (len(x), *index.shape[1:])), dim)


def dims(given: Any) -> tuple[int, ...]:
    """Dims of a value, of which a program says where they are in an array."""
    return tuple(dim + 2 for dim in given)


def from_zero(x: np.ndarray) -> np.ndarray:
    """Doubles as integers, halves away from zero."""
    return np.copysign(np.floor(abs(x) + 0.5), x)


_SAME = (
    *("copy", "pvary", "stop_gradient", "reduce_precision", "sharding_constraint", "reshard", "preduced"),
    *("vary_unreduced_cast", "reduced_vary_cast"),
    *("vary_unreduced_cast_p", "reduced_vary_cast_p"),  # the same in JAX 0.10
)

ARRAYS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_SAME, lambda of, x: x),
    **dict.fromkeys(("optimization_barrier", "device_put"), lambda of, *values: values),
    "debug_print": lambda of, *values: (),
    "convert_element_type": lambda of, x: converted(x, of.invars[0].aval.dtype, of.params["new_dtype"]),
    "bitcast_convert_type": lambda of, x: bitcast(x, of.invars[0].aval.dtype, of.params["new_dtype"]),
    "reshape": lambda of, x: x.reshape(*x.shape[:2], *of.params["new_sizes"]),
    "squeeze": lambda of, x: x.squeeze(dims(of.params["dimensions"])),
    "transpose": lambda of, x: x.transpose(0, 1, *dims(of.params["permutation"])),
    "tile": lambda of, x: np.tile(x, (1, 1, *of.params["reps"])),
    "rev": lambda of, x: np.flip(x, dims(of.params["dimensions"])),
    "split": lambda of, x: np.split(x, np.cumsum(of.params["sizes"])[:-1], of.params["axis"] + 2),
    "unstack": lambda of, x: [*np.moveaxis(x, of.params["axis"] + 2, 0)],
    "stack": lambda of, *values: np.stack(alike(values), of.params["axis"] + 2),
    "concatenate": lambda of, *values: np.concatenate(alike(values), of.params["dimension"] + 2),
    "reduce_sum": lambda of, x: total(x, dims(of.params["axes"]), of.invars[0].aval.dtype),
    "integer_pow": lambda of, x: (power if is_float(of.invars[0].aval.dtype) else np.power)(x, of.params["y"]),
    "round": lambda of, x: rounded(np.rint if "EVEN" in str(of.params["rounding_method"]) else from_zero, x),
    "reduce_and": lambda of, x: x.all(dims(of.params["axes"])),
    "reduce_or": lambda of, x: x.any(dims(of.params["axes"])),
}


def rule(*names: str, table: dict[str, Callable[..., Any]] | None = None) -> Callable[[Any], Any]:
    """The rule of primitives."""
    rules = ARRAYS if table is None else table
    return lambda function: rules.update(dict.fromkeys(names, function)) or function


@rule("broadcast_in_dim")
def _broadcast(equation: Any, x: Value) -> Value:
    shape, dims = equation.params["shape"], equation.params["broadcast_dimensions"]
    sizes = dict(zip(dims, x.shape[2:], strict=True))
    x = x.reshape(*x.shape[:2], *(sizes.get(dim, 1) for dim in range(len(shape))))
    return np.broadcast_to(x, (*x.shape[:2], *shape))


@rule("slice")
def _slice(equation: Any, x: Value) -> Value:
    params = equation.params
    strides = params["strides"] or [1] * (x.ndim - 2)
    return x[:, :, *map(slice, params["start_indices"], params["limit_indices"], strides)]


@rule("empty")
def _empty(equation: Any) -> Value:
    """Whatever it has, no result may depend on it."""
    shape, dtype = equation.outvars[0].aval.shape, equation.outvars[0].aval.dtype
    x = constant(np.nan if is_float(dtype) else np.array(1).astype(dtype), dtype)
    return np.broadcast_to(x.reshape(*x.shape, *[1] * len(shape)), (*x.shape, *shape))


@rule("iota")
def _iota(equation: Any) -> Value:
    shape, dim, dtype = (equation.params[key] for key in ("shape", "dimension", "dtype"))
    x = np.arange(shape[dim]).reshape(-1, *[1] * (len(shape) - dim - 1))
    return converted(np.broadcast_to(x, shape)[None, None], np.int32, dtype)


@rule("pad")
def _pad(equation: Any, x: Value, value: Value) -> Value:
    return padded(x, value.reshape(*value.shape, *[1] * (x.ndim - 2)), equation.params["padding_config"])


def padded(x: Value, value: Value, config: Sequence[tuple[int, int, int]]) -> Value:
    """x with a value before, after and between elements of each dim; negative sizes cut."""
    x, value = alike([x, value])
    sizes = [
        max(low + high + size + max(size - 1, 0) * inner, 0)
        for (low, high, inner), size in zip(config, x.shape[2:], strict=True)
    ]
    out = np.empty((*x.shape[:2], *sizes), x.dtype)
    out[...] = value[:, :, *[slice(0, 1)] * len(sizes)]
    spots = [low + np.arange(size) * (inner + 1) for (low, _, inner), size in zip(config, x.shape[2:], strict=True)]
    there = [(spot >= 0) & (spot < size) for spot, size in zip(spots, out.shape[2:], strict=True)]
    inside = np.ix_(*(spot[some] for spot, some in zip(spots, there, strict=True)))
    out[:, :, *inside] = x[:, :, *np.ix_(*there)]
    return out


@rule("select_n")
def _select(equation: Any, which: Value, *cases: Value) -> Value:
    which = which.reshape(*which.shape, *[1] * (cases[0].ndim - which.ndim))
    return np.where(which, cases[1], cases[0]) if len(cases) == 2 else np.choose(which, cases)


@rule("reduce_prod")
def _prod(equation: Any, x: Value) -> Value:
    product = FUNCTIONS["mul"][is_float(equation.invars[0].aval.dtype)]
    for dim in sorted(dims(equation.params["axes"]), reverse=True):
        one = np.ones((*x.shape[:dim], *x.shape[dim + 1 :]), x.dtype)
        x = functools.reduce(product, np.moveaxis(x, dim, 0), ones(one) if len(x) > 1 else one)
    return x


@rule("cumsum", "cumprod", "cummax", "cummin")
def _scanned(equation: Any, x: Value) -> Value:
    name = {"cumsum": "add", "cumprod": "mul", "cummax": "max", "cummin": "min"}[equation.primitive.name]
    two, dim = FUNCTIONS[name][is_float(equation.invars[0].aval.dtype)], equation.params["axis"] + 2
    way = slice(None, None, -1 if equation.params["reverse"] else 1)
    if not x.shape[dim]:
        return x
    rows = itertools.accumulate(np.moveaxis(x, dim, 0)[way], two)
    return np.moveaxis(np.stack([*rows])[way], 0, dim)


@rule("reduce_max", "reduce_min")
def _extreme(equation: Any, x: Value) -> Value:
    for dim in sorted(dims(equation.params["axes"]), reverse=True):
        x = largest(x, dim, np.argmin if equation.primitive.name == "reduce_min" else np.argmax)
    return x


@rule("argmax", "argmin")
def _arg_extreme(equation: Any, x: Value) -> Value:
    (dim,), way = dims(equation.params["axes"]), np.argmin if equation.primitive.name == "argmin" else np.argmax
    return way(ordered(x), dim).astype(equation.params["index_dtype"])


@rule("sort")
def _sort(equation: Any, *values: Value) -> list[Value]:
    """By the first operands; a later one decides where those before it are equal."""
    dim = equation.params["dimension"] + 2
    all_of = alike(values)
    keys = [ordered(each) for each in all_of[: equation.params["num_keys"]]]
    order = np.lexsort(keys[::-1], dim)
    return [_picked(each, order, dim) for each in all_of]


@rule("top_k", "approx_top_k")
def _top(equation: Any, x: Value) -> tuple[Value, Value]:
    """The approximate one is as good as the exact one."""
    params, k = equation.params, equation.params["k"]
    dim = params["axis"] + 2 if "axis" in params else params["reduction_dimension"] % (x.ndim - 2) + 2
    keys = ordered(x) if len(x) > 1 else x.astype(np.int64)
    order = np.argsort(-keys if params.get("is_max_k", True) else keys, dim, kind="stable")
    order = np.take(order, range(k), dim)
    return _picked(x, order, dim), order.astype(np.int32)

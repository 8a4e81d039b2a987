"""Every byte that crosses devices: the only module that calls JAX's collectives or asks for a device's position.

All functions are called inside the one `shard_map` region of the step, whose mesh axes are `(data, pipe, tensor)` and
whose types are checked (`check_vma=True`): a value that differs between the devices of an axis is *varying* over it,
and the transpose of "declare varying" is "sum over the axis". That makes `f` and `g` below the conjugate pair of the
paper.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

DATA, PIPE, TENSOR = AXES = ("data", "pipe", "tensor")


def f(x: Array) -> Array:
    """Enter a tensor-parallel region: identity forward, all-reduce over `tensor` backward (paper §3, figure 3)."""
    return lax.pcast(x, TENSOR, to="varying")


def g(x: Array) -> Array:
    """Leave a tensor-parallel region: all-reduce over `tensor` forward, identity backward (paper §3, figure 3)."""
    return lax.psum(x, TENSOR)


def tensor_sum(x: Any) -> Any:
    """Sum a tree over the tensor axis in one collective."""
    return lax.psum(x, TENSOR)


def tensor_max(x: Array) -> Array:
    """Maximum over the tensor axis (not differentiable)."""
    return lax.pmax(x, TENSOR)


def sum_over(tree: Any, axes: Sequence[str]) -> Any:
    """Sum every leaf of `tree` over `axes` in one collective per call."""
    return lax.psum(tree, tuple(axes)) if axes else tree


def send_up(x: Array) -> Array:
    """Hand a stage's output to the next stage. Never inside a conditional: every stage has to take part."""
    num_stages = axis_size(PIPE)
    return lax.ppermute(x, PIPE, [(stage, stage + 1) for stage in range(num_stages - 1)])


def send_down(x: Array) -> Array:
    """Hand the gradient of a stage's input to the previous stage. Never inside a conditional."""
    num_stages = axis_size(PIPE)
    return lax.ppermute(x, PIPE, [(stage + 1, stage) for stage in range(num_stages - 1)])


def axis_index(axis: str) -> Array:
    """This device's coordinate on a mesh axis, int32."""
    return lax.axis_index(axis)


def axis_size(axis: str) -> int:
    """Number of devices along a mesh axis."""
    return lax.axis_size(axis)


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which an array, tracer or `ShapeDtypeStruct` varies."""
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    if hasattr(aval, "vma"):  # JAX < 0.10
        return aval.vma
    return aval.manual_axis_type.varying


def vary(tree: Any, axes: Sequence[str]) -> Any:
    """Declare every leaf varying over `axes` (no communication). Gradients of the result stay local sums."""

    def cast(x: Array) -> Array:
        missing = tuple(axis for axis in axes if axis not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def zeros_like_type(shape_dtype: Any, leading: tuple[int, ...] = ()) -> Array:
    """Zeros with the dtype and varying axes of `shape_dtype`, its shape prefixed by `leading`."""
    zeros = jnp.zeros((*leading, *shape_dtype.shape), shape_dtype.dtype)
    return vary(zeros, sorted(varying_axes(shape_dtype)))

"""All communication between devices: the only module that calls JAX's collectives or asks for a device's position.

Call these functions inside a `shard_map` region; a step has exactly one. Its mesh axes are those of
`megajax/core/axes.py`, and its types are checked (`check_vma=True`): a value that differs between the devices of an
axis is *varying* over it, and the transpose of "declare varying" is "sum over the axis". That makes `f` and `g` below
the conjugate pair of the paper.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from megajax.core.axes import CONTEXT, PIPE, REPLICA, TENSOR
from megajax.core.parallel.fixed_tree import Parts, active, apart, of_all_parts, of_each_part, pairwise

Axes = str | tuple[str, ...]


def f(x: Array, axes: Axes = TENSOR) -> Array:
    """Enter a region sharded over `axes`: identity forward, all-reduce backward (paper §3, figure 3)."""
    parts = _parts_of(axes)
    return _f_in_parts(axes, parts.count, x, parts.index) if parts else lax.pcast(x, axes, to="varying")


def g(x: Any, axes: Axes = TENSOR) -> Any:
    """Leave a region sharded over `axes`: all-reduce forward, identity backward (paper §3, figure 3). A tree takes one
    collective."""
    if parts := _parts_of(axes):
        return jax.tree.map(lambda x: _g_in_parts(axes, parts.count, x, parts.index), x)
    return lax.psum(x, axes)


def _parts_of(axes: Axes) -> Parts | None:
    """The parts that stand for devices along the axes (`fixed_tree.py`), if any do."""
    return active() if TENSOR in entry_axes(axes) else None


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _f_in_parts(axes: Axes, count: int, x: Array, index: Array) -> Array:
    return apart(lax.pcast(x, axes, to="varying"), index)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _g_in_parts(axes: Axes, count: int, x: Array, index: Array) -> Array:
    return of_all_parts(partial(sum_in_tree, axes), count, x)


_f_in_parts.defvjp(
    lambda axes, count, x, index: (_f_in_parts(axes, count, x, index), None),
    lambda axes, count, _, grad: (of_all_parts(partial(sum_in_tree, axes), count, grad), None),
)
_g_in_parts.defvjp(
    lambda axes, count, x, index: (_g_in_parts(axes, count, x, index), index),
    lambda axes, count, index, grad: (apart(lax.pcast(grad, axes, to="varying"), index), None),
)


def sum_in_tree(axes: Axes, x_P: Array) -> Array:
    """The sum over a device's parts and over the axes, in one tree; an all-reduce sends as many bytes."""
    total = pairwise(x_P)
    for axis in reversed(entry_axes(axes)):
        devices = lax.axis_size(axis)
        if devices == 1:
            total = lax.psum(total, axis)
        elif total.size % devices:
            total = pairwise(lax.all_gather(total, axis, to="invarying"))
        else:
            mine = lax.all_to_all(total.reshape(devices, -1), axis, split_axis=0, concat_axis=0, tiled=True)
            whole = lax.all_gather(pairwise(mine.reshape(devices, -1)), axis, tiled=True, to="invarying")
            total = whole.reshape(total.shape)
    return total.astype(x_P.dtype)


def max_over(x: Array, axes: Axes) -> Array:
    """Maximum over `axes` (not differentiable)."""
    if parts := _parts_of(axes):
        x = of_all_parts(partial(jnp.max, axis=0), parts.count, x)
    return lax.pmax(x, axes)


def sum_over(tree: Any, axes: Sequence[str]) -> Any:
    """Sum every leaf of `tree` over `axes`, in one collective."""
    axes = there(tuple(axes))
    return lax.psum(tree, axes) if axes else tree


def complete(tree: Any, specs: Any) -> Any:
    """Turn local sums into global ones: sum every leaf over the axes it varies over that its spec does not name.

    `specs` has a `PartitionSpec` for every leaf. Leaves that need the same axes share one collective.
    """
    leaves, structure = jax.tree.flatten(tree)
    split = [spec_axes(spec) for spec in jax.tree.leaves(jax.tree.map(lambda _, spec: spec, tree, specs))]
    missing = [tuple(sorted(varying_axes(leaf) - axes)) for leaf, axes in zip(leaves, split, strict=True)]
    for axes in sorted(set(missing)):
        group = [index for index, lacks in enumerate(missing) if lacks == axes]
        for index, total in zip(group, sum_over([leaves[index] for index in group], axes), strict=True):
            leaves[index] = total
    return jax.tree.unflatten(structure, leaves)


def spec_axes(spec: PartitionSpec) -> frozenset[str]:
    """The mesh axes that an array with this spec is sharded over."""
    return frozenset(axis for entry in spec for axis in entry_axes(entry))


def entry_axes(entry: Axes | None) -> tuple[str, ...]:
    """The mesh axes of a spec's entry for one dim."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def own_shard(x: Array, dim: int, axes: Axes) -> Array:
    """This device's part of `x` along `dim`, sharded over `axes`."""
    size = x.shape[dim] // axis_size(axes)
    return lax.dynamic_slice_in_dim(x, axis_index(axes) * size, size, dim, allow_negative_indices=False)


def at_place(x: Array, place: Array | int, dim: int = 0) -> Array:
    """`x` at one place of a dim, which is not counted from the end."""
    return lax.dynamic_index_in_dim(x, place, dim, keepdims=False, allow_negative_indices=False)


def gather_shards(x: Array, dim: int, axes: Axes, *, invariant: bool = False) -> Array:
    """All-gather the shards along `dim`; the transpose is `scatter_sum`. The result is typed as varying over the axes,
    or, if `invariant`, as identical on all their devices."""
    if parts := _parts_of(axes):
        return _gather_in_parts(dim % x.ndim, axes, invariant, parts.count, x, parts.index)
    return lax.all_gather(x, there(axes), axis=dim % x.ndim, tiled=True, to="invarying" if invariant else "varying")


def scatter_sum(x: Array, dim: int, axes: Axes) -> Array:
    """Reduce-scatter: every device gets its shard, along `dim`, of the sum; the transpose is `gather_shards`."""
    if parts := _parts_of(axes):
        return _scatter_in_parts(dim % x.ndim, axes, parts.count, x, parts.index)
    return lax.psum_scatter(x, axes, scatter_dimension=dim % x.ndim, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _gather_in_parts(dim: int, axes: Axes, invariant: bool, count: int, x: Array, index: Array) -> Array:
    def whole(x_P: Array) -> Array:
        return lax.all_gather(jnp.concatenate([*x_P], dim), axes, axis=dim, tiled=True, to="invarying")

    result = of_all_parts(whole, count, x)
    return result if invariant else apart(lax.pcast(result, axes, to="varying"), index)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _scatter_in_parts(dim: int, axes: Axes, count: int, x: Array, index: Array) -> Array:
    def shards(x_P: Array) -> Array:
        of_devices = jnp.stack(jnp.split(pairwise(x_P), lax.axis_size(axes), dim))
        mine = pairwise(lax.all_to_all(of_devices, axes, split_axis=0, concat_axis=0, tiled=True))
        return jnp.stack(jnp.split(mine.astype(x_P.dtype), count, dim))

    return of_each_part(shards, count, x)


def _ungather_in_parts(
    dim: int, axes: Axes, invariant: bool, count: int, index: Array, grad: Array
) -> tuple[Array, None]:
    if not invariant:
        return _scatter_in_parts(dim, axes, count, grad, index), None
    size = grad.shape[dim] // (lax.axis_size(axes) * count)
    start = (lax.axis_index(axes) * count + index) * size
    return lax.dynamic_slice_in_dim(grad, start, size, dim, allow_negative_indices=False), None


_gather_in_parts.defvjp(lambda *given: (_gather_in_parts(*given), given[-1]), _ungather_in_parts)
_scatter_in_parts.defvjp(
    lambda *given: (_scatter_in_parts(*given), given[-1]),
    lambda dim, axes, count, index, grad: (_gather_in_parts(dim, axes, False, count, grad, index), None),
)


def exchange(x: Array, divided: int, joined: int, axes: Axes) -> Array:
    """All-to-all: split `x` along the dim `divided`, send one part to each device, join what arrives along `joined`."""
    return lax.all_to_all(x, axes, split_axis=divided, concat_axis=joined, tiled=True)


def broadcast_stage(x: Array, mine: Array | bool) -> Array:
    """Broadcast the value of the one stage where `mine` is true to all stages. All stages must call it."""
    return lax.psum(jnp.where(mine, x, jnp.zeros((), x.dtype)), PIPE)


def send_up(x: Array, *, ring: bool) -> Array:
    """Send a stage's output to the next stage; in a `ring` the last stage sends to the first. All stages must call
    it."""
    return send(x, PIPE, +1, ring)


def send_down(x: Array, *, ring: bool) -> Array:
    """Send the gradient of a stage's input to the previous stage; otherwise like `send_up`."""
    return send(x, PIPE, -1, ring)


def send_on(x: Array, *, together: bool) -> Array:
    """Send `x` to the device that holds the tokens after this device's; the first device receives zeros. A permute has
    no groups, so all devices must take part; if they do not come here `together`, as the stages of a pipe do not, this
    is an all-gather over the group."""
    if together:
        return send(x, CONTEXT, +1, ring=False)
    all_CX = lax.all_gather(x, CONTEXT, to="varying")
    own = axis_index(CONTEXT)
    before = at_place(all_CX, jnp.maximum(own - 1, 0))
    return jnp.where(own > 0, before, jnp.zeros((), x.dtype))


def send(x: Array, axis: Axes, step: int, ring: bool) -> Array:
    """Send `x` so many places on along an axis; those that nobody sends to get zeros."""
    p = axis_size(axis)
    pairs = [(place, (place + step) % p) for place in range(p) if ring or 0 <= place + step < p]
    return lax.ppermute(x, axis, pairs)


def axis_index(axes: Axes) -> Array:
    """This device's coordinate on a mesh axis, int32; over several axes the first one varies slowest."""
    parts = _parts_of(axes)
    return lax.axis_index(there(axes)) * parts.count + parts.index if parts else lax.axis_index(there(axes))


def axis_size(axes: Axes) -> int:
    """Number of devices along a mesh axis, or along several together."""
    parts = _parts_of(axes)
    return lax.axis_size(there(axes)) * (parts.count if parts else 1)


def there(axes: Axes) -> Axes:
    """The axes, without `replica` if the mesh lacks it."""
    if REPLICA not in axes or REPLICA in jax.sharding.get_abstract_mesh().axis_names:
        return axes
    return tuple(axis for axis in entry_axes(axes) if axis != REPLICA)


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which an array, a tracer, or an abstract value varies."""
    aval = jax.typeof(x) if isinstance(x, jax.Array) else x
    return aval.manual_axis_type.varying


def vary(tree: Any, axes: Sequence[str]) -> Any:
    """Declare every leaf varying over `axes`, without communication. Gradients of the result stay local sums."""

    def cast(x: Array) -> Array:
        missing = tuple(axis for axis in there(tuple(axes)) if axis not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def vary_as(tree: Any, *like: Any) -> Any:
    """`vary` over all mesh axes over which any leaf of `like` varies."""
    return vary(tree, sorted(frozenset[str]().union(*map(varying_axes, jax.tree.leaves(like)))))


def zeros_like_type(shape_dtype: Any, leading: tuple[int, ...] = ()) -> Array:
    """Zeros with the dtype and varying axes of `shape_dtype`, its shape prefixed by `leading`."""
    zeros = jnp.zeros((*leading, *shape_dtype.shape), shape_dtype.dtype)
    return vary_as(zeros, shape_dtype)

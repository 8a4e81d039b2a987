"""The device mesh, and the one table that maps the logical dims of weights to its axes."""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from megajax.parallel.collectives import AXES, DATA, PIPE, TENSOR, Axes, spec_axes

# Logical dim of a weight -> mesh axis, or axes, it is sharded over (paper §3).
RULES: Mapping[str, Axes | None] = {
    "stages": PIPE,  # pipeline stages, of the stacked layers
    "vocabulary": TENSOR,  # rows of the tied embedding table
    "heads": TENSOR,  # columns of the query projection, rows of the attention's output projection
    "kv_heads": TENSOR,  # columns of the key and value projections
    "mlp": TENSOR,  # columns of the MLP's first matrix, rows of its second
    "chunks": None,
    "layers": None,
    "embed": None,
    "position": None,
    "token_type": None,
    "features": None,  # columns of a dense layer that every device of a tensor group has whole
    "head_size": None,
}

_IN_REGIONS = {"heads", "kv_heads", "head_size", "mlp"}  # dims of weights that tensor-parallel regions have inside

BATCH_SPEC = PartitionSpec(DATA)


def make_mesh(data: int, pipe: int, tensor: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with axes `(data, pipe, tensor)`.

    In device order `tensor` is innermost and `pipe` outermost, as in Megatron-LM: a tensor group sits on neighbouring
    devices (one server), pipeline neighbours are the farthest apart.
    """
    devices = list(jax.devices() if devices is None else devices)
    assert len(devices) == data * pipe * tensor, (len(devices), data, pipe, tensor)
    grid = np.asarray(devices).reshape(pipe, data, tensor).transpose(1, 0, 2)
    return Mesh(grid, AXES)


def make_abstract_mesh(data: int, pipe: int, tensor: int) -> AbstractMesh:
    """The same mesh without devices, to trace on."""
    return AbstractMesh((data, pipe, tensor), AXES)


def rules_of(*, split_vocabulary: bool, split_kv_heads: bool) -> Mapping[str, Axes | None]:
    """The table for a model on a mesh.

    Args:
        split_vocabulary: no stage holds the whole table (`--pipeline.vocabulary split`).
        split_kv_heads: there are heads of keys and values for all devices of a tensor group; else each holds all.
    """
    vocabulary = {"vocabulary": (PIPE, TENSOR)} if split_vocabulary else {}
    return {**RULES, **vocabulary} if split_kv_heads else {**RULES, **vocabulary, "kv_heads": None}


def needs_tensor_sum(logical: PartitionSpec, rules: Mapping[str, Axes | None] = RULES) -> bool:
    """Whether a weight is whole on every device of a tensor group, but each uses it for its own heads only, so that its
    gradients there are parts of a sum."""
    return bool(_IN_REGIONS & {*logical}) and TENSOR not in spec_axes(mesh_spec(logical, rules))


def mesh_spec(logical: PartitionSpec, rules: Mapping[str, Axes | None] = RULES) -> PartitionSpec:
    """Translate a spec of logical dim names into one of mesh axes.

    Raises:
        KeyError: a name the table does not list.
        ValueError: two dims of one array mapped to the same mesh axis.
    """
    spec = PartitionSpec(*(None if name is None else rules[name] for name in logical))
    if len(spec_axes(spec)) < sum(len((entry,) if isinstance(entry, str) else entry) for entry in spec if entry):
        raise ValueError(f"logical dims {tuple(logical)} map two dims of one array to the same mesh axis: {spec}")
    return spec


def local_shape(spec: PartitionSpec, shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of a device's part of an array, on a mesh of axes of these sizes, which divide it."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    parts = (math.prod(sizes[axis] for axis in spec_axes(PartitionSpec(entry))) for entry in entries)
    return tuple(size // count for size, count in zip(shape, parts, strict=True))


def shard_over_data(spec: PartitionSpec, shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
    """`spec` of a weight with `data` added on the largest dim that it divides (ZeRO): a free one, else one that is
    split already. The same spec where it divides none. `sizes` are those of the mesh's axes."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    local = local_shape(spec, shape, sizes)
    divisible = [dim for dim, size in enumerate(local) if size % sizes[DATA] == 0 and sizes[DATA] > 1]
    free = [dim for dim in divisible if entries[dim] is None]
    if divisible:
        dim = max(free or divisible, key=lambda dim: local[dim])
        entries[dim] = _with_axis(entries[dim], DATA)
    return PartitionSpec(*entries)


def shard_unused_axes(
    spec: PartitionSpec, shape: Sequence[int], mesh: Mesh, dims: Sequence[int] | None = None
) -> PartitionSpec:
    """`spec` of an array with every axis that it lacks added on the dim of which most is left, among those of `dims`
    (all, by default) that the axis divides."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    for axis, size in sorted(mesh.shape.items(), key=lambda item: -item[1]):
        local = NamedSharding(mesh, PartitionSpec(*entries)).shard_shape(tuple(shape))
        divisible = [dim for dim in (range(len(shape)) if dims is None else dims) if local[dim] % size == 0]
        if axis not in spec_axes(spec) and size > 1 and divisible:
            dim = max(divisible, key=lambda dim: local[dim])
            entries[dim] = _with_axis(entries[dim], axis)
    return PartitionSpec(*entries)


def _with_axis(there: Axes | None, axis: str) -> Axes:
    """What a dim is sharded over, and one axis more."""
    return axis if there is None else (*((there,) if isinstance(there, str) else there), axis)


def dim_over(axis: str, spec: PartitionSpec) -> int | None:
    """The dim that a spec shards over `axis`, None where there is none."""
    return next((dim for dim, entry in enumerate(spec) if axis in spec_axes(PartitionSpec(entry))), None)


def shardings(mesh: Mesh, specs):
    """A tree of `PartitionSpec` as a tree of `NamedSharding`."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )


def rank_groups(mesh: Mesh) -> dict[str, list[list[int]]]:
    """Device ids of the communication groups, named as in Megatron-LM.

    `tensor`, `pipe`, `data`: the groups of one axis. `model`: the devices that hold one copy of the model (tensor ×
    pipe). `embedding`: first and last stage of every pipe group, which share the tied embedding.
    """
    ids = np.vectorize(lambda device: device.id)(mesh.devices)  # [data, pipe, tensor]

    def groups(*axes: int) -> list[list[int]]:
        size = int(np.prod([ids.shape[axis] for axis in axes]))
        rows = np.moveaxis(ids, axes, range(-len(axes), 0)).reshape(-1, size)
        return sorted(sorted(row.tolist()) for row in rows)

    pipe = groups(1)
    return {
        "tensor": groups(2),
        "pipe": pipe,
        "data": groups(0),
        "model": groups(1, 2),
        "embedding": [sorted({group[0], group[-1]}) for group in pipe],
    }

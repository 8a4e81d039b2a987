"""The device mesh, and the tables that map logical dims of weights and batches to its axes (`megajax/core/axes.py`)."""

import math
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from megajax.core.axes import (
    AXES,
    DEVICE_ORDER,
    EXPERT,
    MESH_AXES,
    OPTIONAL_AXES,
    PIPE,
    REPLICA,
    ROW_AXES,
    TENSOR,
    WEIGHT_AXES,
    ZERO_AXES,
)
from megajax.core.batch import BatchSpec
from megajax.core.parallel.collectives import Axes, entry_axes, spec_axes
from megajax.core.parallel.shards import NOT_SHARDED, Sharding

# Logical dim of a weight -> the mesh axis or axes that shard it (paper §3).
RULES: Mapping[str, Axes | None] = {
    "stages": PIPE,  # pipeline stages, in the stacked layers
    "vocabulary": TENSOR,  # rows of the tied embedding table
    "heads": TENSOR,  # columns of the query projection, rows of the attention's output projection
    "kv_heads": TENSOR,  # columns of the key and value projections
    "linear_heads": TENSOR,  # of linear attention: of values, and of queries and keys
    "linear_key_heads": TENSOR,
    "mlp": TENSOR,  # columns of the MLP's first matrix, rows of its second
    "experts": EXPERT,  # experts of a mixture
    "expert_mlp": TENSOR,  # like "mlp", in each expert
    "expert_output": None,  # of a bias that one device of a tensor group adds
    "chunks": None,
    "layers": None,
    "embed": None,
    "position": None,
    "token_type": None,
    "features": None,  # columns of a dense layer that is replicated over a tensor group
    "latent": None,  # of latent attention, like the next two: between regions, as "embed"
    "query_latent": None,
    "latent_and_key": None,
    "linear_latent": None,
    "taps": None,  # of a convolution
    "linear_key_size": None,
    "linear_value_size": None,
    "head_size": None,
    "rank": None,  # of LoRA adapters of products in regions,
    "outer_rank": None,  # and of those between them
}

# Dim of a batch after the rows -> mesh axes. A token is only a few numbers, so devices that share a sequence all get
# the whole one, and each takes its own tokens (`TokenShares.own_tokens`).
BATCH_RULES: Mapping[str, Axes | None] = {"tokens": None}

LATENTS = {"latent", "query_latent", "latent_and_key", "linear_latent"}
# Dims of weights inside tensor-parallel regions.
_IN_REGIONS = {"heads", "kv_heads", "head_size", "mlp", "expert_mlp", "expert_output", "rank"}
_IN_REGIONS |= {"linear_heads", "linear_key_heads", "linear_key_size", "linear_value_size"}

ROWS = PartitionSpec(ROW_AXES)
"""The spec of arrays with an entry for each row of a batch."""


def make_mesh(devices: Sequence[jax.Device] | None = None, **sizes: int) -> Mesh:
    """A mesh of these devices, by default all, such as `make_mesh(data=2, pipe=4)`; other axes have size 1, but for
    `replica`, which is there only if given. Devices are arranged in the order of `DEVICE_ORDER`."""
    devices = list(jax.devices() if devices is None else devices)
    sizes = dict.fromkeys(AXES, 1) | sizes
    assert sizes.keys() <= {*MESH_AXES} and len(devices) == math.prod(sizes.values()), (len(devices), sizes)
    axes, order = ([axis for axis in each if axis in sizes] for each in (MESH_AXES, DEVICE_ORDER))
    grid = np.asarray(devices).reshape([sizes[axis] for axis in order])
    return Mesh(grid.transpose([order.index(axis) for axis in axes]), axes)


def batch_specs(form: BatchSpec) -> dict[str, PartitionSpec]:
    """Specs of the arrays of a batch."""
    return {name: PartitionSpec(*ROWS, *map(BATCH_RULES.get, entry.dims)) for name, entry in form.entries.items()}


def make_abstract_mesh(**sizes: int) -> AbstractMesh:
    """The same mesh without devices, for tracing."""
    # With other axis types newer JAX would check shardings, which traced values here do not have.
    sizes = dict.fromkeys(AXES, 1) | sizes
    axes = tuple(axis for axis in MESH_AXES if axis in sizes)
    types = (AxisType.Auto,) * len(axes)
    return AbstractMesh(tuple(sizes[axis] for axis in axes), axes, axis_types=types)


def rules_of(*, split_vocabulary: bool, whole: Iterable[str] = ()) -> Mapping[str, Axes | None]:
    """The table for a model on a mesh.

    Args:
        split_vocabulary: the embedding table is sharded over stages too (`--pipeline.vocabulary split`).
        whole: dims that every device of a tensor group holds all of (`ModelConfig.whole_heads`).
    """
    return {**RULES, "vocabulary": (PIPE, TENSOR) if split_vocabulary else TENSOR, **dict.fromkeys(whole)}


def in_region(logical: PartitionSpec) -> bool:
    """Whether a weight is used inside tensor-parallel regions."""
    return bool(_IN_REGIONS & {*logical})


def needs_tensor_sum(logical: PartitionSpec, rules: Mapping[str, Axes | None] = RULES) -> bool:
    """Whether a weight is replicated over a tensor group although each device uses it only for its own heads, so that
    the devices' gradients must be summed."""
    return in_region(logical) and TENSOR not in spec_axes(mesh_spec(logical, rules))


def matrix_dims(logical: PartitionSpec) -> tuple[int, int] | None:
    """How many dims of a layer's weight, single or stacked, are the rows (inputs) and how many the columns (outputs,
    the last dims) of the matrix that a product uses. This follows from the dims' names: one side is the residual
    stream or a latent, the other is a latent or inside a tensor-parallel region. None for any other weight, and for
    LoRA's adapters."""
    inside = _IN_REGIONS - {"rank"} | LATENTS
    names = [*logical]
    first = next((place for place, name in enumerate(names) if name in {*inside, "embed"}), len(names))
    matrix = names[first:]
    if len(matrix) < 2:
        return None
    for rows in (1, len(matrix) - 1):
        sides = {*matrix[:rows]}, {*matrix[rows:]}
        if any(side <= {"embed", *LATENTS} for side in sides) and any(side <= inside for side in sides):
            return rows, len(matrix) - rows
    return None


def mesh_spec(logical: PartitionSpec, rules: Mapping[str, Axes | None] = RULES) -> PartitionSpec:
    """Translate a spec of logical dim names to one of mesh axes.

    Raises:
        KeyError: a name the table does not list.
        ValueError: two dims of one array mapped to the same mesh axis.
    """
    spec = PartitionSpec(*(None if name is None else rules[name] for name in logical))
    if len(spec_axes(spec)) < sum(len(entry_axes(entry)) for entry in spec):
        raise ValueError(f"logical dims {tuple(logical)} map two dims of one array to the same mesh axis: {spec}")
    return spec


def local_shape(spec: PartitionSpec, shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of a device's shard of an array, on a mesh whose axes have these `sizes`, which must divide it."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    parts = (math.prod(sizes[axis] for axis in entry_axes(entry)) for entry in entries)
    return tuple(size // count for size, count in zip(shape, parts, strict=True))


def zero_sharding(
    spec: PartitionSpec, shape: Sequence[int], sizes: Mapping[str, int], *, joins: Sequence[int] = ()
) -> Sharding:
    """What ZeRO adds to a weight's `spec`: its axes that do not shard the weight yet, together on one dim. `sizes` are
    those of the mesh axes.

    | if | they shard |
    |---|---|
    | they divide a dim | the first such dim, so that a shard is contiguous in memory |
    | they divide none | the dim that needs the least padding, of those that nothing else shards |
    | that padding is more than a 64th | two such neighbours, the first one of `joins`, as one dim if that needs less |
    | there is no such dim | nothing |
    """
    axes = tuple(axis for axis in ZERO_AXES if axis not in spec_axes(spec))
    shards, local = math.prod(sizes[axis] for axis in axes), local_shape(spec, shape, sizes)
    if shards == 1:
        return NOT_SHARDED
    if divisible := [dim for dim, size in enumerate(local) if size % shards == 0]:
        return Sharding(divisible[0] - len(shape), axes)
    free = [dim for dim, size in enumerate(local) if size == shape[dim]]
    smaller: list[tuple[int, ...]] = [(dim,) for dim in free if -(-shape[dim] // shards) < shape[dim]]
    pairs = [(dim - 1, dim) for dim in free if dim - 1 in free and dim - 1 in joins]

    def padding(dims: tuple[int, ...]) -> int:
        return -math.prod(shape[dim] for dim in dims) % shards

    def added(dims: tuple[int, ...]) -> tuple[float, int]:
        """As a share, and for equal ones the largest dim first."""
        size = math.prod(shape[dim] for dim in dims)
        return padding(dims) / size, -size

    best = min(smaller, key=added, default=None)
    if pairs and (best is None or added(best)[0] > 1 / 64):
        best = min([*smaller, *pairs], key=added)
    if best is None:
        return NOT_SHARDED
    return Sharding(best[-1] - len(shape), axes, padding(best), tuple(shape[dim] for dim in best if len(best) > 1))


def sharded_spec(spec: PartitionSpec, sharding: Sharding) -> PartitionSpec:
    """A `spec` with an entry for every dim, and what a `sharding` adds to it."""
    entries = [*spec]
    if sharding.joined:  # whose axes have one device each
        first = entries.pop(sharding.dim - 1)
        entries[sharding.dim] = (*entry_axes(first), *entry_axes(entries[sharding.dim]))
    if sharding != NOT_SHARDED:
        entries[sharding.dim] = (*entry_axes(entries[sharding.dim]), *sharding.axes)
    return PartitionSpec(*entries)


def shard_unused_axes(spec: PartitionSpec, shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """An array's `spec` with every missing axis added to the dim with the largest shards, among those that the axis
    divides."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    for axis, size in sorted(mesh.shape.items(), key=lambda item: -item[1]):
        local = NamedSharding(mesh, PartitionSpec(*entries)).shard_shape(tuple(shape))
        divisible = [dim for dim in range(len(shape)) if local[dim] % size == 0]
        if axis not in spec_axes(spec) and size > 1 and divisible:
            dim = max(divisible, key=lambda dim: local[dim])
            entries[dim] = (*entry_axes(entries[dim]), axis)
    return PartitionSpec(*entries)


def shardings(mesh: Mesh, specs):
    """A tree of `PartitionSpec` as a tree of `NamedSharding`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), on_mesh(mesh, specs))


def on_mesh(mesh: Mesh, specs):
    """A tree of `PartitionSpec`; without the axis `replica` if the mesh lacks it."""

    def without(spec: PartitionSpec) -> PartitionSpec:
        axes = [tuple(axis for axis in entry_axes(entry) if axis != REPLICA) for entry in spec]
        return PartitionSpec(*axes) if REPLICA in spec_axes(spec) else spec

    return specs if REPLICA in mesh.axis_names else jax.tree.map(without, specs)


def rank_groups(mesh: Mesh) -> dict[str, list[list[int]]]:
    """Device ids of the communication groups, named as in Megatron-LM.

    The groups of every axis by its name (of an optional axis only if it is larger than 1). `model`: the devices that
    hold one copy of the model. `embedding`: first and last stage of every pipe group, which share the tied embedding.
    """
    ids = np.vectorize(lambda device: device.id)(mesh.devices)

    def groups(*axes: str) -> list[list[int]]:
        dims = [mesh.axis_names.index(axis) for axis in axes]
        size = math.prod(mesh.shape[axis] for axis in axes)
        rows = np.moveaxis(ids, dims, range(-len(dims), 0)).reshape(-1, size)
        return sorted(sorted(row.tolist()) for row in rows)

    by_axis = {axis: groups(axis) for axis in mesh.axis_names if axis not in OPTIONAL_AXES or mesh.shape[axis] > 1}
    embedding = [sorted({group[0], group[-1]}) for group in by_axis[PIPE]]
    return by_axis | {"model": groups(*WEIGHT_AXES), "embedding": embedding}

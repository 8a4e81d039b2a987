"""Copy the state between devices and host memory, leaf by leaf, in its canonical form (`program/state.py`).

A leaf is converted on the devices, copied and freed before the next one, so the devices need memory for only one leaf
besides the state. For the transfer, the mesh axes that a leaf is not sharded over are used to shard another of its
dims, `pipe` a dim of each layer. So stages exchange shards instead of gathering all layers, for any number of layers,
and the hosts hold every number about once. If `pipe` divides no dim of a layer, it divides the layers; if it cannot do
that either, the layers are sent to every host stage by stage.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.tree_util import tree_map_with_path as map_with_path

from megajax.core.mesh import shard_unused_axes
from megajax.core.models.lora import LORA, without_adapters
from megajax.core.parallel.collectives import (
    PIPE,
    axis_index,
    broadcast_stage,
    entry_axes,
    exchange,
    gather_shards,
    own_shard,
    spec_axes,
)
from megajax.core.parallel.shards import NOT_SHARDED, Sharding, Shards
from megajax.core.program.state import StateLayout, TrainState
from megajax.core.trees import Tree

_HOST = "pinned_host"
_STAGES = 1  # dim of a pipelined leaf


class Transfer:
    """Conversions between the state on the devices and its canonical form in host memory.

    Attributes:
        targets: the canonical state as `ShapeDtypeStruct`, in host memory, with every leaf sharded as much as the mesh
            allows.
    """

    def __init__(self, layout: StateLayout):
        self._layout = layout
        self._conversions: dict[Any, Any] = {}
        self.targets: TrainState = map_with_path(self._target, layout.canonical_shapes)

    def _target(self, path: Any, type_: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self._layout.mesh, self._spread(path, type_.shape), memory_kind=_HOST)
        return type_.update(sharding=sharding)

    def _spread(self, path: Any, shape: tuple[int, ...]) -> PartitionSpec:
        mesh, weight = self._layout.mesh, self._layout.weight_at(path)
        if weight is None:
            return shard_unused_axes(PartitionSpec(), shape, mesh)
        spec = shard_unused_axes(weight.layer_spec(weight.owned.if_even), weight.shape, mesh)
        if not weight.stack:
            return spec
        stack = weight.stack
        neighbours = stack.num_chunks == 1 and not stack.padded  # a stage's layers are consecutive
        over_stages = PIPE not in spec_axes(spec) and neighbours and stack.num_stages > 1
        return PartitionSpec(PIPE if over_stages else None, *spec)

    def _stack(self, path: Any) -> Any:
        """How the layers are stacked that have a leaf; None if it is none of theirs."""
        weight = self._layout.weight_at(path)
        return weight and weight.stack

    def goes_by_stages(self, stacked: bool, canonical: PartitionSpec) -> bool:
        """Whether a leaf's canonical form is not sharded over the stages at all."""
        return stacked and self._layout.placement.num_stages > 1 and PIPE not in spec_axes(canonical)

    def to_host(self, state: TrainState) -> TrainState:
        """The canonical state in host memory."""
        return map_with_path(self._to_host, *self._layout.to_store(state))

    def to_devices(self, canonical: TrainState) -> TrainState:
        """The state on this mesh's stages, in this run's precision, from the canonical one in host memory."""
        parts = self._layout.to_place(canonical)
        return self._layout.completed(*(map_with_path(self._to_devices, *part) for part in parts))

    def params_to_devices(self, canonical: Tree) -> Tree:
        """The weights that layers compute with, on this mesh's stages, from the canonical ones in host memory."""
        return map_with_path(self._to_devices, *self._layout.computed_to_place(canonical))

    def _to_host(self, path: Any, leaf: Array, source: PartitionSpec, type_: jax.ShapeDtypeStruct) -> Array:
        target, stacked = self._target(path, type_), self._layout.is_stacked(path)
        if self.goes_by_stages(stacked, target.sharding.spec):
            return self._collected(path, leaf, source, target)
        on_device = self.to_canonical(path, source, target.sharding.spec, target.dtype)(leaf)
        canonical = moved(on_device, _HOST)
        on_device.delete()
        return canonical

    def _to_devices(self, path: Any, leaf: Array, spec: PartitionSpec, dtype: Any = None) -> Array:
        assert isinstance(leaf.sharding, NamedSharding)
        stacked, source = self._layout.is_stacked(path), leaf.sharding.spec
        on_device = self._on_stages(path, leaf) if self.goes_by_stages(stacked, source) else moved(leaf)
        placed = jax.block_until_ready(self.from_canonical(path, source, spec, dtype)(on_device))
        on_device.delete()
        return placed

    def merged(self, canonical: Tree) -> Tree:
        """Canonical main weights in host memory with their adapters merged in, weight by weight."""
        adapters = self._layout.adapters
        if adapters is None:
            return canonical

        def merge(weight: Array, adapter: Mapping[str, Array], inner: int) -> Array:
            sharding = weight.sharding.with_memory_kind(weight.addressable_shards[0].device.default_memory().kind)
            add = jax.jit(lambda weight, adapter: weight + adapters.added(adapter, inner), out_shardings=sharding)
            return moved(add(moved(weight), jax.tree.map(moved, adapter)), _HOST)

        weights = without_adapters(canonical)
        part = jax.tree.map(merge, adapters.part(weights), canonical[LORA], adapters.num_inner)
        return adapters.put(weights, part)

    def to_canonical(self, path: Any, source: PartitionSpec, target: PartitionSpec, dtype: Any) -> Callable[..., Array]:
        """The compiled conversion of a leaf on the stages to canonical form, in `dtype`. For a leaf that goes by
        stages, it takes the leaf and a stage number and returns that stage's slots."""
        stack, (padded, whole) = self._stack(path), self._padded(path, source)
        stacked = stack is not None
        steps, by_stages = self._steps(whole, target, stacked), self.goes_by_stages(stacked, target)
        layers_divided = stacked and entry_axes(target[0]) == (PIPE,)

        def local(x: Array, *stage: Array) -> Array:
            x = Shards(padded).gather(x.astype(dtype), invariant=True)
            for dim, axis in steps:
                x = exchange(x, dim, _STAGES, PIPE) if stacked and axis == PIPE else own_shard(x, dim, axis)
            if stack is None:
                return x
            if by_stages:
                return _one_stage(x, stage[0])
            return x.reshape(-1, *x.shape[3:]) if layers_divided else stack.to_canonical(x)

        out = PartitionSpec(None, None, None, *target[1:]) if by_stages else target
        return self._compiled(("canonical", stack, padded, source, target, dtype), local, source, out)

    def from_canonical(
        self, path: Any, source: PartitionSpec, target: PartitionSpec, dtype: Any = None
    ) -> Callable[[Array], Array]:
        """The compiled conversion of a canonical leaf to one on the stages, cast to `dtype` if given. A leaf that goes
        by stages must be on them already."""
        stack, (padded, whole) = self._stack(path), self._padded(path, target)
        stacked = stack is not None
        steps, by_stages = self._steps(whole, source, stacked), self.goes_by_stages(stacked, source)
        layers_divided = stacked and entry_axes(source[0]) == (PIPE,)

        def local(x: Array) -> Array:
            x = x if dtype is None else x.astype(dtype)
            if layers_divided:
                x = x[None, None]
            elif stack and not by_stages:
                x = stack.to_stages(x)
            for dim, axis in reversed(steps):
                if stacked and axis == PIPE:
                    x = exchange(x, _STAGES, dim, PIPE)
                else:
                    x = gather_shards(x, dim, axis, invariant=True)
            return Shards(padded).take(x)

        given = PartitionSpec(None, PIPE, None, *source[1:]) if by_stages else source
        return self._compiled(("pipelined", stack, padded, source, target, dtype), local, given, target)

    def _padded(self, path: Any, spec: PartitionSpec) -> tuple[Sharding, PartitionSpec]:
        """How ZeRO shards a leaf on the stages that has this spec, if the leaf is padded, and the spec without that:
        canonical leaves have no padding."""
        weight, sizes = self._layout.weight_at(path), self._layout.mesh.shape
        padded = weight.sharding_of(spec) if weight else NOT_SHARDED
        if weight is None or padded.if_even == padded:
            return NOT_SHARDED, spec
        axes = tuple(axis for axis in padded.axes if sizes[axis] > 1)
        return replace(padded, axes=axes), weight.stage_spec(NOT_SHARDED)

    def _steps(self, pipelined: PartitionSpec, canonical: PartitionSpec, stacked: bool) -> list[tuple[int, str]]:
        """Splits that the canonical form of a leaf adds to the pipelined one, apart from the layers': pairs of a
        pipelined dim and an axis, in order."""
        pipelined, canonical = (_dividing(spec, self._layout.mesh) for spec in (pipelined, canonical))
        entries = [None, None, None, *canonical[1:]] if stacked else list(canonical)
        return [
            (dim, axis)
            for dim, entry in enumerate(entries)
            for axis in entry_axes(entry)[len(entry_axes(pipelined[dim] if dim < len(pipelined) else None)) :]
        ]

    def _collected(self, path: Any, leaf: Array, source: PartitionSpec, target: jax.ShapeDtypeStruct) -> Array:
        """The canonical form, in host memory, of a leaf that goes by stages."""
        convert = self.to_canonical(path, source, target.sharding.spec, target.dtype)
        index = self._stack(path).layer_index
        whole: dict[Any, np.ndarray] = {}
        for stage in range(index.shape[_STAGES]):
            slots = convert(leaf, np.int32(stage))
            rows = index[:, stage].ravel()
            for shard in slots.addressable_shards:
                part = np.asarray(shard.data).reshape(-1, *shard.data.shape[3:])
                place = whole.setdefault(shard.device, np.empty((target.shape[0], *part.shape[1:]), part.dtype))
                place[rows[rows >= 0]] = part[rows >= 0]
            slots.delete()
        return _placed(target.shape, target.sharding, whole)

    def _on_stages(self, path: Any, leaf: Array) -> Array:
        """Put the layers of a canonical leaf in host memory onto their stages, with zeros in padded slots."""
        assert isinstance(leaf.sharding, NamedSharding)
        index = self._stack(path).layer_index
        sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec(None, PIPE, None, *leaf.sharding.spec[1:]))
        shape = (*index.shape, *leaf.shape[1:])
        indices, parts = sharding.devices_indices_map(shape), {}
        for shard in leaf.addressable_shards:
            rows = index[:, indices[shard.device][_STAGES]]
            layers = np.asarray(shard.data)[rows]
            layers[rows < 0] = 0
            parts[shard.device] = layers
        return _placed(shape, sharding, parts)

    def _compiled(
        self, key: Any, local: Callable[..., Array], source: PartitionSpec, target: PartitionSpec
    ) -> Callable[..., Array]:
        """`local`, a function of a leaf's shards, compiled once per key."""

        def convert(leaf: Array, *stage: Array) -> Array:
            mesh = self._layout.mesh
            specs = (_dividing(source, mesh), *(PartitionSpec() for _ in stage))
            converted = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=_dividing(target, mesh))(leaf, *stage)
            return lax.optimization_barrier(converted)  # a leaf that needs no conversion must be copied too

        if key not in self._conversions:
            self._conversions[key] = jax.jit(convert, out_shardings=NamedSharding(self._layout.mesh, target))
        return self._conversions[key]


def _one_stage(x: Array, stage: Array) -> Array:
    """One stage's slots on all stages. They are summed as integers, because as floats -0.0 would become 0.0."""
    bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return lax.bitcast_convert_type(broadcast_stage(bits, axis_index(PIPE) == stage), x.dtype)


def _placed(shape: tuple[int, ...], sharding: Any, parts: Mapping[Any, np.ndarray | Array]) -> Array:
    """An array made of this process's shards of it."""
    shards = [
        jax.device_put(part, SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
        for device, part in parts.items()
    ]
    return jax.block_until_ready(jax.make_array_from_single_device_arrays(shape, sharding, shards))


def _dividing(spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """`spec` without axes of size 1, over which nothing varies."""
    return PartitionSpec(*(tuple(axis for axis in entry_axes(entry) if mesh.shape[axis] > 1) or None for entry in spec))


def moved(leaf: Array, memory: str | None = None) -> Array:
    """A copy of `leaf` in another memory of its devices, by default their own; complete when this returns."""
    memory = memory or leaf.addressable_shards[0].device.default_memory().kind
    parts = {shard.device: shard.data for shard in leaf.addressable_shards}
    return _placed(leaf.shape, leaf.sharding.with_memory_kind(memory), parts)


def cast(leaf: Array, dtype: Any) -> Array:
    """`leaf` cast to another dtype, in the same memory."""
    parts = {shard.device: np.asarray(shard.data).astype(dtype) for shard in leaf.addressable_shards}
    return _placed(leaf.shape, leaf.sharding, parts)


def canonical_bytes(layout: StateLayout) -> int:
    """Bytes of the canonical state, over all devices together."""
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(layout.canonical_shapes))

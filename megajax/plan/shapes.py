"""The weights of a model as plain numbers, and what a device of a mesh has of each: no program, no mesh, no device.

What a weight's dims are called is asked of the model once; where they go is the table of `megajax/mesh.py`, as for the
state itself (`program/state.py`).
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

import jax
from jax.sharding import PartitionSpec

from megajax.axes import BATCH_AXES
from megajax.backend import CPU
from megajax.config import Config, MeshConfig
from megajax.mesh import dim_over, local_shape, mesh_spec, needs_tensor_sum, rules_of, zero_spec
from megajax.models.config import LoraConfig, ModelConfig
from megajax.models.family import CutModel
from megajax.models.lora import Adapters
from megajax.parallel.boundary import RegionBoundary
from megajax.pipeline.placement import Placement

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Weight:
    """A weight of a model, on no mesh."""

    path: tuple[str, ...]  # its name, from `shared`, those of the ends, or `blocks`, those of the layers
    shape: Shape  # of all of it; of a layer's, in one layer
    logical: PartitionSpec  # the names of its dims (`megajax/mesh.py`)
    stacked: bool  # whether it is a layer's


@dataclass(frozen=True)
class Placed:
    """A weight on a mesh."""

    weight: Weight  # which
    spec: PartitionSpec  # mesh axes of its dims, without ZeRO and the dims that pipelined layers have before them
    whole: Shape  # shape on a device without ZeRO; of a layer's, in one layer
    data_dim: int | None  # the dim of `whole` that ZeRO divides over `data`; None where it divides none
    shard: Shape  # shape on a device where it is divided; `whole` where it cannot be
    copies: int  # layers that a device has room for: chunks x layers of a chunk, padded ones included; 1 of the ends
    needs_tensor_sum: bool  # see `mesh.needs_tensor_sum`


@dataclass(frozen=True)
class Held:
    """What a device has of every weight of a configuration."""

    weights: tuple[Placed, ...]  # all of them, in the order of the program's trees
    adapters: tuple[Placed, ...]  # LoRA's, likewise
    zero: int  # what is divided over `data` (docs/memory.md)

    @property
    def trained(self) -> tuple[Placed, ...]:
        """The adapters, or all weights."""
        return self.adapters or self.weights

    @cached_property
    def num_computed(self) -> int:
        """Numbers that layers compute with: `TrainState.params`."""
        return _numbers((*self.weights, *self.adapters), self.zero == 3)

    @cached_property
    def num_summed(self) -> int:
        """Numbers of which gradients are summed up."""
        return _numbers(self.trained, self.zero == 3)

    @cached_property
    def num_trained(self) -> int:
        """Numbers of which a device has the main weights, both moments and the reduced gradients."""
        return _numbers(self.trained, self.zero > 0)


def _numbers(weights: tuple[Placed, ...], divided: bool) -> int:
    return sum(each.copies * prod(each.shard if divided else each.whole) for each in weights)


def held(config: Config) -> Held:
    """What a device has of the weights, on the mesh and with the ZeRO stage of a configuration that is valid."""
    model = replace(config.model, dropout=0.0, scan_layers="auto")  # weights do not depend on these
    return _held(
        model, config.lora, config.mesh, config.pipeline.chunks, config.splits_vocabulary, config.optimizer.zero
    )


@lru_cache(maxsize=4096)
def _held(
    model: ModelConfig, lora: LoraConfig, mesh: MeshConfig, chunks: int, split_vocabulary: bool, zero: int
) -> Held:
    return Held(*_placed(model, lora, mesh, chunks, split_vocabulary), zero)


@lru_cache(maxsize=1024)
def _placed(
    model: ModelConfig, lora: LoraConfig, mesh: MeshConfig, chunks: int, split_vocabulary: bool
) -> tuple[tuple[Placed, ...], tuple[Placed, ...]]:
    """All weights, and all adapters."""
    rules = rules_of(split_vocabulary=split_vocabulary, split_kv_heads=model.num_kv_heads % mesh.tensor == 0)
    layers, sizes = chunks * Placement(model.num_layers, mesh.pipe, chunks).layers_per_chunk, mesh.sizes

    def place(weight: Weight) -> Placed:
        spec = mesh_spec(weight.logical, rules)
        sharded = zero_spec(spec, weight.shape, sizes)
        return Placed(
            weight,
            spec,
            local_shape(spec, weight.shape, sizes),
            dim_over(BATCH_AXES, sharded),
            local_shape(sharded, weight.shape, sizes),
            layers if weight.stacked else 1,
            needs_tensor_sum(weight.logical, rules),
        )

    weights, adapters = _weights(model, lora)
    return tuple(map(place, weights)), tuple(map(place, adapters))


@lru_cache(maxsize=64)
def _weights(model: ModelConfig, lora: LoraConfig) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
    """All weights of a model, and all adapters; the same on every mesh and kind of device."""
    cut = CutModel(model, RegionBoundary(), CPU)
    return _named(cut), _named(Adapters(lora, model, cut)) if lora.rank else ()


def _named(model: CutModel | Adapters) -> tuple[Weight, ...]:
    found = []
    leaves = jax.tree_util.tree_leaves_with_path(model.shapes)
    for (path, leaf), spec in zip(leaves, jax.tree.leaves(model.logical_specs), strict=True):
        names = tuple(str(key.key) for key in path)
        skipped = int(names[0] == "blocks")  # the dim of stacked layers
        found.append(Weight(names, leaf.shape[skipped:], PartitionSpec(*spec[skipped:]), bool(skipped)))
    return tuple(found)

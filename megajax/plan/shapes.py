"""The weights of a model as plain numbers, and what a device of a mesh has of each: no program, no mesh, no device.

What a weight's dims are called is asked of the model once (`weights`); where they go is the table of `megajax/mesh.py`,
as for the state itself (`program/state.py`).
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

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
    """A weight of a model, on no mesh.

    Attributes:
        path: its name, from `shared`, those of the ends, or `blocks`, those of the layers.
        shape: of all of it; of a layer's, in one layer.
        dims: the logical name of every dim (`megajax/mesh.py`).
        stacked: whether it is a layer's.
    """

    path: tuple[str, ...]
    shape: Shape
    dims: tuple[str | None, ...]
    stacked: bool


@dataclass(frozen=True)
class Placed:
    """A weight on a mesh.

    Attributes:
        weight: which.
        spec: mesh axes of its dims, without ZeRO and without the dims that pipelined layers have before them.
        whole: shape on a device without ZeRO; of a layer's, in one layer.
        data_dim: the dim of `whole` that ZeRO divides over `data`; None where `data` has one device or divides none.
        shard: shape on a device where it is divided; `whole` where it cannot be.
        copies: how many layers' a device has room for: chunks x layers of a chunk, padded ones included; 1 of the ends.
        needs_tensor_sum: whether every device of a tensor group has it whole and computes with a part
        (`mesh.needs_tensor_sum`).
    """

    weight: Weight
    spec: PartitionSpec
    whole: Shape
    data_dim: int | None
    shard: Shape
    copies: int
    needs_tensor_sum: bool

    @property
    def size(self) -> int:
        """Numbers on a device, all its layers', not divided over `data`."""
        return self.copies * math.prod(self.whole)

    @property
    def shard_size(self) -> int:
        """Numbers on a device, all its layers', divided over `data`."""
        return self.copies * math.prod(self.shard)


@dataclass(frozen=True)
class Held:
    """What a device has of every weight of a configuration.

    Attributes:
        weights: all of them, in the order of the program's trees.
        adapters: LoRA's, likewise.
        zero: what is divided over `data` (docs/memory.md).
    """

    weights: tuple[Placed, ...]
    adapters: tuple[Placed, ...]
    zero: int

    @cached_property
    def computed(self) -> int:
        """Numbers that layers compute with: `TrainState.params`."""
        return sum(placed.shard_size if self.zero == 3 else placed.size for placed in self.weights)

    @cached_property
    def owned(self) -> int:
        """Numbers of which a device has the main weights: all weights, and the adapters."""
        return self._owned(self.weights) + self._owned(self.adapters)

    @cached_property
    def trained(self) -> int:
        """Numbers of which a device has both moments and the reduced gradients: all weights, or the adapters."""
        return self._owned(self.adapters or self.weights)

    def _owned(self, weights: tuple[Placed, ...]) -> int:
        return sum(placed.shard_size if self.zero else placed.size for placed in weights)


@lru_cache(maxsize=64)
def weights(model: ModelConfig) -> tuple[Weight, ...]:
    """All weights of a model; the same on every mesh."""
    return _weights(_same_weights(model))


def adapters(lora: LoraConfig, model: ModelConfig) -> tuple[Weight, ...]:
    """All adapters of a model."""
    return _adapters(lora, _same_weights(model)) if lora.rank else ()


def _same_weights(model: ModelConfig) -> ModelConfig:
    return replace(model, dropout=0.0, scan_layers="auto")  # they do not depend on these


@lru_cache(maxsize=64)
def _weights(model: ModelConfig) -> tuple[Weight, ...]:
    any_backend = CPU  # the weights are the same on all
    return _named(CutModel(model, RegionBoundary(), any_backend))


@lru_cache(maxsize=64)
def _adapters(lora: LoraConfig, model: ModelConfig) -> tuple[Weight, ...]:
    any_backend = CPU
    return _named(Adapters(lora, model, CutModel(model, RegionBoundary(), any_backend)))


def _named(model: CutModel | Adapters) -> tuple[Weight, ...]:
    specs = jax.tree.leaves(model.logical_specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    found = []
    for (path, leaf), spec in zip(jax.tree_util.tree_flatten_with_path(model.shapes)[0], specs, strict=True):
        names = tuple(str(key.key) for key in path)
        stacked = names[0] == "blocks"
        dims = (*spec, *[None] * (leaf.ndim - len(spec)))
        found.append(Weight(names, leaf.shape[1:] if stacked else leaf.shape, dims[1:] if stacked else dims, stacked))
    return tuple(found)


def held(config: Config) -> Held:
    """What a device has of the weights, on the mesh and with the ZeRO stage of a configuration that is valid."""
    splits, chunks = config.splits_vocabulary, config.pipeline.chunks
    return _held(config.model, config.lora, config.mesh, chunks, splits, config.optimizer.zero)


@lru_cache(maxsize=4096)
def _held(
    model: ModelConfig, lora: LoraConfig, mesh: MeshConfig, chunks: int, splits_vocabulary: bool, zero: int
) -> Held:
    where = (
        mesh,
        Placement(model.num_layers, mesh.pipe, chunks),
        splits_vocabulary,
        model.num_kv_heads % mesh.tensor == 0,
    )
    return Held(_placed(weights(model), *where), _placed(adapters(lora, model), *where), zero)


@lru_cache(maxsize=1024)
def _placed(
    weights: tuple[Weight, ...],
    mesh: MeshConfig,
    placement: Placement,
    split_vocabulary: bool,
    split_kv_heads: bool,
) -> tuple[Placed, ...]:
    rules = rules_of(split_vocabulary=split_vocabulary, split_kv_heads=split_kv_heads)
    sizes = mesh.sizes
    found = []
    for weight in weights:
        logical = PartitionSpec(*weight.dims)
        spec = mesh_spec(logical, rules)
        sharded = zero_spec(spec, weight.shape, sizes)
        found.append(
            Placed(
                weight,
                spec,
                local_shape(spec, weight.shape, sizes),
                dim_over(BATCH_AXES, sharded),
                local_shape(sharded, weight.shape, sizes),
                placement.num_chunks * placement.layers_per_chunk if weight.stacked else 1,
                needs_tensor_sum(logical, rules),
            )
        )
    return tuple(found)

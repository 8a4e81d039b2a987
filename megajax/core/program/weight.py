"""Everything that is known of a weight on a mesh before it has numbers, in one record. The specs of the state, its
canonical form, ZeRO's exchanges, Muon's matrices, float8 copies and what `megajax/plan/` computes follow from it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec

from megajax.core.config import StepConfig
from megajax.core.mesh import local_shape, matrix_dims, mesh_spec, needs_tensor_sum, sharded_spec, zero_sharding
from megajax.core.models.config import ModelConfig
from megajax.core.models.freeze import is_head
from megajax.core.models.lora import LORA, Adapters
from megajax.core.models.router import is_wide
from megajax.core.models.staged import StagedModel
from megajax.core.optim.adam import NOT_DECAYED
from megajax.core.optim.muon import Matrices, joinable_dims
from megajax.core.parallel.collectives import PIPE, spec_axes
from megajax.core.parallel.float8 import Copies, copies_by_dims
from megajax.core.parallel.shards import NOT_SHARDED, Sharding
from megajax.core.pipeline.placement import Placement
from megajax.core.precision import OPERAND_DTYPE
from megajax.core.trees import Path, Tree

Shape = tuple[int, ...]
Axes = tuple[str, ...]
Kind = TypeVar("Kind")

ON_STAGES = mesh_spec(PartitionSpec("chunks", "stages", "layers"))
"""Mesh axes of the dims before those of a layer where layers are pipelined."""


@dataclass(frozen=True)
class Weight:
    """A weight of a model, or one of LoRA's matrices, on a mesh. Its dims are those of one layer.

    What ZeRO shards of it, by stage; where neighbours differ, it is gathered from left to right, and its gradient
    reduced from right to left:

    | stage | owned: main copy, moments | kept from step to step | computed with |
    |---|---|---|---|
    | 0 | whole | whole | whole |
    | 1 | shard | whole, or a shard if `late` | whole |
    | 3 | shard | shard | shard, gathered before every use |

    Attributes:
        path: its name in a tree of trained weights, from `shared` (the ends') or `blocks` (the layers').
        shape, logical: sizes and names (`mesh.RULES`) of its dims.
        stack: how the layers are stacked that have it; None for a weight of the ends.
        of_product: whether layers multiply by it: it may have float8 copies, and its gradient may be deferred.
        decays: whether weight decay shrinks it: no bias, no weight of a norm.
        trained: whether it has gradients, moments and a main copy; a model's weights have none beside LoRA's.
        spec, whole: mesh axes of its dims, and their sizes on a device, without ZeRO.
        zero, shard: what ZeRO adds where it shards the weight, and the sizes then.
        zero_stage: what ZeRO shards: 0 nothing, 1 all but compute weights, 3 everything.
        needs_tensor_sum: see `mesh.needs_tensor_sum`.
        late: whether it is gathered in the next step (`overlap.overlaps_gathers`), so a step leaves it sharded.
    """

    path: Path
    shape: Shape
    logical: PartitionSpec
    stack: Placement | None
    of_product: bool
    decays: bool
    trained: bool
    spec: PartitionSpec
    whole: Shape
    zero: Sharding
    shard: Shape
    zero_stage: int
    needs_tensor_sum: bool
    late: bool = False

    @property
    def is_vector(self) -> bool:
        """Whether it is a norm's or a bias between tensor-parallel regions. In parts, a device's gradients of such ones
        are complete (`products.spread`)."""
        return [*self.logical] == ["embed"]

    @property
    def layered(self) -> bool:
        """Whether it is that of several layers, [L, …], of `blocks` or of the ends."""
        return self.stack is not None or "layers" in [*self.logical]

    @property
    def owned(self) -> Sharding:
        """How ZeRO shards its main copy, its moments and its reduced gradient."""
        return self.zero if self.zero_stage else NOT_SHARDED

    @property
    def kept(self) -> Sharding:
        """How ZeRO shards from step to step what layers compute with."""
        return self.zero if self.late or self.zero_stage == 3 else NOT_SHARDED

    @property
    def computed(self) -> Sharding:
        """How ZeRO shards what the passes of a step are given; they gather it before every use."""
        return self.zero if self.zero_stage == 3 else NOT_SHARDED

    @property
    def per_step(self) -> Sharding:
        """How ZeRO shards it if it is gathered, and its gradient reduced, once a step."""
        return _between(self.owned, self.computed)

    @property
    def at_end(self) -> Sharding:
        """How ZeRO shards it if it is gathered at the end of a step."""
        return _between(self.owned, self.kept)

    @property
    def at_start(self) -> Sharding:
        """How ZeRO shards it if it is gathered in the first forward pass of a step."""
        return _between(self.kept, self.computed)

    def computed_in(self, compute: Kind, main: Kind) -> Kind:
        """Which of two dtypes, or of their sizes, layers compute in with it (`router.in_compute_dtype`)."""
        return main if is_wide(self.path) else compute

    def sharding_of(self, spec: PartitionSpec) -> Sharding:
        """How ZeRO shards an array like it that has this spec."""
        return self.zero if spec_axes(spec).issuperset(self.zero.axes) else NOT_SHARDED

    # Specs and shapes of arrays like it, sharded by ZeRO as given.

    def layer_spec(self, sharding: Sharding) -> PartitionSpec:
        """The spec in one layer."""
        return sharded_spec(self.spec, sharding)

    def stage_spec(self, sharding: Sharding) -> PartitionSpec:
        """The spec on the mesh's stages: [chunks, stages, n, …] if it is a layer's."""
        spec = self.layer_spec(sharding)
        return PartitionSpec(*ON_STAGES, *spec) if self.stack else spec

    def canonical_spec(self, sharding: Sharding) -> PartitionSpec:
        """The spec in canonical form: [L, …] if it is a layer's."""
        spec = self.layer_spec(sharding)
        return PartitionSpec(PIPE if self.stack.divides_evenly else None, *spec) if self.stack else spec

    def layer_shape(self, sharding: Sharding) -> Shape:
        """The shape on a device, of one layer."""
        return self.whole if sharding == NOT_SHARDED else self.shard

    def stage_shape(self, sharding: Sharding) -> Shape:
        """The shape on a device, of a stage's layers."""
        return self.on_stage(self.layer_shape(sharding))

    @property
    def padded(self) -> Shape:
        """The shape of one layer whose shards, by ZeRO, a device's group has together."""
        return self.zero.padded_shape(self.whole)

    def on_stage(self, shape: Shape) -> Shape:
        """The shape of a stage's layers, given that of one layer."""
        return (self.stack.num_chunks, 1, self.stack.layers_per_chunk, *shape) if self.stack else shape

    def size(self, sharding: Sharding) -> int:
        """How many numbers a device holds, with those of slots that no layer fills."""
        return prod(self.stage_shape(sharding))

    # The matrices in it.

    @cached_property
    def matrices(self) -> Matrices | None:
        """How Muon's matrices in it are sharded; None if AdamW updates it even then."""
        has_some = self.stack and self.decays
        return Matrices.of(self.shape, self.logical, self.stage_spec(self.owned), self.owned) if has_some else None

    @property
    def sides(self) -> tuple[int, int]:
        """How many dims a product contracts, K, and how many are its output's, M. Others before them are of experts."""
        dims = matrix_dims(self.logical)
        assert self.of_product and dims, self
        return dims

    @property
    def axes_of_sides(self) -> tuple[Axes, Axes]:
        """Mesh axes that shard K and M of what layers compute with."""
        spec, (inner, outer) = self.layer_spec(self.computed), self.sides
        rows, columns = spec[-inner - outer : -outer], spec[-outer:]
        return tuple(sorted(spec_axes(PartitionSpec(*rows)))), tuple(sorted(spec_axes(PartitionSpec(*columns))))

    def copies(self, make: Callable[[tuple[int, ...]], Any], *, both: bool = True, wide: Any = None) -> Copies:
        """`make(dims)` in place of every array of its float8 copies, given which of the weight's dims it has."""
        (inner, outer), ndim = self.sides, len(self.shape)
        return copies_by_dims(make, ndim - inner - outer, inner, ndim, both=both, wide=wide)


def _between(before: Sharding, after: Sharding) -> Sharding:
    return before if after == NOT_SHARDED else NOT_SHARDED


Joins = Callable[[PartitionSpec], Sequence[int]]


def joins_of(config: StepConfig) -> Joins:
    """Which dims of a weight with these names ZeRO may join to the next: all but those that something else needs, the
    scales of float8 copies or Muon's matrices."""
    if config.precision in OPERAND_DTYPE:
        return _no_dims
    return joinable_dims if config.optimizer.name == "muon" else _all_dims


def _no_dims(logical: PartitionSpec) -> Sequence[int]:
    return ()


def _all_dims(logical: PartitionSpec) -> Sequence[int]:
    return range(len(logical))


def stacks_of(config: StepConfig) -> dict[str, Placement]:
    """How the layers of every kind are placed on the stages."""
    periods = Placement.of(config.model.layers_of_periods, config.mesh.pipe, config.pipeline)
    return {kind: replace(periods, runs=runs) if kind else periods for kind, runs in config.model.periods.items()}


def gathered_late(weights: Tree, model: ModelConfig) -> Tree:
    """The records of a model's weights, if those of layers and head are gathered late."""
    return jax.tree.map(lambda each: replace(each, late=each.stack is not None or is_head(each.path, model)), weights)


def weights_of(
    model: StagedModel,
    adapters: Adapters | None,
    rules: Mapping[str, Axes | str | None],
    stacks: Mapping[str, Placement],
    sizes: Mapping[str, int],
    zero_stage: int,
    joins: Joins = _no_dims,
) -> Tree:
    """The record of every weight, in the structure of `TrainState.params`, by the mesh axes of logical dims
    (`mesh.rules_of`), how layers of each kind are stacked, the sizes of the mesh axes, and which dims of a weight ZeRO
    joins."""
    products = {("blocks", *path) for path in model.products}

    def records(module: StagedModel | Adapters) -> Tree:
        def record(keys: Any, leaf: jax.ShapeDtypeStruct, dims: PartitionSpec) -> Weight:
            path = tuple(str(key.key) for key in keys)
            stacked = int(path[0] == "blocks")  # whether the first dim is that of the layers
            shape, logical = leaf.shape[stacked:], PartitionSpec(*dims[stacked:])
            spec = mesh_spec(logical, rules)
            zero = zero_sharding(spec, shape, sizes, joins=joins(logical))
            return Weight(
                path=path,
                shape=shape,
                logical=logical,
                stack=stacks[path[1] if path[1] in stacks else ""] if stacked else None,
                of_product=path in products,
                decays=path[-1] not in NOT_DECAYED and path not in model.norms,
                trained=adapters is None or module is adapters,
                spec=spec,
                whole=local_shape(spec, shape, sizes),
                zero=zero,
                shard=local_shape(sharded_spec(spec, zero), zero.padded_shape(shape), sizes),
                zero_stage=zero_stage,
                needs_tensor_sum=needs_tensor_sum(logical, rules),
            )

        return jax.tree_util.tree_map_with_path(record, module.shapes, module.logical_specs)

    return records(model) if adapters is None else records(model) | {LORA: records(adapters)}

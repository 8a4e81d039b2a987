"""What is trained: the weights, the optimizer state and the step; their sharding on the mesh, and their form without
one.

With LoRA the adapters are stored next to the weights, under `lora`, and only they are trained: the weights are frozen
and exist only in the compute dtype.

On devices the stacked layers are pipelined, `[chunks, stages, n, …]`, and weights and moments may be sharded over the
axes that divide a batch (`parallel/shards.py`). Checkpoints and comparisons use the canonical form, which depends on
neither mesh nor precision: layers `[L, …]`, and only main weights.
"""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from megajax.core.config import StepConfig
from megajax.core.mesh import mesh_spec, needs_tensor_sum, rules_of, shardings, zero_sharding, zero_spec
from megajax.core.models.freeze import frozen_weights
from megajax.core.models.lora import LORA, Adapters
from megajax.core.models.router import in_compute_dtype
from megajax.core.models.staged import StagedModel
from megajax.core.optim.adam import initial_norms
from megajax.core.optim.loss_scale import LossScale
from megajax.core.optim.muon import Matrices
from megajax.core.optim.optimizer import make_optimizer
from megajax.core.parallel.collectives import PIPE, axis_index
from megajax.core.parallel.shards import NOT_SHARDED, Shards
from megajax.core.pipeline.placement import Placement
from megajax.core.precision import COMPUTE_DTYPE, MAIN_DTYPE
from megajax.core.program.float8 import LayerCopies

Tree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a step changes. A skipped step changes only the loss scale."""

    step: Array  # number of updates, int32 scalar; skipped steps do not count
    params: Tree  # weights that layers compute with, in the compute dtype: `shared`, `blocks` and with LoRA `lora`
    main: Tree | None  # fp32 copy of the trained ones, which is updated; None if `params` are that (fp32, fp64)
    optimizer: Tree  # optax's state, with moments shaped like the trained weights
    loss_scale: LossScale  # for fp16; otherwise 1
    recent_norms: Array  # gradient norms of the last updates, fp32 (`optim/adam.py`)
    average: Tree | None = None  # moving average of the trained weights, stored like `main`; None without `train.ema`
    copies: Tree = None  # float8 copies of frozen weights, made once, stored like them; None in canonical form


class StateLayout:
    """Shapes, specs and conversions of a `TrainState` on one mesh.

    Attributes:
        specs: how the state is sharded.
        layer_specs: how the dims of each layer are sharded in canonical form, as if every device had all layers.
        adapters: LoRA's; None if all weights are trained.
        trained_specs: how main weights, moments and reduced gradients are sharded: with `--optimizer.zero` over ranks.
        owned: that ZeRO sharding.
        per_step: the same if `params` are not sharded so: they are gathered once per step (ZeRO-1).
        needs_tensor_sum: for every weight, see `mesh.needs_tensor_sum`.
        per_use: the ZeRO sharding of `params` themselves, gathered before every use (ZeRO-3).
        optimizer, matrices: the optimizer of the trained weights, and those that Muon updates, by path.
        loss_scale: how fp16's loss scale changes; None in other precisions.
        frozen: weights that `train.freeze` names, which have gradients of zero and are not updated.
    """

    def __init__(self, config: StepConfig, mesh: Mesh, model: StagedModel, operand_dtype: DTypeLike | None = None):
        self.mesh, self.model, self._config = mesh, config.model, config
        self.placement = Placement(config.model.num_blocks, config.mesh.pipe, config.pipeline.chunks)
        self.loss_scale = config.loss_scale if config.precision == "fp16" else None
        self.compute_dtype, self.main_dtype = COMPUTE_DTYPE[config.precision], MAIN_DTYPE[config.precision]
        self.adapters = adapters = Adapters(config.lora, config.model, model) if config.lora.rank else None
        self.frozen = frozen_weights(config.train.freeze, model.shapes, config.model)
        self._copies = LayerCopies(config.model, model, operand_dtype if adapters else None, both=True)

        def fresh() -> TrainState:
            return self._begun(model.init(config.seed) | ({LORA: adapters.init(config.seed)} if adapters else {}))

        self._fresh = fresh
        self._place(model, config.optimizer.zero)

    def _place(self, model: StagedModel, zero: int) -> None:
        whole_groups = self.model.num_kv_heads % self._config.mesh.tensor == 0
        rules = rules_of(split_vocabulary=self._config.splits_vocabulary, split_kv_heads=whole_groups)
        logical, shapes = model.logical_specs, model.shapes
        if self.adapters is not None:
            logical, shapes = logical | {LORA: self.adapters.logical_specs}, shapes | {LORA: self.adapters.shapes}
        self.needs_tensor_sum = jax.tree.map(lambda spec: needs_tensor_sum(spec, rules), logical)
        weights = shapes
        layers = PIPE if self.model.num_blocks % self._config.mesh.pipe == 0 else None
        # Specs of weights without stacking dims: without ZeRO, with ZeRO, and the sharding that ZeRO adds.
        shapes = _map_blocks(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), shapes)
        logical = _map_blocks(lambda spec: PartitionSpec(*spec[1:]), logical)
        unsharded = jax.tree.map(lambda spec: mesh_spec(spec, rules), logical)
        sharded = jax.tree.map(lambda spec, leaf: zero_spec(spec, leaf.shape, self.mesh.shape), unsharded, shapes)
        zeros = jax.tree.map(lambda spec, leaf: zero_sharding(spec, leaf.shape, self.mesh.shape), unsharded, shapes)
        owned, params = sharded if zero else unsharded, sharded if zero == 3 else unsharded
        nothing = jax.tree.map(lambda _: NOT_SHARDED, zeros)
        self.owned = Shards(self.trained(zeros if zero else nothing))
        self.per_step = Shards(self.trained(zeros if zero == 1 else nothing))
        self.per_use = Shards(zeros if zero == 3 else nothing)
        self.has_main = self.compute_dtype != self.main_dtype
        pipelined = mesh_spec(PartitionSpec("chunks", "stages", "layers"), rules)
        self.trained_specs = self.trained(_stacked(owned, *pipelined))
        self.matrices = self._muons(self.trained(logical))
        wide = self._config.optimizer.muon_precision == "fp32"
        dtype = self.main_dtype if wide else self.compute_dtype
        self.optimizer = make_optimizer(self._config.optimizer, self.matrices, dtype)
        self.canonical_shapes = jax.eval_shape(self._begun, weights)
        main = self.with_trained(params, self.trained(owned)) if self.has_main else params
        self.canonical_specs = self._specs(_stacked(main, layers), None, self.trained(_stacked(owned, layers)))
        self.layer_specs = self._specs(_stacked(owned, None), None, self.trained(_stacked(owned, None)))
        here = self.trained_specs if self.has_main else None
        params = _stacked(params, *pipelined)
        copies = unflatten_dict(self._copies.specs_of_whole(params["blocks"], len(pipelined)))
        self.specs = dataclasses.replace(self._specs(params, here, self.trained_specs), copies=copies)

    def _muons(self, logical: Tree) -> dict[tuple[str, ...], Matrices]:
        """The matrices that Muon updates, by path, given the dim names of trained weights without their stacking dims;
        none with AdamW."""
        if self._config.optimizer.name != "muon":
            return {}
        names, specs = flatten_dict(logical), flatten_dict(self.trained_specs)
        found = {path: Matrices.of(names[path], specs[path]) for path in names if path[0] == "blocks"}
        return {path: each for path, each in found.items() if each}

    def trained(self, weights: Tree) -> Tree:
        """The trained part of the weights, or of a tree like them: the adapters, or everything."""
        return weights if self.adapters is None else weights[LORA]

    def with_trained(self, weights: Tree, trained: Tree) -> Tree:
        """The weights with their trained part replaced."""
        return trained if self.adapters is None else weights | {LORA: trained}

    def with_frozen(self, new: Tree, old: Tree) -> Tree:
        """Trained weights, or a tree with arrays like them, with those of frozen weights from `old`. Inside the region:
        arrays are this device's shards."""

        def choose(path: Any, new: Array, old: Array) -> Array:
            mask = self.frozen.get(_names(path))
            if mask is None or mask.all():
                return new if mask is None else old
            frozen, index = jnp.asarray(mask), self.placement.layer_index
            if is_stacked(path):
                frozen = jnp.asarray((index >= 0) & mask[index])[:, axis_index(PIPE), None]
            return jnp.where(frozen.reshape(*frozen.shape, *[1] * (new.ndim - frozen.ndim)), old, new)

        return jax.tree_util.tree_map_with_path(choose, new, old) if self.frozen else new

    def with_main(self, state: TrainState) -> TrainState:
        """A state, or a tree like one, with the main weights in `params`, and nothing that is made from them."""
        params = state.params if state.main is None else self.with_trained(state.params, state.main)
        return dataclasses.replace(state, params=params, main=None, copies=None)

    def _specs(self, params: Tree, main: Tree | None, moments: Tree) -> TrainState:
        by_path = {_names(path): spec for path, spec in jax.tree_util.tree_leaves_with_path(moments)}
        optimizer = jax.tree_util.tree_map_with_path(
            lambda path, _: by_path.get(_names(path), PartitionSpec()), self.canonical_shapes.optimizer
        )
        scale = LossScale(PartitionSpec(), PartitionSpec())  # type: ignore[arg-type]  # specs in place of arrays
        average = moments if self._config.train.ema else None
        return TrainState(PartitionSpec(), params, main, optimizer, scale, PartitionSpec(), average)  # type: ignore[arg-type]

    @cached_property
    def shapes(self) -> TrainState:
        """Shapes and dtypes of the state on this mesh's stages."""
        return jax.eval_shape(self.pipelined, self.canonical_shapes)

    def _begun(self, weights: Tree) -> TrainState:
        """The canonical state before the first step, from canonical weights of any dtype."""
        return self.begin(jax.tree.map(lambda weight: weight.astype(self.main_dtype), weights))

    def begin(self, weights: Tree) -> TrainState:
        """The canonical state before the first step, from canonical main weights."""
        optimizer = self.optimizer.init(self.trained(weights))
        scale = LossScale.start(self.loss_scale)
        average = self.trained(weights) if self._config.train.ema else None
        return TrainState(jnp.zeros((), jnp.int32), weights, None, optimizer, scale, initial_norms(), average)

    def init(self, compiler_options: dict[str, Any] | None = None) -> TrainState:
        """A fresh state, never materialized unsharded: made in canonical form, then moved to its stages."""
        first, made_in = shardings(self.mesh, self.canonical_specs), shardings(self.mesh, self.specs)

        def fresh() -> TrainState:
            return self.pipelined(jax.lax.with_sharding_constraint(self._fresh(), first))

        return jax.jit(fresh, out_shardings=made_in, compiler_options=compiler_options)()

    @cached_property
    def from_canonical(self):
        """canonical state -> the state on this mesh's stages, in this run's precision."""
        return jax.jit(self.pipelined, out_shardings=shardings(self.mesh, self.specs))

    @cached_property
    def copies_of(self):
        """weights in the compute dtype, on their stages -> the float8 copies of frozen ones."""
        return jax.jit(self._copies_of, out_shardings=shardings(self.mesh, self.specs.copies))

    @cached_property
    def to_canonical(self):
        """state -> the state in canonical form, on this mesh."""
        return jax.jit(self.canonical, out_shardings=shardings(self.mesh, self.canonical_specs))

    @cached_property
    def stored_scale(self):
        """The loss scale as stored in a checkpoint."""
        place = NamedSharding(self.mesh, PartitionSpec())
        return jax.jit(lambda scale: scale.stored(self.loss_scale), out_shardings=place)

    @cached_property
    def resumed_scale(self):
        """The loss scale to resume with, from a checkpoint's."""
        place = NamedSharding(self.mesh, PartitionSpec())
        return jax.jit(lambda scale: scale.resumed(self.loss_scale), out_shardings=place)

    def canonical_weights(self, tree: Tree) -> Tree:
        """Weights or gradients in canonical form."""
        return _map_blocks(self.placement.to_canonical, tree)

    def pipelined(self, canonical: TrainState) -> TrainState:
        scale = canonical.loss_scale.resumed(self.loss_scale)
        state = dataclasses.replace(_map_blocks(self.placement.to_stages, canonical), loss_scale=scale)
        params = self.computed(state.params)
        main = self.trained(state.params) if self.has_main else None
        return dataclasses.replace(state, params=params, main=main, copies=self._copies_of(params))

    def _copies_of(self, params: Tree) -> Tree:
        return unflatten_dict(self._copies.of_whole(params["blocks"], 3))

    def computed(self, main: Tree) -> Tree:
        """Main weights as layers compute with them."""
        return in_compute_dtype(main, self.compute_dtype)

    def canonical(self, state: TrainState) -> TrainState:
        state = self.with_main(state)
        wide = jax.tree.map(lambda weight: weight.astype(self.main_dtype), state.params)
        state = dataclasses.replace(state, params=wide, loss_scale=state.loss_scale.stored(self.loss_scale))
        return _map_blocks(self.placement.to_canonical, state)


def _stacked(specs: Tree, *leading) -> Tree:
    """Specs of layers stacked along leading dims."""
    return _map_blocks(lambda spec: PartitionSpec(*leading, *spec), specs)


def _map_blocks(function, tree: Tree) -> Tree:
    """Apply `function` to the leaves of the stacked layers: those under a key `blocks`."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: function(leaf) if is_stacked(path) else leaf, tree)


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """The dict keys in a path, which name a weight whatever tree contains it."""
    return tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))


def is_stacked(path: tuple[Any, ...]) -> bool:
    """Whether a leaf with this path belongs to the stacked layers."""
    return jax.tree_util.DictKey("blocks") in path

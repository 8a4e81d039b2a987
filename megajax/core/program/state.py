"""What is trained: the weights, the optimizer state and the step; their sharding on the mesh, and their form without
one.

With LoRA the adapters are stored next to the weights, under `lora`, and only they are trained: the weights are frozen
and exist only in the compute dtype.

On devices the stacked layers are pipelined, `[chunks, stages, n, …]`, and weights and moments may be sharded over the
axes that divide a batch (`parallel/shards.py`). Checkpoints and comparisons use the canonical form, which depends on
neither mesh nor precision: layers `[L, …]`, and only main weights.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import GetAttrKey
from jax.tree_util import tree_map_with_path as map_with_path
from jax.typing import DTypeLike

from megajax.core.backend import CPU, Backend
from megajax.core.config import StepConfig
from megajax.core.mesh import rules_of, shardings
from megajax.core.models.freeze import frozen_weights
from megajax.core.models.lora import LORA, Adapters
from megajax.core.models.router import in_compute_dtype
from megajax.core.models.staged import StagedModel
from megajax.core.optim.adam import initial_norms
from megajax.core.optim.by_layer import ByLayer
from megajax.core.optim.loss_scale import LossScale
from megajax.core.optim.optimizer import make_optimizer
from megajax.core.optim.own import own_optimizer, path_in, with_keys
from megajax.core.parallel.collectives import PIPE, axis_index
from megajax.core.parallel.shards import Sharding, Shards
from megajax.core.precision import COMPUTE_DTYPE, MAIN_DTYPE
from megajax.core.program.float8 import LayerCopies
from megajax.core.program.overlap import overlaps_gathers, size_of_layers
from megajax.core.program.weight import ON_STAGES, Weight, gathered_late, joins_of, stacks_of, weights_of
from megajax.core.trees import Path, Tree

_PARAMS, _OPTIMIZER = GetAttrKey("params"), GetAttrKey("optimizer")
# A fresh state compiles 5 times faster, to the same bits; in vectors, whose ends depend on the mesh, the last number of
# one may have another bit.
INIT_OPTIONS = {"cpu": {"xla_backend_optimization_level": 1, "xla_cpu_prefer_vector_width": 32}}


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
        adapters: LoRA's; None if all weights are trained.
        placement: of layers, or periods, on the stages; `stacks`: of the layers of every kind.
        weights: the record of every weight, in the structure of `TrainState.params`.
        gathers_late: see `overlap.overlaps_gathers`.
        per_step, at_end, at_start, per_use: how ZeRO shards weights that are gathered once a step, at its end, at its
            start, and before every use (`Weight.per_step`, `at_end`, `at_start`, `computed`); the first two are the
            trained ones.
        optimizer, matrices: the optimizer of the trained weights, and those that Muon updates, by path.
        decays: which trained weights decay.
        own: the user's, if that is the optimizer.
        mixing: why its updates need whole weights, in words; empty if ZeRO's shards are enough, as they are for ours.
        loss_scale: how fp16's loss scale changes; None in other precisions.
        frozen: weights that `train.freeze` names, which have gradients of zero and are not updated.
    """

    def __init__(
        self,
        config: StepConfig,
        mesh: Mesh,
        model: StagedModel,
        operand_dtype: DTypeLike | None = None,
        backend: Backend = CPU,
    ):
        self.mesh, self.model, self._config = mesh, config.model, config
        self.stacks = stacks_of(config)
        self.placement = dataclasses.replace(next(iter(self.stacks.values())), runs=())
        self.loss_scale = config.loss_scale if config.precision == "fp16" else None
        self.compute_dtype, self.main_dtype = COMPUTE_DTYPE[config.precision], MAIN_DTYPE[config.precision]
        self.has_main = self.compute_dtype != self.main_dtype
        self.adapters = adapters = Adapters(config.lora, config.model, model) if config.lora.rank else None
        self.frozen = frozen_weights(config.train.freeze, model.shapes, config.model)
        whole = config.model.whole_heads(config.mesh.tensor)
        rules = rules_of(split_vocabulary=config.splits_vocabulary, whole=whole)
        zero = config.optimizer.zero
        sizes, joins = config.mesh.on_devices, joins_of(config)
        weights = weights_of(model, adapters, rules, self.stacks, sizes, zero, joins)
        trained = jax.tree.leaves(self.trained(weights))
        self.gathers_late = overlaps_gathers(config, backend, size_of_layers(trained), copied=operand_dtype is not None)
        self.weights = gathered_late(weights, config.model) if self.gathers_late else weights
        self._by_path: dict[Path, Weight] = {weight.path: weight for weight in jax.tree.leaves(self.weights)}
        of_trained = self.trained(self.weights)
        self.per_step, self.at_end = (_shards(way, of_trained) for way in ("per_step", "at_end"))
        self.per_use, self.at_start = (_shards(way, self.weights) for way in ("computed", "at_start"))
        copied_to = operand_dtype if adapters else None
        self._copies = LayerCopies(config.model, self.weights["blocks"], copied_to, both=True)
        muon, wide = config.optimizer.name == "muon", config.optimizer.muon_precision == "fp32"
        trained = jax.tree.leaves(of_trained) if muon else []
        self.matrices = {weight.path: weight.matrices for weight in trained if weight.matrices}
        self.decays = jax.tree.map(attrgetter("decays"), of_trained)
        dtype = self.main_dtype if wide else self.compute_dtype
        shapes = model.shapes | ({LORA: adapters.shapes} if adapters else {})
        self.own, self.mixing = own_optimizer(config.optimizer, config.own_optimizer), ""
        self.optimizer: Any = make_optimizer(
            config.optimizer, self.matrices, self.decays, dtype, same_bits=config.bitwise > 0
        )
        if self.own:
            of_main = jax.tree.map(lambda leaf: leaf.update(dtype=self.main_dtype), self.trained(shapes))
            layered = [path for path, weight in self._by_path.items() if weight.layered]
            shards = jax.tree.map(self._shard_of, of_trained)
            self.optimizer = ByLayer(self.own.transformation(config.optimizer), of_main, layered, shards)
            self.mixing = {None: self.optimizer.mixing, False: "the user says so", True: ""}[self.own.elementwise]
        self.canonical_shapes: TrainState = jax.eval_shape(self._begun, shapes)

        def fresh() -> TrainState:
            return self._begun(model.init(config.seed) | ({LORA: adapters.init(config.seed)} if adapters else {}))

        self._fresh = fresh

    def _shard_of(self, weight: Weight) -> jax.ShapeDtypeStruct:
        """What a device has of a weight's main copy, layers [L, …]."""
        shape = weight.stage_shape(weight.owned)
        return jax.ShapeDtypeStruct((prod(shape[:3]), *shape[3:]) if weight.stack else shape, self.main_dtype)

    @property
    def has_our_rate(self) -> bool:
        """Whether the optimizer follows the configuration's schedule of the learning rate."""
        return self.own is None or self.own.has_our_rate

    def weight_at(self, path: tuple[Any, ...]) -> Weight | None:
        """The weight that a leaf of a state holds, or whose moment it is, by the leaf's path; None for any other, and
        for the state of an optimizer that needs whole weights."""
        if self.mixing and path[0] == _OPTIMIZER:
            return None
        weight_path = path_in(path, self._by_path)
        return None if weight_path is None else self._by_path[weight_path]

    def is_stacked(self, path: tuple[Any, ...]) -> bool:
        """Whether a leaf of a state belongs to the stacked layers, by its path."""
        weight = self.weight_at(path)
        return weight is not None and weight.stack is not None

    def _specs(self, spec: Callable[[Weight, Sharding], PartitionSpec]) -> TrainState:
        """Specs of a state with its main weights in `params`, given those of a weight that ZeRO shards."""

        def spec_of(path: Any, leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
            weight = self.weight_at(path)
            if weight is None:
                return PartitionSpec()
            computed = path[0] == _PARAMS and not (weight.trained and self.has_main)
            return spec(weight, weight.kept if computed else weight.owned)

        return map_with_path(spec_of, self.canonical_shapes)

    @cached_property
    def specs(self) -> TrainState:
        """How the state is sharded."""
        state = self._specs(Weight.stage_spec)
        main = self.trained(state.params) if self.has_main else None
        params = _stage_specs("kept", self.weights)
        copies = unflatten_dict(self._copies.copied_specs(*ON_STAGES))
        return dataclasses.replace(state, params=params, main=main, copies=copies)

    @cached_property
    def computed_specs(self) -> Tree:
        """How the weights are sharded that forward-only programs are given: none are gathered late."""
        return _stage_specs("computed", self.weights)

    @cached_property
    def trained_specs(self) -> Tree:
        """How main weights, moments and reduced gradients are sharded."""
        return _stage_specs("owned", self.trained(self.weights))

    @cached_property
    def canonical_specs(self) -> TrainState:
        """How the state in canonical form is sharded."""
        return self._specs(lambda weight, sharding: weight.canonical_spec(sharding.if_even))

    def trained(self, weights: Tree) -> Tree:
        """The trained part of the weights, or of a tree like them: the adapters, or everything."""
        return weights if self.adapters is None else weights[LORA]

    def with_trained(self, weights: Tree, trained: Tree) -> Tree:
        """The weights with their trained part replaced."""
        return trained if self.adapters is None else weights | {LORA: trained}

    def with_frozen(self, new: Tree, old: Tree) -> Tree:
        """Trained weights, or a tree with arrays like them, with those of frozen weights from `old`. Inside the region:
        arrays are this device's shards."""
        return map_with_path(self._with_frozen, new, old) if self.frozen else new

    def _with_frozen(self, path: Any, new: Array, old: Array) -> Array:
        weight = self.weight_at(path)
        if weight is None or weight.path not in self.frozen:
            return new
        mask = self.frozen[weight.path]
        if mask.all():
            return old
        frozen = jnp.asarray(mask)
        if weight.stack:
            index = weight.stack.layer_index
            frozen = jnp.asarray((index >= 0) & mask[index])[:, axis_index(PIPE), None]
            return jnp.where(frozen.reshape(*frozen.shape, *[1] * (new.ndim - frozen.ndim)), old, new)
        frozen = jnp.broadcast_to(frozen.reshape(-1, *[1] * (len(weight.whole) - 1)), weight.whole)
        return jnp.where(Shards(weight.owned).take(frozen), old, new)  # of layers, which ZeRO may shard

    def with_main(self, state: TrainState) -> TrainState:
        """A state, or a tree like one, with the main weights in `params`, and nothing that is made from them."""
        params = state.params if state.main is None else self.with_trained(state.params, state.main)
        return dataclasses.replace(state, params=params, main=None, copies=None)

    @cached_property
    def shapes(self) -> TrainState:
        """Shapes and dtypes of the state on this mesh's stages."""
        return jax.eval_shape(self.pipelined, self.canonical_shapes)

    @cached_property
    def computed_shapes(self) -> Tree:
        """Shapes and dtypes of the weights that forward-only programs are given."""
        return jax.eval_shape(self.params_on_stages, self.canonical_shapes.params)

    def _begun(self, weights: Tree) -> TrainState:
        """The canonical state before the first step, from canonical weights of any dtype."""
        return self.begin(jax.tree.map(lambda weight: weight.astype(self.main_dtype), weights))

    def begin(self, weights: Tree) -> TrainState:
        """The canonical state before the first step, from canonical main weights."""
        optimizer = self.optimizer.init(self.trained(weights))
        scale = LossScale.start(self.loss_scale)
        average = self.trained(weights) if self._config.train.ema else None
        return TrainState(jnp.zeros((), jnp.int32), weights, None, optimizer, scale, initial_norms(), average)

    def init(self) -> TrainState:
        """A fresh state, never materialized unsharded: made in canonical form, then moved to its stages."""
        # A constraint, unlike the sharding of a result, may also shard a dim whose size is not divisible.
        canonical = self._specs(
            lambda weight, sharding: weight.canonical_spec(dataclasses.replace(sharding, joined=()))
        )
        first, made_in = (shardings(self.mesh, specs) for specs in (canonical, self.specs))

        def fresh() -> TrainState:
            return self.pipelined(jax.lax.with_sharding_constraint(self._fresh(), first))

        options = INIT_OPTIONS.get(self.mesh.devices.flat[0].platform)
        return jax.jit(fresh, out_shardings=made_in, compiler_options=options)()

    @cached_property
    def from_canonical(self):
        """canonical state -> the state on this mesh's stages, in this run's precision."""
        return jax.jit(self.pipelined, out_shardings=shardings(self.mesh, self.specs))

    @cached_property
    def computed_from_canonical(self):
        """canonical main weights -> the weights that forward-only programs are given."""
        return jax.jit(self.params_on_stages, out_shardings=shardings(self.mesh, self.computed_specs))

    def with_weights(self, state: TrainState, canonical: Tree = None) -> TrainState:
        """A state with other weights, from canonical main ones. An average begins with them, or with those that are
        there, and so does what a user's optimizer copies of weights, as `schedule_free` does."""
        copied = self.optimizer.copied if self.own else jax.tree.map(lambda _: False, state.optimizer)

        def following(state: TrainState) -> tuple[Tree, ...]:
            copies = jax.tree.map(lambda copied, x: x if copied else None, copied, state.optimizer)
            return state.params, state.main, state.average, copies

        def begun(state: TrainState, canonical: Tree) -> tuple[Tree, ...]:
            weights = self.canonical(state).params if canonical is None else canonical
            return following(self.pipelined(self._begun(weights)))

        params, main, average, copies = self._jitted(begun, following(self.specs))(state, canonical)
        optimizer = jax.tree.map(_first, copies, state.optimizer, is_leaf=lambda x: x is None)
        return dataclasses.replace(state, params=params, main=main, average=average, optimizer=optimizer)

    @cached_property
    def to_canonical(self):
        """state -> the state in canonical form, on this mesh."""
        return jax.jit(self.canonical, out_shardings=shardings(self.mesh, self.canonical_specs))

    def optimizer_state(self, state: TrainState) -> Tree:
        """The optimizer's state in canonical form; that of a user's as its `init` makes it."""
        found = jax.jit(lambda state: self.canonical(state).optimizer)(state)
        return with_keys(found[0]) if self.own else found

    @cached_property
    def _stored_scale(self):
        """The loss scale as stored in a checkpoint."""
        return self._jitted(lambda scale: scale.stored(self.loss_scale), PartitionSpec())

    @cached_property
    def _resumed_scale(self):
        """The loss scale to resume with, from a checkpoint's."""
        return self._jitted(lambda scale: scale.resumed(self.loss_scale), PartitionSpec())

    @cached_property
    def _frozen_copies(self):
        """weights in the compute dtype, on their stages -> the float8 copies of frozen ones."""
        return self._jitted(lambda params: unflatten_dict(self._copies.copied(params["blocks"])), self.specs.copies)

    def _jitted(self, function: Callable, specs: Tree) -> Callable:
        return jax.jit(function, out_shardings=shardings(self.mesh, specs))

    def computed(self, main: Tree) -> Tree:
        """Main weights as layers compute with them."""
        return in_compute_dtype(main, self.compute_dtype)

    # The canonical form. Here leaves move from their stages and to them as traced arrays; `transfer.py` moves the same
    # leaves between devices and host memory.

    def canonical(self, state: TrainState) -> TrainState:
        """The state in canonical form."""
        return map_with_path(self._from_stages, *self.to_store(state))

    def to_store(self, state: TrainState) -> tuple[TrainState, TrainState, TrainState]:
        """What canonical form has of a state, on its stages; its specs there, and its types in canonical form."""
        stored = dataclasses.replace(self.with_main(state), loss_scale=self._stored_scale(state.loss_scale))
        return stored, self.with_main(self.specs), self.canonical_shapes

    def pipelined(self, canonical: TrainState) -> TrainState:
        """The state on this mesh's stages, in this run's precision."""
        return self.completed(*(map_with_path(self._on_stages, *part) for part in self.to_place(canonical)))

    def to_place(self, canonical: TrainState) -> tuple[tuple[Tree, ...], ...]:
        """Three parts of a state, from canonical leaves: all but weights, main weights, and the weights that layers
        compute with. Of each part the leaves, their specs on the stages, and the dtype of those that are cast."""
        others = dataclasses.replace(canonical, params=None)
        main = (self.trained(canonical.params), self.trained_specs) if self.has_main else (None, None)
        specs = dataclasses.replace(self.specs, params=None, main=None, copies=None)
        return (others, specs), main, (canonical.params, self.specs.params, self._computed_dtypes)

    def completed(self, others: TrainState, main: Tree, params: Tree) -> TrainState:
        """The state that has these parts."""
        scale, copies = self._resumed_scale(others.loss_scale), self._frozen_copies(params)
        return dataclasses.replace(others, params=params, main=main, loss_scale=scale, copies=copies)

    @cached_property
    def _computed_dtypes(self) -> Tree:
        return jax.tree.map(lambda weight: weight.computed_in(self.compute_dtype, self.main_dtype), self.weights)

    def computed_to_place(self, canonical: Tree) -> tuple[Tree, ...]:
        """Like a part of `to_place`, of the weights that forward-only programs are given."""
        return canonical, self.computed_specs, self._computed_dtypes

    def params_on_stages(self, canonical: Tree, specs: Tree = None) -> Tree:
        """The weights that layers compute with, from canonical ones; by default as forward-only programs are given
        them."""
        canonical, computed_specs, dtypes = self.computed_to_place(canonical)
        return map_with_path(self._on_stages, canonical, specs or computed_specs, dtypes)

    def canonical_weights(self, tree: Tree) -> Tree:
        """Weights or gradients in canonical form."""
        return map_with_path(self._from_stages, tree)

    def _from_stages(self, path: Any, leaf: Array, spec: PartitionSpec | None = None, type_: Any = None) -> Array:
        weight = self.weight_at(path)
        leaf = weight.stack.to_canonical(leaf) if weight and weight.stack else leaf
        if weight and leaf.shape[weight.stack is not None :] != weight.shape:
            leaf = weight.zero.without_padding(leaf)
        return leaf if type_ is None else leaf.astype(type_.dtype)

    def _on_stages(self, path: Any, leaf: Array, spec: PartitionSpec, dtype: Any = None) -> Array:
        weight = self.weight_at(path)
        leaf = weight.stack.to_stages(leaf) if weight and weight.stack else leaf
        if weight:
            leaf = weight.sharding_of(spec).padded(leaf)
        return leaf if dtype is None else leaf.astype(dtype)


def _first(new: Array | None, old: Array) -> Array:
    return old if new is None else new


def _shards(way: str, weights: Tree) -> Shards:
    """How ZeRO shards weights, by an attribute of their records."""
    return Shards(jax.tree.map(attrgetter(way), weights))


def _stage_specs(way: str, weights: Tree) -> Tree:
    """Specs on the stages, by an attribute of the weights' records."""
    return jax.tree.map(lambda weight: weight.stage_spec(getattr(weight, way)), weights)

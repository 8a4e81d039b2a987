"""What is trained: the weights, AdamW's state and the step, their placement on the mesh, and their mesh-independent
form.

On devices the stacked layers are staged, `[chunks, stages, n, …]`; checkpoints and comparisons use the natural form
`[L, …]`, which does not depend on the mesh (`pipeline/placement.py`).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from megajax.config import Config
from megajax.mesh import RULES, SPLIT_VOCABULARY_RULES, mesh_spec, shardings
from megajax.models.gpt import GPTFunctions
from megajax.optim.adam import make_optimizer
from megajax.parallel.collectives import PIPE
from megajax.pipeline.placement import Placement
from megajax.precision import MAIN_DTYPE

Tree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything a checkpoint holds.

    Attributes:
        step: optimizer steps done, int32 scalar.
        params: main weights in fp32 (fp64 for that precision), `{"shared": …, "blocks": …}`.
        optimizer: optax's state, its moments shaped like `params`.
    """

    step: Array
    params: Tree
    optimizer: Tree


class StateLayout:
    """Shapes, specs and conversions of a `TrainState` on one mesh."""

    def __init__(self, config: Config, mesh: Mesh, model: GPTFunctions):
        self.mesh = mesh
        self._config, self._model = config, model
        self.placement = Placement(config.model.num_layers, config.mesh.pipe, config.pipeline.chunks)
        self.rules = SPLIT_VOCABULARY_RULES if config.splits_vocabulary else RULES
        dtype = MAIN_DTYPE[config.precision]

        def fresh() -> TrainState:
            params = jax.tree.map(lambda weight: weight.astype(dtype), model.init(config.seed))
            return TrainState(jnp.zeros((), jnp.int32), params, make_optimizer(config.optimizer).init(params))

        self._fresh = fresh
        self.natural_shapes = jax.eval_shape(fresh)
        split_layers = config.model.num_layers % config.mesh.pipe == 0
        self.natural_specs = self._specs(
            lambda spec: PartitionSpec(PIPE if split_layers else None, *mesh_spec(spec, self.rules)[1:])
        )
        self.specs = self._specs(
            lambda spec: mesh_spec(PartitionSpec("chunks", "stages", "layers", *spec[1:]), self.rules)
        )

    def _specs(self, block_spec) -> TrainState:
        """Specs of the whole state from those of the weights: moments are placed like their weight, scalars
        replicated."""
        logical = self._model.logical_specs
        is_spec = {"is_leaf": lambda leaf: isinstance(leaf, PartitionSpec)}
        params = {
            "shared": jax.tree.map(lambda spec: mesh_spec(spec, self.rules), logical["shared"], **is_spec),
            "blocks": jax.tree.map(block_spec, logical["blocks"], **is_spec),
        }
        optimizer = optax.tree_utils.tree_map_params(
            make_optimizer(self._config.optimizer),
            lambda _, spec: spec,
            self.natural_shapes.optimizer,
            params,
            transform_non_params=lambda _: PartitionSpec(),
        )
        return TrainState(PartitionSpec(), params, optimizer)  # type: ignore[arg-type]  # specs where arrays stand

    @cached_property
    def shapes(self) -> TrainState:
        """The state on this mesh's stages, as types."""
        return jax.eval_shape(self._staged, self.natural_shapes)

    def init(self) -> TrainState:
        """A fresh state, made in shards: of the natural form, which then goes to its stages."""
        natural = shardings(self.mesh, self.natural_specs)

        def fresh() -> TrainState:
            return self._staged(jax.lax.with_sharding_constraint(self._fresh(), natural))

        return jax.jit(fresh, out_shardings=shardings(self.mesh, self.specs))()

    @cached_property
    def from_natural(self):
        """natural state -> the state on this mesh's stages."""
        return jax.jit(self._staged, out_shardings=shardings(self.mesh, self.specs))

    @cached_property
    def to_natural(self):
        """state -> the state in natural form, on this mesh."""
        return jax.jit(self._natural, out_shardings=shardings(self.mesh, self.natural_specs))

    def natural_weights(self, tree: Tree) -> Tree:
        """Weights or gradients in natural form."""
        return _map_blocks(self.placement.to_natural, tree)

    def _staged(self, state: TrainState) -> TrainState:
        return _map_blocks(self.placement.to_stages, state)

    def _natural(self, state: TrainState) -> TrainState:
        return _map_blocks(self.placement.to_natural, state)


def _map_blocks(function, tree: Tree) -> Tree:
    """Apply `function` to the leaves that belong to the stacked layers: those below a key `blocks`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: function(leaf) if jax.tree_util.DictKey("blocks") in path else leaf, tree
    )

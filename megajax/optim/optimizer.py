"""The optimizer of a configuration."""

from collections.abc import Mapping
from typing import Any

import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike

from megajax.optim.adam import decay_mask, learning_rate, scale_by_adam
from megajax.optim.config import OptimizerConfig
from megajax.optim.muon import Matrices, Path, scale_by_muon

Tree = Any


def make_optimizer(
    config: OptimizerConfig, matrices: Mapping[Path, Matrices], dtype: DTypeLike
) -> optax.GradientTransformationExtraArgs:
    """AdamW or Muon with the run's schedule; weight decay on matrices and embeddings only.

    Args:
        matrices: of the weights that Muon can update, by their paths.
        dtype: what Muon's steps multiply in.
    """
    muon = config.name == "muon"
    first = scale_by_muon(config, matrices, dtype) if muon else scale_by_adam(config)
    return optax.chain(  # optax.adamw's, or optax.contrib.muon's
        first,
        optax.add_decayed_weights(config.weight_decay, decay_mask),
        *([_adamw_at_its_rate(config, matrices)] if muon and config.adamw_learning_rate else []),
        optax.scale_by_learning_rate(lambda step: learning_rate(step, config)),
    )


def _adamw_at_its_rate(config: OptimizerConfig, matrices: Mapping[Path, Matrices]) -> optax.GradientTransformation:
    """Updates of AdamW's weights are to have its own rate where they are multiplied with Muon's."""
    ratio = config.adamw_learning_rate / config.learning_rate

    def scaled(updates: Tree, params: Tree) -> Tree:
        flat = flatten_dict(updates)
        return unflatten_dict({path: leaf if path in matrices else ratio * leaf for path, leaf in flat.items()})

    return optax.stateless(scaled)

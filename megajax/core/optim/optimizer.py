"""Make the optimizer that a configuration describes."""

from collections.abc import Mapping

import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike

from megajax.core.optim.adam import learning_rate, scale_by_adam
from megajax.core.optim.config import OptimizerConfig
from megajax.core.optim.muon import Matrices, scale_by_muon
from megajax.core.trees import Path, Tree


def make_optimizer(
    config: OptimizerConfig,
    matrices: Mapping[Path, Matrices],
    decays: Tree,
    dtype: DTypeLike,
    *,
    same_bits: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """AdamW or Muon with the run's learning-rate schedule; weight decay on matrices and embeddings only.

    Args:
        matrices: the weights that Muon updates, by path.
        decays: which weights decay.
        dtype: the dtype of Muon's products.
        same_bits: whether Muon's updates have the same bits on every mesh.
    """
    muon = config.name == "muon"
    first = scale_by_muon(config, matrices, dtype, same_bits=same_bits) if muon else scale_by_adam(config)
    return optax.chain(  # as in optax.adamw and optax.contrib.muon
        first,
        optax.add_decayed_weights(config.weight_decay, decays),
        *([_adamw_at_its_rate(config, matrices)] if muon and config.adamw_learning_rate else []),
        optax.scale_by_learning_rate(lambda step: learning_rate(step, config)),
    )


def _adamw_at_its_rate(config: OptimizerConfig, matrices: Mapping[Path, Matrices]) -> optax.GradientTransformation:
    """Rescale the updates of AdamW's weights, so that Muon's learning rate turns into AdamW's own."""
    ratio = config.adamw_learning_rate / config.learning_rate

    def scaled(updates: Tree, params: Tree) -> Tree:
        flat = flatten_dict(updates)
        return unflatten_dict({path: leaf if path in matrices else ratio * leaf for path, leaf in flat.items()})

    return optax.stateless(scaled)

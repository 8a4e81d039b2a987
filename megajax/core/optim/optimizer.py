"""Make the optimizer that a configuration describes."""

from collections.abc import Mapping
from typing import Any

import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike

from megajax.core.optim.adam import decay_mask, learning_rate, scale_by_adam
from megajax.core.optim.config import OptimizerConfig
from megajax.core.optim.muon import Matrices, Path, scale_by_muon
from megajax.core.optim.own import kept_if_skipped

Tree = Any


def make_optimizer(
    config: OptimizerConfig,
    matrices: Mapping[Path, Matrices],
    dtype: DTypeLike,
    own: optax.GradientTransformationExtraArgs | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW or Muon with the run's learning-rate schedule; weight decay on matrices and embeddings only. Or an `own`
    one, as it is.

    Args:
        matrices: the weights that Muon updates, by path.
        dtype: the dtype of Muon's products.
    """
    if own is not None:
        return kept_if_skipped(own)
    muon = config.name == "muon"
    first = scale_by_muon(config, matrices, dtype) if muon else scale_by_adam(config)
    return optax.chain(  # as in optax.adamw and optax.contrib.muon
        first,
        optax.add_decayed_weights(config.weight_decay, decay_mask),
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

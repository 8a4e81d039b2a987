"""All of a model's weights from tensors in Hugging Face's format, in canonical form."""

from collections.abc import Callable
from typing import Any

import jax

from megajax.convert.families import exchange_for
from megajax.convert.weights import Places, Tensor, weight_of, weight_shapes
from megajax.models.config import ModelConfig


def from_tensors(places: Places, read: Callable[[str], Tensor], config: ModelConfig) -> dict[str, Any]:
    """Arguments as of `weight_of`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, ours: weight_of(places, read, config, path, ours.shape), weight_shapes(config)
    )


def places_of(model: ModelConfig) -> Places:
    """Where a model's weights are in the class of transformers that it is exported as."""
    return exchange_for(model, "", "it").places(model)

"""All of a model's weights from tensors in Hugging Face's format, in canonical form, and back; runs that have them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from megajax.convert.exporting import export_config, export_hf
from megajax.convert.families import exchange_for
from megajax.convert.importing import ImportedModel, write_run
from megajax.convert.weights import Tensor, to_tensors, weight_of, whole_model
from megajax.core.models.config import ModelConfig
from megajax.core.program.program import Program
from megajax.core.program.state import TrainState
from megajax.data.text.tokenizer import Tokenizer
from megajax.settings.config import Config


def from_tensors(tensors: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Any]:
    """Those of the class of transformers that the model is exported as."""
    places = exchange_for(model, "", "it").places(model)
    return jax.tree_util.tree_map_with_path(
        lambda path, ours: weight_of(places, tensors.__getitem__, model, path, ours.shape), whole_model(model).shapes
    )


def back_to_tensors(weights: Mapping[str, Any], model: ModelConfig) -> dict[str, np.ndarray]:
    """The inverse of `from_tensors`."""
    return to_tensors(exchange_for(model, "", "it").places(model), weights, model)


def weights_of(source: ImportedModel, seed: int = 0) -> dict[str, Any]:
    """All of a folder that was opened; what is fresh is drawn by the seed."""
    weight, shapes = source.weights.weights(seed), whole_model(source.config.model).shapes
    return jax.tree_util.tree_map_with_path(lambda path, ours: weight(path, ours.shape), shapes)


def exported(
    folder: Path, program: Program, config: Config, state: TrainState, tokenizer: Tokenizer | None = None
) -> Path:
    """A run in `folder` that has this state in step 7, and its export beside it."""
    run, there = folder / "run", folder / "exported"
    write_run(run, "RUN", config, program.layout, tokenizer, lambda checkpoints: checkpoints.save(7, state))
    assert export_hf(run, export_config(run), there) == (7, tokenizer)
    return there

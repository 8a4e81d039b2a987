"""What Python code gives a configuration in place of its options: a loss, an optimizer."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from megajax.core.errors import UserError
from megajax.core.models.own_loss import Loss
from megajax.core.models.registry import FAMILIES
from megajax.core.optim.config import OWN
from megajax.core.optim.own import OwnOptimizer
from megajax.core.program.program import Program
from megajax.settings.config import Config
from megajax.training.describe import own_optimizer_line


def with_own(
    config: Config, loss: Loss | Callable[..., Any] | None, optimizer: Any, elementwise: bool | None = None
) -> Config:
    """The configuration with a loss and an optimizer, if they are given."""
    if loss is not None:
        model = config.model
        if model.head != "pretraining" or not FAMILIES[model.family].continues_text:
            raise UserError(f"loss with --model.family {model.family}; valid: a decoder, or a loss of the model's own")
        loss = loss if isinstance(loss, Loss) else Loss(loss)
        if loss.per == "row" and model.num_predicting:
            modules = f"--model.prediction-modules {model.prediction_modules}, whose losses are of tokens"
            raise UserError(f"a loss of rows with {modules}; valid: --model.prediction-coefficient 0")
        config = dataclasses.replace(config, own_loss=loss, train=dataclasses.replace(config.train, loss=OWN))
    if optimizer is not None:
        own = OwnOptimizer(optimizer, elementwise)
        named = dataclasses.replace(config.optimizer, name=OWN)
        config = dataclasses.replace(config, own_optimizer=own, optimizer=named)
    return config


def as_weights(weights: Mapping[str, Any], wanted: Any, what: str = "set_weights") -> Any:
    """Weights in the form of the wanted ones, in host memory; errors begin with `what`."""
    if not isinstance(weights, Mapping):
        raise UserError(f"{what}: a {type(weights).__name__}; valid: nested dicts as from weights()")
    given_flat = flatten_dict(weights, sep="/")
    flat = flatten_dict(wanted, sep="/")
    for problem, names in (("without", flat.keys() - given_flat.keys()), ("with", given_flat.keys() - flat.keys())):
        if names:
            raise UserError(f"{what}: weights {problem} {min(map(str, names))}; valid: those of weights()")
    converted = {}
    for name, leaf in flat.items():
        array = np.asarray(given_flat[name])
        if array.shape != leaf.shape or not jnp.issubdtype(array.dtype, jnp.floating):
            raise UserError(f"{what}: {name} is {array.dtype}{[*array.shape]}; valid: floats {[*leaf.shape]}")
        converted[name] = array.astype(leaf.dtype)
    return unflatten_dict(converted, sep="/")


def warn_of_cost(program: Program) -> None:
    """Tell what it costs if an optimizer needs whole weights and the user did not say so."""
    layout = program.layout
    if layout.mixing and layout.own and layout.own.elementwise is None:
        line = f"{own_optimizer_line(program)}; elementwise=False silences this"
        warnings.warn(line, UserWarning, stacklevel=4)

"""Megatron-LM rebuilt on JAX: transformers pretrained on a (data, pipe, context, tensor) mesh.

`__all__` is the public Python API; docs/library.md shows it. Nothing in it, and so not even JAX, is imported before it
is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Config",
    "Family",
    "Loss",
    "Model",
    "PlainModel",
    "RunError",
    "Tracker",
    "UserError",
    "Weights",
    "distillation",
    "evaluate",
    "exact",
    "init",
    "load_preset",
    "make_program",
    "register",
    "restore",
    "with_teacher",
]

if TYPE_CHECKING:
    from megajax import exact
    from megajax.core.errors import RunError, UserError
    from megajax.core.models.distillation import distillation
    from megajax.core.models.own_family import Family, Weights
    from megajax.core.models.own_loss import Loss
    from megajax.library.beginning import init, load_preset, make_program, restore
    from megajax.library.evaluating import evaluate
    from megajax.library.model import Model
    from megajax.library.plain import PlainModel
    from megajax.library.teacher import with_teacher
    from megajax.settings.config import Config
    from megajax.settings.registration import register
    from megajax.training.trackers import Tracker
else:
    _MODULES = {
        "settings.config": ["Config"],
        "core.errors": ["RunError", "UserError"],
        "core.models.distillation": ["distillation"],
        "core.models.own_family": ["Family", "Weights"],
        "core.models.own_loss": ["Loss"],
        "settings.registration": ["register"],
        "library.beginning": ["init", "load_preset", "make_program", "restore"],
        "library.evaluating": ["evaluate"],
        "library.model": ["Model"],
        "library.plain": ["PlainModel"],
        "library.teacher": ["with_teacher"],
        "training.trackers": ["Tracker"],
    }
    _PLACES = {name: f"megajax.{module}" for module, names in _MODULES.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name == "exact":
            return importlib.import_module("megajax.exact")
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_PLACES[name]), name)

    def __dir__() -> list[str]:
        return [*globals(), *__all__]

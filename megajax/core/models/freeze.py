"""Freezing by name: which weights of a model `train.freeze` excludes from training."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from megajax.core.errors import UserError
from megajax.core.models.config import ModelConfig
from megajax.core.trees import Path

Masks = dict[Path, np.ndarray]  # which layers of a stacked weight are frozen, or whether another is; bool [L] or []
NONE = "none"
PREDICTION = "prediction"  # the modules among the weights of the ends
_SHARED, _BLOCKS, _DENSE = "shared", "blocks", "dense_blocks"
_LAYERS = re.compile(r"layers(?:\.([0-9]{1,9})(?:-([0-9]{1,9}))?)?(?:\.([a-z].*))?")


def names_of(texts: Iterable[str]) -> list[str]:
    """The names in the texts of `train.freeze`, in which commas separate them."""
    return [name for text in texts for name in text.split(",") if name != NONE]


def frozen_weights(texts: Iterable[str], shapes: Any, model: ModelConfig) -> Masks:
    """The frozen weights, given the shapes of all (`StagedModel`); those that are trained entirely are missing."""
    flat = flatten_dict(shapes)
    masks = {path: np.zeros(leaf.shape[:1] if _is_stacked(path) else (), bool) for path, leaf in flat.items()}
    idle = [PREDICTION] if model.prediction_modules > model.num_predicting else []
    for name in [*names_of(texts), *idle]:
        if not _freeze(name, masks, model):
            raise UserError(f"--train.freeze {name!r}; valid: {_valid(masks, model)}")
    if all(mask.all() for mask in masks.values()):
        raise UserError(f"--train.freeze {','.join(names_of(texts))} leaves nothing to train; valid: fewer weights")
    return {path: mask for path, mask in masks.items() if mask.any()}


def untrained_layers(masks: Masks, shapes: Any, model: ModelConfig) -> int:
    """How many of the stacked layers can be left out of the backward pass: the first ones, if neither they nor anything
    before them is trained."""
    flat = flatten_dict(shapes)
    before = [path for path in flat if path[0] == _SHARED and not is_head(path, model)]
    if not all(path in masks and masks[path].all() for path in before):
        return 0
    untrained = np.ones(model.num_blocks, bool)
    for path, numbers in _of_layers(flat, model):
        if path[0] == _BLOCKS:
            untrained[numbers - model.dense_layers] &= masks.get(path, False)
    return int(np.logical_and.accumulate(untrained).sum())


def fewer_layers(texts: Iterable[str], layers: int, fewer: int) -> tuple[str, ...]:
    """The same names for a model with `fewer` layers instead of `layers`, in proportion."""

    def scaled(match: re.Match[str]) -> str:
        first, last = int(match[1]), int(match[2] or match[1])
        begin = min(first * fewer // layers, fewer - 1)
        end = max(begin, round((last + 1) * fewer / layers) - 1)
        return f"layers.{begin}-{end}"

    return tuple(re.sub(r"layers\.([0-9]+)(?:-([0-9]+))?", scaled, name) for name in names_of(texts))


def _freeze(name: str, masks: Masks, model: ModelConfig) -> bool:
    """Mark the weights with this name; returns whether there are any."""
    found = False
    if match := _LAYERS.fullmatch(name):
        first = int(match[1] or 0)
        end = int(match[2] or match[1] or model.num_layers - 1) + 1
        for path, numbers in _of_layers(masks, model):
            if first < end <= model.num_layers and _begins(_in_layer(path, model), match[3] or ""):
                own = (numbers >= first) & (numbers < end)
                masks[path] |= own
                found |= bool(own.any())
        return found
    for path, mask in masks.items():
        if path[0] == _SHARED and path[1] != _DENSE and name and (_begins(path[1:], name) or name == _end(path, model)):
            mask[...] = found = True
    return found


def _of_layers(paths: Iterable[Path], model: ModelConfig) -> Iterator[tuple[Path, np.ndarray]]:
    """The stacked weights, and the numbers of the layers that have each."""
    dense, kinds = np.arange(model.dense_layers), model.kinds
    for path in filter(_is_stacked, paths):
        staged = np.asarray(kinds.get(path[1], kinds.get(""))) + model.dense_layers if path[0] == _BLOCKS else dense
        yield path, staged


def _is_stacked(path: Path) -> bool:
    return path[0] == _BLOCKS or path[1] == _DENSE


def _in_layer(path: Path, model: ModelConfig) -> Path:
    """The path of a stacked weight in its layer."""
    return path[1:] if path[0] == _BLOCKS and path[1] not in model.kinds else path[2:]


def _begins(path: Path, name: str) -> bool:
    """Whether a path begins with a dotted name."""
    return not name or f"{'.'.join(path)}.".startswith(f"{name}.")


def is_head(path: Path, model: ModelConfig) -> bool:
    """Whether one of the shared weights is used only after the layers."""
    return path[1] in ("final_norm", "output", "head", PREDICTION) or (path[1] == "norm" and model.layer_order == "pre")


def _end(path: Path, model: ModelConfig) -> str:
    """The end of the model that a shared weight belongs to; a tied table belongs to the embedding."""
    return "head" if is_head(path, model) else "embedding"


def _valid(masks: Masks, model: ModelConfig) -> str:
    """The valid names, in words."""
    own = dict.fromkeys(path[1] for path in masks if path[0] == _SHARED and path[1] != _DENSE)
    parts = dict.fromkeys(_in_layer(path, model)[0] for path, _ in _of_layers(masks, model))
    return (
        f"embedding, head, layers, layers.N or layers.FIRST-LAST with layers 0 to {model.num_layers - 1}, the same and "
        f"a part of the layers, as in layers.0.{next(iter(parts))} ({', '.join(parts)}), or {', '.join(own)}; or none"
    )

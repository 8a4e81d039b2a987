"""What a user passes to a model: token ids, or a batch's arrays by name. Letters: B sequences, T tokens."""

import operator
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from megajax.core.batch import BatchSpec
from megajax.core.errors import UserError
from megajax.core.models.registry import FAMILIES
from megajax.settings.config import Config

Ids = Any  # integers [B, T], as an array or nested lists
Given = Ids | Mapping[str, Any]
Batch = dict[str, Any]
_OURS = {"tokens", "targets", "token_types", "length", "order", "positions", "places", "start", "end", "label"}
_INPUTS = {"tokens", "token_types", "length"}


def inputs_of(config: Config, form: BatchSpec, data: Given) -> Batch:
    """The arrays that a model reads, from ids or a batch."""
    if isinstance(data, Mapping):
        return _named(config, form, data, _INPUTS & form.entries.keys())
    return {"tokens": _ids(config, data, more=0)}


def batch_of(config: Config, form: BatchSpec, data: Given) -> Batch:
    """A batch with its targets: as given, or from ids [B, T + 1], each of which is predicted from those before it."""
    if isinstance(data, Mapping):
        return _named(config, form, data, form.entries.keys())
    ids = _ids(config, data, more=1)
    if missing := form.entries.keys() - {"tokens", "targets", "positions"}:
        raise UserError(f"a batch without {', '.join(sorted(missing))}; valid: a dict with all its arrays")
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
    if "positions" in form.entries:
        batch["positions"] = np.broadcast_to(np.arange(ids.shape[1] - 1, dtype=np.int32), batch["tokens"].shape)
    return batch


def _ids(config: Config, data: Ids, more: int) -> Any:
    """Ids as an int32 array."""
    length, vocabulary = config.model.sequence_length, config.model.vocab_size
    shape = "[B, T + 1]" if more else "[B, T]"
    valid = f"valid: token ids {shape}, whole numbers from 0 to {vocabulary - 1}, T at most {length}"
    if not FAMILIES[config.model.family].continues_text:
        raise UserError(f"ids for a model of --model.family {config.model.family}; valid: a batch with all its arrays")
    ids = _array(data, valid)
    if ids.ndim != 2 or not ids.shape[0] or not 1 + more <= ids.shape[1] <= length + more:
        raise UserError(f"ids of shape {list(ids.shape)}; {valid}")
    if (beyond := _beyond(ids, 0, vocabulary - 1)) is not None:
        raise UserError(f"an id {beyond}; {valid}")
    return ids.astype(np.int32)


def shape_of_ids(data: Given) -> tuple[int, ...] | None:
    """The shape of what is given; None for a batch by name, and for lists of different lengths."""
    try:
        return None if isinstance(data, Mapping) else np.shape(data)
    except ValueError:
        return None


def prompt_ids(config: Config, prompt: Any, position: int) -> list[int]:
    """The token ids of the `position`-th prompt."""
    length, vocabulary = config.model.sequence_length, config.model.vocab_size
    valid = f"valid: 1 to {length}, from 0 to {vocabulary - 1}"
    try:
        ids = [operator.index(token) for token in prompt]
    except TypeError:
        raise UserError(f"generate: prompt {position} is neither text nor a list of token ids; {valid}") from None
    if not 1 <= len(ids) <= length or not 0 <= min(ids) <= max(ids) < vocabulary:
        raise UserError(f"generate: prompt {position} has {len(ids)} tokens, or invalid ids; {valid}")
    return ids


def _named(config: Config, form: BatchSpec, data: Mapping[str, Any], needed: Collection[str]) -> Batch:
    arrays = ", ".join(f"{name} {['B', *entry.dims]}".replace("'", "") for name, entry in form.entries.items())
    floats = [name for name, entry in form.entries.items() if entry.dtype != "int32"]
    valid = f"valid: {arrays}, whole numbers{' but for ' * bool(floats)}{', '.join(floats)}; tokens at most "
    valid += f"{config.model.sequence_length}"
    for problem, names in (("without", set(needed) - set(data)), ("with", set(data) - set(form.entries))):
        if names:
            raise UserError(f"a batch {problem} {', '.join(sorted(map(str, names)))}; {valid}")
    batch = {name: _array(array, valid, form.entries[name].dtype) for name, array in data.items()}
    tokens = batch["tokens"]
    rows, length = (tokens.shape[0], tokens.shape[-1]) if tokens.ndim > 1 else (0, 0)
    shapes = form.shapes(rows, tokens=length) if rows and 1 <= length <= config.model.sequence_length else {}
    for name, array in batch.items():
        if array.shape != shapes.get(name):
            raise UserError(f"{name} of shape {list(array.shape)}; {valid}")
        entry = form.entries[name]
        low, high = min(entry.padding, 0), _largest(config, "tokens" if entry.ids else name, length)
        low = low if entry.ids or name in _OURS else -high
        if name not in floats and (beyond := _beyond(array, low, high)) is not None:
            raise UserError(f"{name} with the number {beyond}; valid: from {low} to {high}")
    return {name: array.astype(form.entries[name].dtype) for name, array in batch.items()}


def _largest(config: Config, name: str, length: int) -> int:
    """The largest valid number in an array of a batch of `length` tokens."""
    ids = config.model.vocab_size - 1
    known = {
        **{"tokens": ids, "targets": ids, "token_types": 1, "length": length, "order": 1},
        **dict.fromkeys(("positions", "places", "start", "end"), length - 1),
        "label": config.model.num_classes - 1,
    }
    return known.get(name, np.iinfo(np.int32).max)


def _beyond(array: Any, low: int, high: int) -> int | None:
    """A number in an array that is not from `low` to `high`; None if there is none, or while JAX traces the array."""
    if not isinstance(array, np.ndarray):
        return None
    least, most = int(array.min()), int(array.max())
    return least if least < low else most if most > high else None


def _array(data: Any, valid: str, dtype: str = "int32") -> Any:
    """Integers, or the floats of a dtype, as a NumPy array or a tracer."""
    try:
        array = data if isinstance(data, jax.core.Tracer) else np.asarray(data)
    except ValueError:  # rows of different lengths
        raise UserError(f"lists of different lengths; {valid}") from None
    if not np.issubdtype(array.dtype, np.integer if dtype == "int32" else np.number):
        raise UserError(f"numbers of the type {array.dtype}; {valid}")
    return array


def padded(form: BatchSpec, batch: Mapping[str, npt.NDArray[Any]], rows: int) -> dict[str, npt.NDArray[Any]]:
    """A batch padded to `rows` rows."""
    free = rows - len(batch["tokens"])
    nothing = form.padding(free, tokens=batch["tokens"].shape[-1])
    return {name: np.concatenate([array, nothing[name]]) for name, array in batch.items()}

"""Rotary positions in config.json: `rope_theta` with `rope_scaling`, or the `rope_parameters` of transformers 5, which
have both in one object. The rules of precedence are those of transformers 5."""

from collections.abc import Mapping
from typing import Any

from megajax.convert.parts import Part
from megajax.convert.settings import Fields
from megajax.models.config import ModelConfig

_SCALINGS = {"default": "none", "linear": "linear", "llama3": "llama3"}  # their rope_type -> ours
_LLAMA3 = {  # theirs -> ours
    "low_freq_factor": "model.rope_low_frequency",
    "high_freq_factor": "model.rope_high_frequency",
}
_LENGTH = "original_max_position_embeddings"
_KNOWN = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", *_LLAMA3, _LENGTH)


def _read(fields: Fields, _: Mapping[str, Any]) -> dict[str, Any]:
    """Our values by key.

    Raises:
        UserError: the positions are none of ours.
    """
    part = fields.part("rope_scaling" if fields.get("rope_scaling") else "rope_parameters")
    for name in part.names():
        if name not in _KNOWN:
            raise part.refusal(name, part.get(name), f"without it; known are {', '.join(_KNOWN)}")
    for owner in part, fields:
        owner.check("partial_rotary_factor", 1, None)
    kind = "rope_type" if part.has("rope_type") else "type"
    part.check(kind, *_SCALINGS)
    scaling = _SCALINGS[part.get(kind, "default")]
    theta = (part if part.has("rope_theta") else fields).value("rope_theta", "model.rope_theta", 10_000.0)
    found = {"model.positions": "rotary", "model.rope_theta": theta, "model.rope_scaling": scaling}
    if scaling != "none":
        found["model.rope_factor"] = part.value("factor", "model.rope_factor")
    return found | (_read_llama3(fields, part) if scaling == "llama3" else {})


def _read_llama3(fields: Fields, part: Fields) -> dict[str, Any]:
    found = {key: part.value(name, key) for name, key in _LLAMA3.items()}
    low, high = _LLAMA3
    if part.get(low) >= part.get(high):
        raise part.refusal(high, part.get(high), f"more than {low}, {part.get(low)}")
    owner, name = next(
        (owner, name)
        for owner, name in ((fields, _LENGTH), (part, _LENGTH), (fields, "max_position_embeddings"))
        if owner.has(name)
    )
    return found | {"model.rope_original_length": owner.value(name, "model.rope_original_length")}


def _write(model: ModelConfig) -> dict[str, Any]:
    """In both spellings: versions of transformers before 5 do not know `rope_parameters`, and would take the default
    angles without a word."""
    kind = next(theirs for theirs, ours in _SCALINGS.items() if ours == model.rope_scaling)
    scaling: dict[str, Any] = {"rope_type": kind}
    if model.rope_scaling != "none":
        scaling["factor"] = model.rope_factor
    if model.rope_scaling == "llama3":
        scaling |= {"low_freq_factor": model.rope_low_frequency, "high_freq_factor": model.rope_high_frequency}
        scaling[_LENGTH] = model.rope_original_length
    theta = {"rope_theta": model.rope_theta}
    return theta | {
        "rope_scaling": scaling if model.rope_scaling != "none" else None,
        "rope_parameters": scaling | theta,
    }


ROPE = Part(
    (
        *("rope_theta", "rope_scaling", "rope_factor"),
        *("rope_low_frequency", "rope_high_frequency", "rope_original_length"),
    ),
    _read,
    _write,
)

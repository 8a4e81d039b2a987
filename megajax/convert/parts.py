"""Options that a class's config.json does not represent one to one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megajax.convert.settings import Fields
from megajax.core.models.config import ModelConfig

Lacks = dict[str, Any]  # options of the model that a class cannot represent, each with a valid value


@dataclass(frozen=True)
class OptionGroup:
    """How config.json represents some options."""

    options: tuple[str, ...]  # the options it covers
    # (config.json, values by key that the user gave) -> values by key for a run's preset; raises `UserError` if we do
    # not support the model.
    read: Callable[[Fields, Mapping[str, Any]], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]  # model -> fields of config.json
    lacks: Callable[[ModelConfig], Lacks] = lambda _: {}  # model -> those options whose values it cannot represent


def words(option: str, field: str, ours: Mapping[str, str]) -> OptionGroup:
    """An option whose values have other names there: `ours` by theirs. A missing field means the first."""

    def read(fields: Fields, _: Mapping[str, Any]) -> dict[str, Any]:
        fields.check(field, *ours)
        return {f"model.{option}": ours[fields.get(field, next(iter(ours)))]}

    def write(model: ModelConfig) -> dict[str, Any]:
        return {field: next(name for name, own in ours.items() if own == getattr(model, option))}

    def lacks(model: ModelConfig) -> Lacks:
        return {} if getattr(model, option) in ours.values() else {option: next(iter(ours.values()))}

    return OptionGroup((option,), read, write, lacks)


def plain_heads(heads: str, width: str) -> OptionGroup:
    """As many key heads as query heads, dividing the width; the arguments are the names of the fields."""

    def read(fields: Fields, _: Mapping[str, Any]) -> dict[str, Any]:
        fields.check_divides(heads, width)
        return {}

    def lacks(model: ModelConfig) -> Lacks:
        found: Lacks = {} if model.num_kv_heads == model.num_heads else {"num_kv_heads": model.num_heads}
        if indivisible := lacks_divisible_heads(model):
            return found | indivisible
        size = model.hidden_size // model.num_heads
        return found | ({} if model.head_size == size else {"head_size": size})

    return OptionGroup(("num_kv_heads", "head_size"), read, lambda _: {}, lacks)


def lacks_divisible_heads(model: ModelConfig) -> Lacks:
    """For a class whose heads must divide the width."""
    heads, hidden = model.num_heads, model.hidden_size
    return {"hidden_size": hidden // heads * heads or heads} if hidden % heads else {}


def dropout(*names: str, of_head: str = "") -> OptionGroup:
    """Several dropout rates there, for which we have one; that `of_head` may be null, and is then as the others."""

    def read(fields: Fields, given: Mapping[str, Any]) -> dict[str, Any]:
        if "model.dropout" in given:
            return {}
        rates = {name: fields.get(name, 0.1) for name in names}
        if fields.get(of_head) is not None:
            rates[of_head] = fields[of_head]
        for name, rate in rates.items():
            if type(rate) not in (int, float) or not 0 <= rate < 1:
                raise fields.refusal(name, rate, "0 or more and less than 1")
        if len(set(rates.values())) > 1:
            said = ", ".join(f"{name} {rate}" for name, rate in rates.items())
            raise fields.error(said, "all the same, or --model.dropout X")
        return {"model.dropout": rates[names[0]]}

    return OptionGroup(("dropout",), read, lambda model: dict.fromkeys(names, model.dropout))


# Rotary positions: `rope_theta` with `rope_scaling`, or `rope_parameters` in transformers 5, an object with both. The
# rules of precedence are those of transformers 5.
_SCALINGS = {"default": "none", "linear": "linear", "llama3": "llama3"}  # their rope_type -> ours
_LLAMA3 = {"low_freq_factor": "rope_low_frequency", "high_freq_factor": "rope_high_frequency"}  # theirs -> ours
_LENGTH = "original_max_position_embeddings"
_KNOWN = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", *_LLAMA3, _LENGTH)


def _read_rope(fields: Fields, default: float) -> dict[str, Any]:
    part = fields.part("rope_scaling" if fields.get("rope_scaling") else "rope_parameters")
    for name, value in part.items():
        if name not in _KNOWN:
            raise part.refusal(name, value, f"without it; known are {', '.join(_KNOWN)}")
    for owner in part, fields:
        owner.check("partial_rotary_factor", 1, None)
    kind = "rope_type" if "rope_type" in part else "type"
    part.check(kind, *_SCALINGS)
    scaling = _SCALINGS[part.get(kind, "default")]
    theta = (part if "rope_theta" in part else fields).value("rope_theta", "model.rope_theta", default)
    found = {"model.positions": "rotary", "model.rope_theta": theta, "model.rope_scaling": scaling}
    if scaling != "none":
        found["model.rope_factor"] = part.value("factor", "model.rope_factor")
    if scaling == "llama3":
        found |= {f"model.{ours}": part.value(name, f"model.{ours}") for name, ours in _LLAMA3.items()}
        low, high = (part[name] for name in _LLAMA3)
        if low >= high:
            raise part.refusal("high_freq_factor", high, f"more than low_freq_factor, {low}")
        places = ((fields, _LENGTH), (part, _LENGTH), (fields, "max_position_embeddings"))
        owner, name = next((owner, name) for owner, name in places if name in owner)
        found["model.rope_original_length"] = owner.value(name, "model.rope_original_length")
    return found


def _write_rope(model: ModelConfig) -> dict[str, Any]:
    """Write both spellings: transformers before version 5 does not know `rope_parameters`, and would silently use the
    default angles."""
    kind = next(theirs for theirs, ours in _SCALINGS.items() if ours == model.rope_scaling)
    scaling: dict[str, Any] = {"rope_type": kind}
    if model.rope_scaling != "none":
        scaling["factor"] = model.rope_factor
    if model.rope_scaling == "llama3":
        scaling |= {name: getattr(model, ours) for name, ours in _LLAMA3.items()}
        scaling[_LENGTH] = model.rope_original_length
    theta = {"rope_theta": model.rope_theta}
    return theta | {
        "rope_scaling": scaling if model.rope_scaling != "none" else None,
        "rope_parameters": scaling | theta,
    }


def rope(default: float) -> OptionGroup:
    """Rotary positions; `default` is the base of the angles if it is missing."""
    options = ("rope_theta", "rope_scaling", "rope_factor", *_LLAMA3.values(), "rope_original_length")
    return OptionGroup(options, lambda fields, _: _read_rope(fields, default), _write_rope)

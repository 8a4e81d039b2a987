"""What a class's config.json says in another way than one to one with our options."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megajax.convert.settings import Fields
from megajax.models.config import ModelConfig

Lacks = dict[str, Any]  # options of the model that a class cannot hold, each with a value that would be valid


def _nothing(_: ModelConfig) -> Lacks:
    return {}


@dataclass(frozen=True)
class Part:
    """Some options in config.json.

    Attributes:
        options: that it covers.
        read: (config.json, values by key that the user gave) -> values by key of a run's preset; raises `UserError`
            where the model is not ours.
        write: model -> fields of config.json.
        lacks: model -> those of the options whose values the class cannot hold.
    """

    options: tuple[str, ...]
    read: Callable[[Fields, Mapping[str, Any]], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]
    lacks: Callable[[ModelConfig], Lacks] = _nothing


def words(option: str, field: str, ours: Mapping[str, str]) -> Part:
    """An option whose values have other names there: `ours` by theirs, a missing field having the first."""

    def read(fields: Fields, _: Mapping[str, Any]) -> dict[str, Any]:
        fields.check(field, *ours)
        return {f"model.{option}": ours[fields.get(field, next(iter(ours)))]}

    def write(model: ModelConfig) -> dict[str, Any]:
        return {field: next(name for name, own in ours.items() if own == getattr(model, option))}

    def lacks(model: ModelConfig) -> Lacks:
        return {} if getattr(model, option) in ours.values() else {option: next(iter(ours.values()))}

    return Part((option,), read, write, lacks)


def plain_heads(heads: str, width: str) -> Part:
    """As many heads of keys as of queries, which divide the width; the names are those of the fields."""

    def read(fields: Fields, _: Mapping[str, Any]) -> dict[str, Any]:
        fields.check_divides(heads, width)
        return {}

    def lacks(model: ModelConfig) -> Lacks:
        found: Lacks = {} if model.num_kv_heads == model.num_heads else {"num_kv_heads": model.num_heads}
        if indivisible := lacks_divisible_heads(model):
            return found | indivisible
        size = model.hidden_size // model.num_heads
        return found | ({} if model.head_size == size else {"head_size": size})

    return Part(("num_kv_heads", "head_size"), read, lambda _: {}, lacks)


def lacks_divisible_heads(model: ModelConfig) -> Lacks:
    """Of a class whose heads must divide the width."""
    heads, hidden = model.num_heads, model.hidden_size
    return {"hidden_size": hidden // heads * heads or heads} if hidden % heads else {}


def dropout(*names: str) -> Part:
    """Several rates there, of which we have one."""

    def read(fields: Fields, given: Mapping[str, Any]) -> dict[str, Any]:
        return {} if "model.dropout" in given else {"model.dropout": _common_rate(fields, names)}

    return Part(("dropout",), read, lambda model: dict.fromkeys(names, model.dropout))


def _common_rate(fields: Fields, names: Sequence[str]) -> float:
    rates = [fields.get(name, 0.1) for name in names]
    for name, rate in zip(names, rates, strict=True):
        if type(rate) not in (int, float) or not 0 <= rate < 1:
            raise fields.refusal(name, rate, "0 or more and less than 1")
    if len(set(rates)) > 1:
        given = ", ".join(f"{name} {rate}" for name, rate in zip(names, rates, strict=True))
        raise fields.error(given, "all the same, or --model.dropout X")
    return rates[0]

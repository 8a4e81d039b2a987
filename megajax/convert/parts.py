"""Options that a class's config.json does not represent one to one."""

import math
from collections import ChainMap
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
    # config.json -> values by option; raises `UserError` if we do not support the model. Not called for the dropout if
    # the user gives one.
    read: Callable[[Fields], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]  # model -> fields of config.json
    lacks: Callable[[ModelConfig], Lacks] = lambda _: {}  # model -> those options whose values it cannot represent


def words(option: str, field: str, ours: Mapping[Any, Any]) -> OptionGroup:
    """An option whose values have other names there: `ours` by theirs. A missing field means the first."""

    def read(fields: Fields) -> dict[str, Any]:
        fields.check(field, *ours)
        return {option: ours[fields.get(field, next(iter(ours)))]}

    def write(model: ModelConfig) -> dict[str, Any]:
        return {field: next(name for name, own in ours.items() if own == getattr(model, option))}

    def lacks(model: ModelConfig) -> Lacks:
        return {} if getattr(model, option) in ours.values() else {option: next(iter(ours.values()))}

    return OptionGroup((option,), read, write, lacks)


def plain_heads(heads: str, width: str) -> OptionGroup:
    """As many key heads as query heads, dividing the width; the arguments are the names of the fields."""

    def read(fields: Fields) -> dict[str, Any]:
        fields.check_divides(heads, width)
        return {}

    def lacks(model: ModelConfig) -> Lacks:
        lacking: Lacks = {} if model.num_kv_heads == model.num_heads else {"num_kv_heads": model.num_heads}
        return lacking | lacks_heads(model, fill=True)

    return OptionGroup(("num_kv_heads", "head_size"), read, lambda _: {}, lacks)


def lacks_heads(model: ModelConfig, *, fill: bool) -> Lacks:
    """For a class whose heads must divide the width, or `fill` it."""
    size, rest = divmod(model.hidden_size, model.num_heads)
    if rest:
        return {"hidden_size": size * model.num_heads or model.num_heads}
    return {"head_size": size} if fill and model.head_size != size else {}


def dropout(*names: str, of_head: str = "") -> OptionGroup:
    """Several dropout rates there, for which we have one; that `of_head` may be null, and is then as the others."""

    def read(fields: Fields) -> dict[str, Any]:
        rates = {name: fields.get(name, 0.1) for name in names}
        if fields.get(of_head) is not None:
            rates[of_head] = fields[of_head]
        for name, rate in rates.items():
            if type(rate) not in (int, float) or not 0 <= rate < 1:
                raise fields.refusal(name, rate, "0 or more and less than 1")
        if len(set(rates.values())) > 1:
            said = ", ".join(f"{name} {rate}" for name, rate in rates.items())
            raise fields.error(said, "all the same, or --model.dropout X")
        return {"dropout": rates[names[0]]}

    return OptionGroup(("dropout",), read, lambda model: dict.fromkeys(names, model.dropout))


# Rotary positions: `rope_theta` with `rope_scaling`, or `rope_parameters` in transformers 5, an object with both. The
# rules of precedence are those of transformers 5.
_LENGTH, _ATTENTION = "original_max_position_embeddings", "attention_factor"
_LLAMA3 = {"low_freq_factor": "rope_low_frequency", "high_freq_factor": "rope_high_frequency"}
_YARN = {"beta_slow": "rope_beta_slow", "beta_fast": "rope_beta_fast", "truncate": "rope_truncate"}
_SCALINGS: dict[str, dict[str, str]] = {  # by rope_type: options of ours by their fields, in the order of reading
    "default": {},
    "linear": {"factor": "rope_factor"},
    "llama3": {"factor": "rope_factor", **_LLAMA3, _LENGTH: "rope_original_length"},
    "yarn": {"factor": "rope_factor", **_YARN, _LENGTH: "rope_original_length", _ATTENTION: "rope_attention_factor"},
}
_SCALES = ("mscale", "mscale_all_dim")  # two that make the attention factor, as in DeepSeek's files
_IGNORED = ("finetuned", "mrope_section", "mrope_interleaved")  # by transformers too, in text
_SHARE = "partial_rotary_factor"  # of a head's features, the first ones, that positions rotate
_KNOWN = ("rope_type", "type", "rope_theta", _SHARE, *_SCALES, *ChainMap(*_SCALINGS.values()))


def _read_rope(fields: Fields, section: Fields, default: float, *, beside: bool = True) -> dict[str, Any]:
    """Angles as `section` describes them; `beside`: the length may be beside it."""
    if (fields.get("head_dim") or 0) % 2:
        raise fields.refusal("head_dim", fields["head_dim"], "an even number: rotary positions turn pairs of features")
    scaling = _read_kind(fields, section)
    theta = (section if "rope_theta" in section else fields).value("rope_theta", "rope_theta", default)
    values = {"positions": "rotary", "rope_theta": theta}
    values["rope_scaling"] = "none" if scaling == "default" else scaling
    if scaling == "yarn":
        _complete_yarn(section)
    for name, option in _SCALINGS[scaling].items():
        owner, field = _owner_of(fields, section, name, beside)
        if name != _ATTENTION or section.get(name) is not None:
            values[option] = owner.value(field, option)
    if scaling == "llama3" and section["low_freq_factor"] >= section["high_freq_factor"]:
        valid = f"more than low_freq_factor, {section['low_freq_factor']}"
        raise section.refusal("high_freq_factor", section["high_freq_factor"], valid)
    if scaling == "yarn" and section["beta_slow"] > section["beta_fast"]:
        raise section.refusal("beta_fast", section["beta_fast"], f"beta_slow, {section['beta_slow']}, or more")
    return values


def _read_kind(fields: Fields, section: Fields) -> str:
    """The kind of scaling, if we have it and know all that is said about it."""
    kind = "rope_type" if "rope_type" in section else "type"
    section.check(kind, *_SCALINGS)
    for name, value in section.items():
        if name not in (*_KNOWN, *_IGNORED):
            raise section.refusal(name, value, f"without it; known are {', '.join(_KNOWN)}")
    for owner in section, fields:
        owner.check(_SHARE, 1, None)
    return str(section.get(kind, "default"))


def _owner_of(fields: Fields, section: Fields, name: str, beside: bool) -> tuple[Fields, str]:
    """Where a field of `section` is: the length may also be beside it, or be the model's."""
    if name != _LENGTH:
        return section, name
    owners = (fields, section) if beside else (section,)
    return next(((owner, name) for owner in owners if name in owner), (fields, "max_position_embeddings"))


def _complete_yarn(section: Fields) -> None:
    """Add what is missing, as transformers does; except an attention factor without scales: our default is theirs."""
    section |= {"beta_slow": section.get("beta_slow") or 1, "beta_fast": section.get("beta_fast") or 32}
    section.setdefault("truncate", True)
    if section.get(_ATTENTION) is None and all(map(section.get, _SCALES)):
        growth = 0.1 * math.log(section.value("factor", "rope_factor"))
        one, all_dims = (section.value(name, "rope_attention_factor") * growth + 1 for name in _SCALES)
        section[_ATTENTION] = one / all_dims


def _read_scores(section: Fields) -> dict[str, Any]:
    """Whether scaling multiplies scores too."""
    scale, kind = section.get(_SCALES[1]), section.get("rope_type", section.get("type", "default"))
    if not scale or kind == "default":
        return {}
    if kind != "yarn":
        raise section.refusal(_SCALES[1], scale, f"without it, with {kind}")
    return {"rope_score_scale": section.value(_SCALES[1], "rope_score_scale")}


def _read_share(fields: Fields, section: Fields, missing: float) -> dict[str, Any]:
    """How many features of a head are rotated."""
    owner, size = section if _SHARE in section else fields, fields["head_dim"]
    share, _ = owner.pop(_SHARE, missing), fields.pop(_SHARE, None)
    rotary = int(size * share) if type(share) in (int, float) and 0 < share <= 1 else 1
    if rotary % 2 or not rotary:
        raise owner.refusal(_SHARE, share, f"more than 0, up to 1, for an even number of the {size} of head_dim")
    return {"rotary_size": rotary % size}


def _write_share(model: ModelConfig) -> dict[str, Any]:
    size, rotary = model.head_size, model.rotary_size or model.head_size
    possible = rotary / size, math.nextafter(rotary / size, 1)  # transformers rounds down
    return {_SHARE: next(share for share in possible if int(size * share) == rotary)}


def _write_rope(model: ModelConfig) -> dict[str, Any]:
    """Write both spellings: transformers before version 5 does not know `rope_parameters`, and would silently use the
    default angles."""
    kind = "default" if model.rope_scaling == "none" else model.rope_scaling
    scaling = {"rope_type": kind} | {name: getattr(model, option) for name, option in _SCALINGS[kind].items()}
    if not model.rope_attention_factor:
        scaling.pop(_ATTENTION, None)
    if model.rope_score_scale:
        scaling[_SCALES[1]] = model.rope_score_scale
    theta = {"rope_theta": model.rope_theta if model.rotary else None}
    return theta | {
        "rope_scaling": scaling if model.rope_scaling != "none" else None,
        "rope_parameters": scaling | theta,
    }


_ROPE_OPTIONS = ("rope_theta", "rope_scaling", *dict.fromkeys(ChainMap(*_SCALINGS.values()).values()))


def rope(
    default: float,
    *,
    scores: bool = False,
    missing: Mapping[str, Any] | None = None,
    may_lack: bool = False,
    share: float = 0,
) -> OptionGroup:
    """Rotary positions; `default` is the base of the angles if it is missing, and `missing` their scaling. With
    `scores` scaling may multiply scores too, with `may_lack` a null base means that there are no positions.
    With a `share` positions rotate as much of each head as a field says, or this if it is missing."""

    def read(fields: Fields) -> dict[str, Any]:
        section = fields.section("rope_scaling" if fields.get("rope_scaling") else "rope_parameters")
        if not section and fields.get("rope_parameters") is None:
            section |= missing or {}
        if may_lack and (section if "rope_theta" in section else fields).get("rope_theta", default) is None:
            return {"positions": "none"}
        rotary = _read_share(fields, section, share) if share else {}
        return rotary | _read_rope(fields, section, default) | (_read_scores(section) if scores else {})

    def write(model: ModelConfig) -> dict[str, Any]:
        return _write_rope(model) | (_write_share(model) if share else {})

    def lacks(model: ModelConfig) -> Lacks:
        return {"positions": "rotary"} if may_lack and model.positions == "learned" else {}

    more = {"rope_score_scale": scores, "positions": may_lack, "rotary_size": share}
    return OptionGroup((*_ROPE_OPTIONS, *(name for name in more if more[name])), read, write, lacks)


def rope_by_layer(default: float, in_window: float, local: str = "") -> OptionGroup:
    """Rotary positions of layers without a window, which may be scaled, and with one; and their bases if missing. The
    field `local` may have the latter's."""
    everywhere, windowed = "full_attention", "sliding_attention"  # names in `rope_parameters`

    def read(fields: Fields) -> dict[str, Any]:
        both = fields.section("rope_parameters")
        full, window = both.section(everywhere), both.section(windowed)
        if fields.get("rope_parameters") is None:
            full["rope_type"] = "default"  # which `type` does not replace
        full |= fields.section("rope_scaling")
        values = _read_rope(fields, full, default, beside=False)
        window.setdefault("rope_theta", fields.get(local, in_window) if local else in_window)
        for section in full, window:  # of several kinds of layers transformers ignores it
            section.check("truncate", True)
        window_values = _read_rope(fields, window, in_window, beside=False)
        if window_values == values:
            return values | {"window_rope_theta": 0.0}
        if window_values["rope_scaling"] != "none":
            raise window.refusal("rope_type", window_values["rope_scaling"], f"default, or all as {everywhere}")
        return values | {"window_rope_theta": window_values["rope_theta"]}

    def write(model: ModelConfig) -> dict[str, Any]:
        settings = _write_rope(model)
        full, theta = settings["rope_parameters"], model.window_rope_theta
        in_windows = {"rope_type": "default", "rope_theta": theta} if theta else full
        older = {local: theta or model.rope_theta} if local else {}
        return settings | older | {"rope_parameters": {everywhere: full, windowed: in_windows}}

    def lacks(model: ModelConfig) -> Lacks:
        return {} if model.rope_truncate or model.rope_scaling != "yarn" else {"rope_truncate": True}

    return OptionGroup(_ROPE_OPTIONS, read, write, lacks)

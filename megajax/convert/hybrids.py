"""Linear attention in the Hugging Face format: which layers have it, its sizes, and the places of its weights."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megajax.convert.parts import Lacks, OptionGroup
from megajax.convert.settings import Fields
from megajax.convert.weights import TensorPlace
from megajax.core.models.config import ModelConfig
from megajax.core.models.turns import in_turns

_KINDS = "full_attention", "linear_attention"  # names in `layer_types`
_DIMS = {"query": "kD", "key": "kD", "value": "vD", "write": "hD", "decay": "hD", "attention_gate": "vD"}
_DIMS |= {"output": "Dv"}  # of products


def linear_attention(
    named: Mapping[str, tuple[str, Callable[[Fields], int]]],
    missing: Callable[[Fields], Sequence[bool]],
    epsilon: float = 0,
) -> OptionGroup:
    """Which layers have it, or `missing` without `layer_types`; and by options fields that have the same values, each
    with what null means, by those before it. `epsilon` is that of the heads' norm; 0: of all norms."""

    def read(fields: Fields) -> dict[str, Any]:
        values: dict[str, Any] = {"linear_norm_epsilon": epsilon}
        for option, (name, default) in named.items():
            fields |= {} if fields.get(name) is not None else {name: default(fields)}
            values[option] = fields.value(name, option)
        fields.check_divides(named["linear_key_heads"][0], named["linear_heads"][0])
        layers, types = fields["num_hidden_layers"], fields.get("layer_types")
        listed = types if isinstance(types, list) else []
        linear = missing(fields) if types is None else [each == _KINDS[True] for each in listed if each in _KINDS]
        if not len(linear) == layers == len(listed or linear) or len({*linear}) < 2:
            valid = f"{' or '.join(_KINDS)} for each of {layers} layers, both of them"
            raise fields.refusal("layer_types", types, valid)
        return values | {"linear_layers": in_turns(linear)}

    def write(model: ModelConfig) -> dict[str, Any]:
        values = {name: getattr(model, option) for option, (name, _) in named.items()}
        return values | {"layer_types": [_KINDS[each] for each in model.linear]}

    def lacks(model: ModelConfig) -> Lacks:
        if not model.linear_heads:
            return {"linear_heads": model.num_heads, "linear_layers": "3,1"}
        values = {name: getattr(model, option) for option, (name, _) in [*named.items()][::-1]}
        lacking = {
            option: values[name] for option, (name, _) in named.items() if getattr(model, option) != values[name]
        }
        if model.linear_norm_epsilon != (epsilon or model.norm_epsilon):
            lacking["linear_norm_epsilon"] = epsilon
        return lacking | ({"linear_layers": "3,1"} if all(model.linear) else {})

    return OptionGroup((*named, "linear_layers", "linear_norm_epsilon"), read, write, lacks)


def linear_places(
    module: str, products: Mapping[str, str], norm: str, *, joined: bool = True
) -> dict[str, TensorPlace]:
    """The places of a layer's weights: products with these names, by ours; the norm of heads; convolutions, which are
    `joined` in one tensor or not."""
    places = {
        "attention/decay_rate": TensorPlace(f"{module}A_log", "h"),
        "attention/decay_bias": TensorPlace(f"{module}dt_bias", "h"),
        "attention/norm/scale": TensorPlace(f"{module}{norm}.weight", "s"),
    }
    for ours, theirs in products.items():
        places[f"attention/{ours}/weight"] = TensorPlace(f"{module}{theirs}.weight", _DIMS[ours], turned=True)
    for part, (name, dim) in enumerate((("query", "k"), ("key", "k"), ("value", "v"))):
        their, dims, parts = ("", "c1t", "kkv") if joined else (f"{name[0]}_", f"{dim}1t", "")
        place = TensorPlace(f"{module}{their}conv1d.weight", dims, part, parts, turned=True)
        places[f"attention/{name}_taps"] = place
    return places

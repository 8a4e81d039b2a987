"""Linear attention in the Hugging Face format: which layers have it, its sizes, and the places of its weights."""

from collections.abc import Callable, Mapping
from typing import Any

from megajax.convert.parts import Lacks, OptionGroup
from megajax.convert.settings import Fields
from megajax.convert.weights import TensorPlace
from megajax.core.models.config import ModelConfig
from megajax.core.models.turns import in_turns

_KINDS = "full_attention", "linear_attention"  # names in `layer_types`
_DIMS = {"query": "kD", "key": "kD", "value": "vD", "write": "hD", "decay": "hD", "attention_gate": "vD"}
_DIMS |= {"output": "Dv"}  # of products


def linear_attention(named: Mapping[str, str], missing: Callable[[Fields], Mapping[str, Any]]) -> OptionGroup:
    """Which layers have it, and fields by options of the same value. `missing` says what fields mean that are null or
    missing, `layer_types` among them."""

    def read(fields: Fields, _: Mapping[str, Any]) -> dict[str, Any]:
        fields |= {name: value for name, value in missing(fields).items() if fields.get(name) is None}
        values = {f"model.{option}": fields.value(name, f"model.{option}") for option, name in named.items()}
        if "linear_key_heads" in named:
            fields.check_divides(named["linear_key_heads"], named["linear_heads"])
        layers, types = fields["num_hidden_layers"], fields["layer_types"]
        if type(types) is not list or len(types) != layers or not all(each in types for each in _KINDS):
            raise fields.refusal("layer_types", types, f"{' or '.join(_KINDS)} for each of {layers} layers, and both")
        if other := [each for each in types if each not in _KINDS]:
            raise fields.refusal("layer_types", other, " or ".join(_KINDS))
        return values | {"model.linear_layers": in_turns([each == _KINDS[True] for each in types])}

    def write(model: ModelConfig) -> dict[str, Any]:
        values = {name: getattr(model, option) for option, name in named.items()}
        return values | {"layer_types": [_KINDS[each] for each in model.linear]}

    def lacks(model: ModelConfig) -> Lacks:
        heads = {} if model.linear_heads else {"linear_heads": model.num_heads}
        return heads | ({"linear_layers": "3,1"} if heads or all(model.linear) else {})

    return OptionGroup((*named, "linear_layers"), read, write, lacks)


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

"""Linear attention in the Hugging Face format: which layers have it, its sizes, and the places of its weights."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megajax.convert.parts import Lacks, OptionGroup
from megajax.convert.settings import Fields
from megajax.convert.weights import TensorPlace, linear
from megajax.core.models.config import ModelConfig
from megajax.core.models.turns import in_turns

_KINDS = "full_attention", "linear_attention"  # names in `layer_types`
_DIMS = {"query": "kD", "key": "kD", "value": "vD", "write": "hD", "decay": "hD", "attention_gate": "vD"}
_DIMS |= {"output": "Dv"}  # of products
_BESIDE_JOINED = {"attention_gate": "in_proj_z", "write": "in_proj_b", "decay": "in_proj_a", "output": "out_proj"}
_APART = {name: f"{name[0]}_proj" for name in ("query", "key", "value", "output")}
_APART |= {"write": "b_proj", "decay": "a_proj", "attention_gate": "g_proj"}
_NAMES = {
    **{"heads": "linear_num_value_heads", "key_heads": "linear_num_key_heads", "key_size": "linear_key_head_dim"},
    **{"value_size": "linear_value_head_dim", "convolution": "linear_conv_kernel_dim"},
}


def linear_attention(
    missing: Callable[[Fields], Sequence[bool]],
    *,
    names: Mapping[str, str] = _NAMES,
    epsilon: float = 0,
    **sizes: int | Callable[[Fields], int],
) -> OptionGroup:
    """Which layers have it, or `missing` without `layer_types`; and its sizes, in fields with these `names`, with what
    null means, by fields before it. `epsilon` is that of the heads' norm; 0: of all norms."""
    named = {f"linear_{size}": name for size, name in names.items()}

    def read(fields: Fields) -> dict[str, Any]:
        values: dict[str, Any] = {"linear_norm_epsilon": epsilon}
        for size, name in names.items():
            if fields.get(name) is None:
                default = sizes.get(size, 4)  # that of convolutions in all classes
                fields[name] = default(fields) if callable(default) else default
            values[f"linear_{size}"] = fields.value(name, f"linear_{size}")
        fields.check_divides(names["key_heads"], names["heads"])
        layers, types = fields["num_hidden_layers"], fields.get("layer_types")
        listed = types if isinstance(types, list) else []
        linear = missing(fields) if types is None else [each == _KINDS[True] for each in listed if each in _KINDS]
        if not len(linear) == layers == len(listed or linear) or len({*linear}) < 2:
            valid = f"{' or '.join(_KINDS)} for each of {layers} layers, both of them"
            raise fields.refusal("layer_types", types, valid)
        return values | {"linear_layers": in_turns(linear)}

    def write(model: ModelConfig) -> dict[str, Any]:
        values = {name: getattr(model, option) for option, name in named.items()}
        return values | {"layer_types": [_KINDS[each] for each in model.linear]}

    def lacks(model: ModelConfig) -> Lacks:
        if not model.linear_heads:
            return {"linear_heads": model.num_heads, "linear_layers": "3,1"}
        values = {name: getattr(model, option) for option, name in reversed(named.items())}
        lacking = {option: values[name] for option, name in named.items() if getattr(model, option) != values[name]}
        if model.linear_norm_epsilon != (epsilon or model.norm_epsilon):
            lacking["linear_norm_epsilon"] = epsilon
        return lacking | ({"linear_layers": "3,1"} if all(model.linear) else {})

    return OptionGroup((*named, "linear_layers", "linear_norm_epsilon"), read, write, lacks)


def linear_places(module: str, *, joined: bool) -> dict[str, TensorPlace]:
    """The places of a layer's weights, of which some are `joined` in one tensor, or all are apart."""
    places = {
        "attention/decay_rate": TensorPlace(f"{module}A_log", "h"),
        "attention/decay_bias": TensorPlace(f"{module}dt_bias", "h"),
        "attention/norm/scale": TensorPlace(f"{module}{'norm' if joined else 'o_norm'}.weight", "s"),
    }
    for ours, theirs in (_BESIDE_JOINED if joined else _APART).items():
        places |= linear(f"attention/{ours}", f"{module}{theirs}", _DIMS[ours])
    for part, (name, dim) in enumerate((("query", "k"), ("key", "k"), ("value", "v"))):
        their, dims, parts = ("", "c1t", "kkv") if joined else (f"{name[0]}_", f"{dim}1t", "")
        place = TensorPlace(f"{module}{their}conv1d.weight", dims, part, parts, turned=True)
        places[f"attention/{name}_taps"] = place
    return places


def joined_convolutions(module: str) -> dict[str, tuple[str, ...]]:
    """Convolutions that are one tensor in memory, as in `Exchange.joined`."""
    return {f"{module}conv1d.weight": tuple(f"{module}{name}_conv1d.weight" for name in "qkv")}

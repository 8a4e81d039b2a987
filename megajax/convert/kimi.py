"""Kimi Linear: DeepSeek-V3's latent attention and mixtures, without positions, and linear attention in most layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megajax.convert.deepseek import ATTENTION, BLOCKS, Kind
from megajax.convert.exchange import Exchange
from megajax.convert.hybrids import linear_attention, linear_places
from megajax.convert.llama import LAYER, MLP
from megajax.convert.mixtures import KIMI
from megajax.convert.parts import Lacks
from megajax.convert.settings import Fields
from megajax.convert.weights import TensorPlace, spelling
from megajax.core.models.config import ModelConfig
from megajax.core.models.turns import in_each_layer


class _Kimi(Kind):
    def check_rotary(self, fields: Fields, rotary: int) -> None:
        """These features of a key, which all heads share, do not turn."""

    def lacks_heads(self, model: ModelConfig) -> Lacks:
        return super().lacks_heads(model) or ({"query_latent_size": 0} if model.query_latent_size else {})

    def read_others(self, fields: Fields, given: Mapping[str, Any]) -> dict[str, Any]:
        if (types := fields.get("mlp_layer_types")) is not None:
            dense, layers = types.count("dense") if isinstance(types, list) else 0, fields["num_hidden_layers"]
            if types != ["dense"] * dense + ["sparse"] * (layers - dense):
                raise fields.refusal("mlp_layer_types", types, f"dense, then sparse for the others of {layers} layers")
            fields["first_k_dense_replace"] = dense
        return super().read_others(fields, given)

    def exchange(self) -> Exchange:
        deepseek, mixture = super().exchange(), self.experts.places(LAYER)
        *parts, _ = deepseek.parts
        return replace(
            deepseek,
            options={**deepseek.options, **_OPTIONS},
            defaults={**deepseek.defaults, "norm_epsilon": 1e-5},
            parts=(*parts, _LINEAR),
            blocks=_LATENT | mixture,
            linear=_PLACES | mixture,
            dense=_PLACES | MLP,
            of_model=lambda _: {},
            joined=_CONVOLUTIONS,
            spelling=spelling(*_SPELLED),
        )


def _kimi_layers(fields: Fields) -> list[bool]:
    """Which layers have linear attention; `linear_attn_config` counts from 1."""
    layers, section = fields["num_hidden_layers"], fields.section("linear_attn_config")
    full, linear = (section.get(name) for name in ("full_attn_layers", "kda_layers"))
    if full is None or linear is None:
        return [not n or n % 4 > 0 for n in range(layers)]
    listed = [*full, *linear] if isinstance(full, list) and isinstance(linear, list) else []
    if len(listed) != layers or any(n not in listed for n in range(1, layers + 1)):
        raise section.refusal("kda_layers", linear, f"with full_attn_layers each of {layers} layers, from 1 on")
    return [n in linear for n in range(1, layers + 1)]


def _read_linear(fields: Fields, given: Mapping[str, Any]) -> dict[str, Any]:
    """Dense layers have it: `dense` in `_Kimi.exchange`."""
    section = fields.section("linear_attn_config")
    fields |= {name: section[theirs] for theirs, name in _OF_SECTION.items() if theirs in section}
    values, dense = _SIZES.read(fields, given), fields["first_k_dense_replace"]
    if not all(in_each_layer(values["model.linear_layers"], dense)):
        raise fields.refusal("layer_types", fields.get("layer_types"), f"linear_attention in {dense} dense layers")
    return values


def _lacks_linear(model: ModelConfig) -> Lacks:
    differ = model.dense_layers and not model.linear[0]
    return _SIZES.lacks(model) | ({"dense_layers": 0} if differ and model.linear_heads else {})


_OF_SECTION = {
    **{"num_heads": "linear_num_heads", "head_dim": "linear_head_dim"},
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_SIZES = linear_attention(
    {
        **dict.fromkeys(("linear_heads", "linear_key_heads"), ("linear_num_heads", lambda _: 32)),
        **dict.fromkeys(("linear_key_size", "linear_value_size"), ("linear_head_dim", lambda _: 128)),
        "linear_convolution": ("linear_conv_kernel_dim", lambda _: 4),
    },
    _kimi_layers,
)
_LINEAR = replace(_SIZES, read=_read_linear, lacks=_lacks_linear)
_OPTIONS = {"positions": "none", "linear_decay": "channel", "linear_gate": "sigmoid", "tied_embedding": False}
_LATENT = {
    **{name: replace(place, pairs="") for name, place in BLOCKS.items()},
    "attention/query/weight": TensorPlace(f"{ATTENTION}q_proj.weight", "QR", turned=True),
}
_PRODUCTS = {"query": "q", "key": "k", "value": "v", "write": "b", "output": "o"}
_PLACES = {
    **{name: BLOCKS[name] for name in ("attention_norm/scale", "mlp_norm/scale")},
    **linear_places(ATTENTION, {ours: f"{name}_proj" for ours, name in _PRODUCTS.items()}, "o_norm", joined=False),
    "attention/decay_rate": TensorPlace(f"{ATTENTION}A_log", "11h1"),
    "attention/decay_bias": TensorPlace(f"{ATTENTION}dt_bias", "k"),
    "attention/decay_down/weight": TensorPlace(f"{ATTENTION}f_a_proj.weight", "sD", turned=True),
    "attention/decay/weight": TensorPlace(f"{ATTENTION}f_b_proj.weight", "ks", turned=True),
    "attention/gate_down/weight": TensorPlace(f"{ATTENTION}g_a_proj.weight", "sD", turned=True),
    "attention/attention_gate/weight": TensorPlace(f"{ATTENTION}g_b_proj.weight", "vs", turned=True),
}
_CONVOLUTIONS = {f"{ATTENTION}conv1d.weight": tuple(f"{ATTENTION}{name}_conv1d.weight" for name in "qkv")}
# In memory, and in what transformers writes, which has dense layers where mixtures are.
_SPELLED = (
    (".block_sparse_moe.", ".mlp."),
    (".mlp.", ".block_sparse_moe."),
    (".self_attn.", ".self_attn.forget_gate."),
)
EXCHANGE = _Kimi(
    "KimiLinear",
    "kimi_linear",
    "sigmoid",
    biased=True,
    fixed={
        **{"q_lora_rank": None, "mla_use_nope": True, "moe_router_activation_func": "sigmoid"},
        "tie_word_embeddings": False,
    },
    experts=KIMI,
    aliases={
        **{"model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob"},
        **{"num_expert_group": "n_group", "num_shared_experts": "n_shared_experts"},
        **{"num_experts": "num_local_experts", "num_experts_per_token": "num_experts_per_tok"},
    },
    groups=(1, 1),
    scale=2.446,
    dense=1,
    queries=None,
).exchange()

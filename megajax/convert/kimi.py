"""Kimi Linear: DeepSeek-V3's latent attention and mixtures, without positions, and linear attention in most layers."""

from dataclasses import replace
from typing import Any

from megajax.convert.deepseek import ATTENTION, Kind
from megajax.convert.hybrids import joined_convolutions, linear_attention, linear_places
from megajax.convert.llama import MLP, NORMS
from megajax.convert.mixtures import KIMI
from megajax.convert.parts import Lacks
from megajax.convert.settings import Fields
from megajax.convert.weights import TensorPlace, linear, spelling
from megajax.core.models.config import ModelConfig
from megajax.core.models.turns import in_each_layer


class _Kimi(Kind):
    def check_rotary(self, fields: Fields, rotary: int) -> None:
        """These features of a key, which all heads share, do not turn."""

    def lacks_heads(self, model: ModelConfig) -> Lacks:
        return super().lacks_heads(model) or ({"query_latent_size": 0} if model.query_latent_size else {})

    def read_others(self, fields: Fields) -> dict[str, Any]:
        if (types := fields.get("mlp_layer_types")) is not None:
            dense, layers = types.count("dense") if isinstance(types, list) else 0, fields["num_hidden_layers"]
            if types != ["dense"] * dense + ["sparse"] * (layers - dense):
                raise fields.refusal("mlp_layer_types", types, f"dense, then sparse for the others of {layers} layers")
            fields["first_k_dense_replace"] = dense
        return super().read_others(fields)


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


def _read_linear(fields: Fields) -> dict[str, Any]:
    """Dense layers have it: `dense` of the `EXCHANGE`."""
    section = fields.section("linear_attn_config")
    fields |= {name: section[theirs] for theirs, name in _OF_SECTION.items() if theirs in section}
    values, dense = _SIZES.read(fields), fields["first_k_dense_replace"]
    if not all(in_each_layer(values["linear_layers"], dense)):
        raise fields.refusal("layer_types", fields.get("layer_types"), f"linear_attention in {dense} dense layers")
    return values


def _lacks_linear(model: ModelConfig) -> Lacks:
    differ = model.dense_layers and not model.linear[0]
    return _SIZES.lacks(model) | ({"dense_layers": 0} if differ and model.linear_heads else {})


_OF_SECTION = {
    **{"num_heads": "linear_num_heads", "head_dim": "linear_head_dim"},
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_NAMES = {
    **dict.fromkeys(("heads", "key_heads"), "linear_num_heads"),
    **dict.fromkeys(("key_size", "value_size"), "linear_head_dim"),
    "convolution": "linear_conv_kernel_dim",
}
_SIZES = linear_attention(_kimi_layers, names=_NAMES, heads=32, key_size=128)
_PLACES = {
    **NORMS["pre"],
    **linear_places(ATTENTION, joined=False),
    "attention/decay_rate": TensorPlace(f"{ATTENTION}A_log", "11h1"),
    "attention/decay_bias": TensorPlace(f"{ATTENTION}dt_bias", "k"),
    **linear("attention/decay_down", f"{ATTENTION}f_a_proj", "sD"),
    **linear("attention/decay", f"{ATTENTION}f_b_proj", "ks"),
    **linear("attention/gate_down", f"{ATTENTION}g_a_proj", "sD"),
    **linear("attention/attention_gate", f"{ATTENTION}g_b_proj", "vs"),
}
_KIMI = _Kimi(
    "KimiLinear",
    "kimi_linear",
    KIMI,
    fixed={
        **{"q_lora_rank": None, "mla_use_nope": True, "moe_router_activation_func": "sigmoid"},
        "tie_word_embeddings": False,
    },
    groups=(1, 1),
    scale=2.446,
    dense=1,
    queries=None,
    parts=(replace(_SIZES, read=_read_linear, lacks=_lacks_linear),),
)
EXCHANGE = _KIMI.exchange(
    options={
        **{"norm": "rmsnorm", "positions": "none", "bias": "none", "tied_embedding": False},
        **{"linear_decay": "channel", "linear_gate": "sigmoid"},
    },
    defaults={"norm_epsilon": 1e-5},
    aliases={
        **{"model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob"},
        **{"num_expert_group": "n_group", "num_shared_experts": "n_shared_experts"},
        **{"num_experts": "num_local_experts", "num_experts_per_token": "num_experts_per_tok"},
    },
    linear=_PLACES | KIMI.places(),
    dense=_PLACES | MLP,
    joined=joined_convolutions(ATTENTION),
    # In memory, and in what transformers writes, which has dense layers where mixtures are.
    spelling=spelling(
        (".block_sparse_moe.", ".mlp."),
        (".mlp.", ".block_sparse_moe."),
        (".self_attn.", ".self_attn.forget_gate."),
    ),
)

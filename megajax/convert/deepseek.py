"""DeepSeek-V2 and DeepSeek-V3, Moonlight among them: latent attention, and mixtures with a shared expert whose first
layers are dense. Their rotary features are neighbours in pairs, ours come from either half."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megajax.convert.exchange import Exchange
from megajax.convert.llama import ACTIVATION, DROPOUT, LAYER, MLP, NORMS, decoder
from megajax.convert.mixtures import BIASED_DEEPSEEK, DEEPSEEK, ExpertFields
from megajax.convert.parts import Lacks, OptionGroup, rope
from megajax.convert.settings import Fields
from megajax.convert.weights import TensorPlace, linear, norm
from megajax.core.models.config import ModelConfig

ATTENTION = f"{LAYER}self_attn."
_ROPE = rope(10_000.0, scores=True)


@dataclass(frozen=True)
class Kind:
    """One of the classes."""

    name: str
    model_type: str
    experts: ExpertFields
    fixed: Mapping[str, Any]  # fields that have one value
    groups: tuple[int | None, int | None] = (None, None)  # of experts, and chosen ones, if fields are missing
    scale: float = 1.0  # of shares, like the next
    dense: int = 3  # first layers
    queries: int | None = 1536  # the width of their latents
    parts: tuple[OptionGroup, ...] = (_ROPE,)  # further ones

    def read_heads(self, fields: Fields) -> dict[str, Any]:
        heads = fields["num_attention_heads"]
        fields.check("num_key_value_heads", heads, None)
        plain = fields.value("qk_nope_head_dim", "head_size", 128)
        rotary = fields.value("qk_rope_head_dim", "rotary_size", 64)
        self.check_rotary(fields, rotary)
        fields.check("qk_head_dim", None, plain + rotary)
        fields.check("sliding_window", None)
        return {
            "num_kv_heads": heads,
            "head_size": plain + rotary,
            "rotary_size": rotary,
            "value_size": fields.value("v_head_dim", "value_size", 128),
            "latent_size": fields.value("kv_lora_rank", "latent_size", 512),
            "query_latent_size": fields.optional("q_lora_rank", "query_latent_size", self.queries) or 0,
        }

    def check_rotary(self, fields: Fields, rotary: int) -> None:
        if rotary % 2:
            raise fields.refusal("qk_rope_head_dim", rotary, "an even number: rotary positions turn pairs of features")
        fields.check("head_dim", None, rotary)

    def write_heads(self, model: ModelConfig) -> dict[str, Any]:
        return {
            "num_key_value_heads": model.num_kv_heads,
            "qk_nope_head_dim": model.head_size - model.rotary_size,
            "qk_rope_head_dim": model.rotary_size,
            "v_head_dim": model.value_head_size,
            "kv_lora_rank": model.latent_size,
            "q_lora_rank": model.query_latent_size or None,
        }

    def lacks_heads(self, model: ModelConfig) -> Lacks:
        if model.latent_size:
            return {}
        even = max(2, model.head_size // 2 // 2 * 2)
        others: Lacks = {} if model.num_kv_heads == model.num_heads else {"num_kv_heads": model.num_heads}
        larger = {} if model.head_size > even else {"head_size": 2 * even}
        return others | larger | {"latent_size": 4 * model.head_size, "rotary_size": even}

    def read_router(self, fields: Fields) -> dict[str, Any]:
        """Groups and the weights of experts. DeepSeek-V2 has groups only if `topk_method` says so."""
        biased = self.experts.biased
        fields.check("norm_topk_prob", *[True] * biased, False, None)
        if not biased:
            fields.check("topk_method", "greedy", "group_limited_greedy")
        grouped = biased or fields.get("topk_method", "greedy") != "greedy"
        groups, chosen = 1, 1
        if grouped and fields.get("n_group", self.groups[0]) is not None:
            groups = fields.value("n_group", "expert_groups", self.groups[0])
            chosen = fields.value("topk_group", "chosen_groups", self.groups[1])
        experts = fields[self.experts.number]
        if experts % groups or (biased and groups > 1 and experts // groups < 2):
            raise fields.refusal(
                "n_group", groups, f"a divisor of {self.experts.number}, {experts}, with two in each group"
            )
        least = -(-fields["num_experts_per_tok"] * groups // experts)
        if not least <= chosen <= groups:
            raise fields.refusal("topk_group", chosen, f"{least} to {groups}")
        return {
            "expert_groups": groups,
            "chosen_groups": chosen,
            "share_scale": fields.value("routed_scaling_factor", "share_scale", self.scale),
            "renormalize_shares": bool(fields.get("norm_topk_prob", biased)),
        }

    def write_router(self, model: ModelConfig) -> dict[str, Any]:
        limited = model.chosen_groups < model.expert_groups
        return {
            "n_group": model.expert_groups,
            "topk_group": model.chosen_groups,
            "routed_scaling_factor": model.share_scale,
            "norm_topk_prob": model.renormalize_shares,
            "topk_method": "noaux_tc" if self.experts.biased else "group_limited_greedy" if limited else "greedy",
        }

    def lacks_router(self, model: ModelConfig) -> Lacks:
        return {"renormalize_shares": False} if model.renormalize_shares and not self.experts.biased else {}

    def read_others(self, fields: Fields) -> dict[str, Any]:
        """Shared experts, which are one as wide as all together, and the first layers, which are dense."""
        missing, last = 1 if self.experts.biased else 2, fields["num_hidden_layers"] - 1
        shared = fields.whole("n_shared_experts", missing, "a whole number from 1 to 999", least=1, most=999)
        fields.check("moe_layer_freq", 1)
        dense = fields.whole("first_k_dense_replace", self.dense, f"0 to {last}, of num_hidden_layers", most=last)
        fields["first_k_dense_replace"] = dense
        return {"shared_expert_size": shared * fields["moe_intermediate_size"], "dense_layers": dense}

    def exchange(self, **others: Any) -> Exchange:
        """Its exchange, in which `others` replace fields."""
        exchange = decoder(
            self.name,
            model_type=self.model_type,
            dialect="mixture",
            options={"norm": "rmsnorm", "positions": "rotary", "bias": "none"},
            fixed={"attention_bias": False, "scoring_func": self.experts.scores, **self.fixed},
            aliases=_ALIASES,
            defaults={"norm_epsilon": 1e-6, "tied_embedding": False},
            parts=(
                ACTIVATION,
                OptionGroup(_HEADS, self.read_heads, self.write_heads, self.lacks_heads),
                DROPOUT,
                self.experts.options(),
                OptionGroup(_ROUTER, self.read_router, self.write_router, self.lacks_router),
                OptionGroup(("shared_expert_size", "dense_layers"), self.read_others, _write_others, _lacks_others),
                *self.parts,
            ),
            blocks=_BLOCKS | self.experts.places(),
            dense=_BLOCKS | MLP,
            renamed=_plain_queries,
            **self.experts.of_exchange(),
        )
        return replace(exchange, **others)


def _write_others(model: ModelConfig) -> dict[str, Any]:
    shared = model.shared_expert_size // model.expert_size
    return {"n_shared_experts": shared, "first_k_dense_replace": model.dense_layers, "moe_layer_freq": 1}


def _lacks_others(model: ModelConfig) -> Lacks:
    size, shared = model.expert_size, model.shared_expert_size
    fits = not model.num_experts or (shared > 0 and shared % size == 0)
    return {} if fits else {"shared_expert_size": max(1, round(shared / size)) * size}


def _read_modules(fields: Fields) -> dict[str, Any]:
    """Prediction modules, of which there are none if the files have no tensors of theirs: transformers writes none."""
    return {"prediction_modules": fields.whole(_NUM_MODULES, 1, "a whole number from 0 to 100", most=100)}


def _plain_queries(model: ModelConfig) -> dict[str, str]:
    """Queries that are computed from a layer's input have another name."""
    return {} if model.query_latent_size else {_QUERIES: f"{ATTENTION}q_proj.weight"}


_HEADS = ("num_kv_heads", "head_size", "rotary_size", "value_size", "latent_size", "query_latent_size")
_ROUTER = ("expert_groups", "chosen_groups", "share_scale", "renormalize_shares")
_QUERIES = f"{ATTENTION}q_b_proj.weight"
_BLOCKS = {
    **NORMS["pre"],
    **linear("attention/query_down", f"{ATTENTION}q_a_proj", "RD"),
    **norm("attention/query_norm", f"{ATTENTION}q_a_layernorm", "R"),
    "attention/query/weight": TensorPlace(_QUERIES, "QR", turned=True, pairs="in heads"),
    "attention/key_value_down/weight": TensorPlace(
        f"{ATTENTION}kv_a_proj_with_mqa.weight", "WD", turned=True, pairs="at the end"
    ),
    **norm("attention/key_value_norm", f"{ATTENTION}kv_a_layernorm", "Z"),
    **linear("attention/key_value", f"{ATTENTION}kv_b_proj", "UZ"),
    **linear("attention/output", f"{ATTENTION}o_proj", "DO"),
}
_NUM_MODULES = "num_nextn_predict_layers"
_MODULES = OptionGroup(("prediction_modules",), _read_modules, lambda model: {_NUM_MODULES: model.prediction_modules})
_PREDICTION = {
    **norm("embedding_norm", f"{LAYER}enorm"),
    **norm("hidden_norm", f"{LAYER}hnorm"),
    **linear("projection", f"{LAYER}eh_proj", "DP"),
    **norm("final_norm", f"{LAYER}shared_head.norm"),
}
_ALIASES: dict[str, str] = dict.fromkeys((DEEPSEEK.number_too, "num_local_experts"), DEEPSEEK.number)
_ALIASES |= {"num_mtp_layers": _NUM_MODULES}
_V3 = Kind(
    "DeepseekV3",
    "deepseek_v3",
    BIASED_DEEPSEEK,
    fixed={"rope_interleave": True},
    groups=(8, 4),
    scale=2.5,
    parts=(_MODULES, _ROPE),
)
_V2 = Kind("DeepseekV2", "deepseek_v2", DEEPSEEK, fixed={"mlp_bias": False}, dense=0)
EXCHANGES = (
    _V3.exchange(
        prediction=_PREDICTION,
        prediction_copies={
            f"{LAYER}embed_tokens.weight": "model.embed_tokens.weight",
            f"{LAYER}shared_head.head.weight": "lm_head.weight",
        },
        kept=dict.fromkeys(("bf16", "fp16"), ("e_score_correction_bias",)),
    ),
    _V2.exchange(),
)

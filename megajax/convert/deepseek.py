"""DeepSeek-V2 and DeepSeek-V3, Moonlight among them: latent attention, and mixtures with a shared expert whose first
layers are dense. Their rotary features are neighbours in pairs, ours come from either half."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megajax.convert.exchange import Exchange, Head
from megajax.convert.llama import LAYER, MLP, read_dropout
from megajax.convert.mixtures import DEEPSEEK, ExpertFields
from megajax.convert.parts import Lacks, OptionGroup, rope, words
from megajax.convert.settings import Fields
from megajax.convert.weights import TensorPlace, spelling
from megajax.core.models.config import ModelConfig

ATTENTION = f"{LAYER}self_attn."


@dataclass(frozen=True)
class Kind:
    """One of the classes."""

    name: str
    model_type: str
    scores: Literal["softmax", "sigmoid"]
    biased: bool  # whether routers have biases for choosing
    fixed: Mapping[str, Any]
    experts: ExpertFields = DEEPSEEK
    aliases: Mapping[str, str] = field(default_factory=lambda: _ALIASES)  # as in `Exchange`
    groups: tuple[int | None, int | None] = (None, None)  # of experts, and chosen ones, if fields are missing
    scale: float = 1.0  # of shares, like the next
    dense: int = 3  # first layers
    queries: int | None = 1536  # the width of their latents
    predicts: bool = False  # whether it can have prediction modules

    def read_heads(self, fields: Fields) -> dict[str, Any]:
        heads = fields["num_attention_heads"]
        fields.check("num_key_value_heads", heads, None)
        plain = fields.value("qk_nope_head_dim", "head_size", 128)
        rotary = fields.value("qk_rope_head_dim", "rotary_size", 64)
        self.check_rotary(fields, rotary)
        fields.check("qk_head_dim", None, plain + rotary)
        fields.check("sliding_window", None)
        values = {
            "num_kv_heads": heads,
            "head_size": plain + rotary,
            "rotary_size": rotary,
            "value_size": fields.value("v_head_dim", "value_size", 128),
            "latent_size": fields.value("kv_lora_rank", "latent_size", 512),
        }
        if fields.get("q_lora_rank", self.queries) is not None:
            values["query_latent_size"] = fields.value("q_lora_rank", "query_latent_size", self.queries)
        return values

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
        fields.check("scoring_func", self.scores)
        fields.check("norm_topk_prob", *[True] * self.biased, False, None)
        grouped = True
        if not self.biased:
            fields.check("topk_method", "greedy", "group_limited_greedy")
            grouped = fields.get("topk_method", "greedy") != "greedy"
        groups, chosen = 1, 1
        if grouped and fields.get("n_group", self.groups[0]) is not None:
            groups = fields.value("n_group", "expert_groups", self.groups[0])
            chosen = fields.value("topk_group", "chosen_groups", self.groups[1])
        experts = fields[self.experts.number]
        if experts % groups or (self.biased and groups > 1 and experts // groups < 2):
            raise fields.refusal(
                "n_group", groups, f"a divisor of {self.experts.number}, {experts}, with two in each group"
            )
        least = -(-fields["num_experts_per_tok"] * groups // experts)
        if not least <= chosen <= groups:
            raise fields.refusal("topk_group", chosen, f"{least} to {groups}")
        scale = fields.value("routed_scaling_factor", "share_scale", self.scale)
        values = {"expert_groups": groups, "chosen_groups": chosen, "share_scale": scale}
        values |= {"router_scores": self.scores, "balance": "bias" if self.biased else "none"}
        return values | {"renormalize_shares": bool(fields.get("norm_topk_prob", self.biased))}

    def write_router(self, model: ModelConfig) -> dict[str, Any]:
        settings: dict[str, Any] = {"n_group": model.expert_groups, "topk_group": model.chosen_groups}
        settings |= {"routed_scaling_factor": model.share_scale, "norm_topk_prob": model.renormalize_shares}
        settings |= {"scoring_func": self.scores, "output_router_logits": False}
        limited = model.chosen_groups < model.expert_groups
        method = "noaux_tc" if self.biased else "group_limited_greedy" if limited else "greedy"
        return settings | {"topk_method": method}

    def lacks_router(self, model: ModelConfig) -> Lacks:
        lacking: Lacks = {} if model.router_scores == self.scores else {"router_scores": self.scores}
        if model.biases_routers != self.biased:
            lacking["balance"] = "bias" if self.biased else "none"
        if model.renormalize_shares and not self.biased:
            lacking["renormalize_shares"] = False
        return lacking

    def read_others(self, fields: Fields) -> dict[str, Any]:
        """Shared experts, which are one as wide as all together, and the first layers, which are dense."""
        shared = fields.get("n_shared_experts", 1 if self.biased else 2)
        if type(shared) is not int or not 0 < shared < 1000:
            raise fields.refusal("n_shared_experts", shared, "a whole number from 1 to 999")
        fields.check("moe_layer_freq", 1)
        dense, layers = fields.get("first_k_dense_replace", self.dense), fields["num_hidden_layers"]
        if type(dense) is not int or not 0 <= dense < layers:
            raise fields.refusal("first_k_dense_replace", dense, f"0 to {layers - 1}, of num_hidden_layers")
        size = fields.value("moe_intermediate_size", "expert_size")
        fields["first_k_dense_replace"] = dense
        return {"shared_expert_size": shared * size, "dense_layers": dense}

    def exchange(self) -> Exchange:
        mixture = self.experts.places(LAYER)
        return Exchange(
            family="decoder",
            model_type=self.model_type,
            dialect="mixture",
            heads={"pretraining": Head((f"{self.name}ForCausalLM",), f"a {self.name}")},
            options={"norm": "rmsnorm", "positions": "rotary", "bias": "none"},
            fixed={"is_causal": True, "attention_bias": False, **self.fixed},
            aliases=self.aliases,
            defaults={"norm_epsilon": 1e-6, "tied_embedding": False},
            parts=(
                words("activation", "hidden_act", {"silu": "swiglu", "swish": "swiglu"}),
                OptionGroup(_HEADS, self.read_heads, self.write_heads, self.lacks_heads),
                OptionGroup(("dropout",), read_dropout, lambda model: {"attention_dropout": model.dropout}),
                self.experts.sizes(),
                OptionGroup(_ROUTER, self.read_router, self.write_router, self.lacks_router),
                OptionGroup(("shared_expert_size", "dense_layers"), self.read_others, _write_others, _lacks_others),
                *((_MODULES,) if self.predicts else ()),
                rope(10_000.0, scores=True),
            ),
            shared={
                "table": TensorPlace("model.embed_tokens.weight", "VD"),
                "final_norm/scale": TensorPlace("model.norm.weight", "D"),
                "output": TensorPlace("lm_head.weight", "VD"),
            },
            blocks=BLOCKS | mixture,
            dense=BLOCKS | MLP,
            prediction=_PREDICTION if self.predicts else {},
            prediction_copies=_COPIES if self.predicts else {},
            of_model=_plain_queries,
            copies={"lm_head.weight": "model.embed_tokens.weight"},
            unused=(f"{ATTENTION}rotary_emb.inv_freq",),
            fused=self.experts.fused(LAYER),
            spelling=spelling(),
            kept=dict.fromkeys(("bf16", "fp16"), ("e_score_correction_bias",)) if self.predicts else {},
        )


def _write_others(model: ModelConfig) -> dict[str, Any]:
    shared = model.shared_expert_size // model.expert_size
    return {"n_shared_experts": shared, "first_k_dense_replace": model.dense_layers, "moe_layer_freq": 1}


def _lacks_others(model: ModelConfig) -> Lacks:
    size, shared = model.expert_size, model.shared_expert_size
    fits = not model.num_experts or (shared > 0 and shared % size == 0)
    return {} if fits else {"shared_expert_size": max(1, round(shared / size)) * size}


def _read_modules(fields: Fields) -> dict[str, Any]:
    """Prediction modules, of which there are none if the files have no tensors of theirs: transformers writes none."""
    count = fields.get(_NUM_MODULES, 1)
    if type(count) is not int or not 0 <= count <= 100:
        raise fields.refusal(_NUM_MODULES, count, "a whole number from 0 to 100")
    return {"prediction_modules": count}


def _plain_queries(model: ModelConfig) -> dict[str, TensorPlace]:
    """Queries that are computed from a layer's input have another name."""
    return {} if model.query_latent_size else {"attention/query/weight": _query("q_proj")}


def _query(name: str) -> TensorPlace:
    return TensorPlace(f"{ATTENTION}{name}.weight", "QR", turned=True, pairs="in heads")


_HEADS = ("num_kv_heads", "head_size", "rotary_size", "value_size", "latent_size", "query_latent_size")
_ROUTER = ("router_scores", "expert_groups", "chosen_groups", "share_scale", "renormalize_shares", "balance")
BLOCKS = {
    "attention_norm/scale": TensorPlace(f"{LAYER}input_layernorm.weight", "D"),
    "mlp_norm/scale": TensorPlace(f"{LAYER}post_attention_layernorm.weight", "D"),
    "attention/query_down/weight": TensorPlace(f"{ATTENTION}q_a_proj.weight", "RD", turned=True),
    "attention/query_norm/scale": TensorPlace(f"{ATTENTION}q_a_layernorm.weight", "R"),
    "attention/query/weight": _query("q_b_proj"),
    "attention/key_value_down/weight": TensorPlace(
        f"{ATTENTION}kv_a_proj_with_mqa.weight", "WD", turned=True, pairs="at the end"
    ),
    "attention/key_value_norm/scale": TensorPlace(f"{ATTENTION}kv_a_layernorm.weight", "Z"),
    "attention/key_value/weight": TensorPlace(f"{ATTENTION}kv_b_proj.weight", "UZ", turned=True),
    "attention/output/weight": TensorPlace(f"{ATTENTION}o_proj.weight", "DO", turned=True),
}


_NUM_MODULES = "num_nextn_predict_layers"
_MODULES = OptionGroup(("prediction_modules",), _read_modules, lambda model: {_NUM_MODULES: model.prediction_modules})
_PREDICTION = {
    "embedding_norm/scale": TensorPlace(f"{LAYER}enorm.weight", "D"),
    "hidden_norm/scale": TensorPlace(f"{LAYER}hnorm.weight", "D"),
    "projection/weight": TensorPlace(f"{LAYER}eh_proj.weight", "DP", turned=True),
    "final_norm/scale": TensorPlace(f"{LAYER}shared_head.norm.weight", "D"),
}
_COPIES = {
    f"{LAYER}embed_tokens.weight": "model.embed_tokens.weight",
    f"{LAYER}shared_head.head.weight": "lm_head.weight",
}
_ALIASES: dict[str, str] = dict.fromkeys((DEEPSEEK.number_too, "num_local_experts"), DEEPSEEK.number)
_ALIASES |= {"num_mtp_layers": _NUM_MODULES}
_KINDS = (
    Kind(
        "DeepseekV3",
        "deepseek_v3",
        "sigmoid",
        biased=True,
        fixed={"rope_interleave": True},
        groups=(8, 4),
        scale=2.5,
        predicts=True,
    ),
    Kind("DeepseekV2", "deepseek_v2", "softmax", biased=False, fixed={"mlp_bias": False}, dense=0),
)
EXCHANGES = tuple(kind.exchange() for kind in _KINDS)

"""Llama, Qwen2, Qwen3 and 3.5, Mistral, Gemma 3, OLMo 3 and hybrid, and the mixtures Qwen3-MoE, Qwen3-Next,
Qwen3.5-MoE, Mixtral, OLMoE and GPT-OSS: `…ForCausalLM` of transformers. They differ in biases, windows, norms and MLPs,
and in what missing fields mean."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Literal

from megajax.convert.exchange import Exchange, Head
from megajax.convert.hybrids import joined_convolutions, linear_attention, linear_places
from megajax.convert.mixtures import GPT_OSS, LAYER, MIXTRAL, OLMOE, QWEN3_5_MOE, QWEN3_MOE, QWEN3_NEXT, ExpertFields
from megajax.convert.parts import Lacks, OptionGroup, lacks_heads, rope, rope_by_layer, words
from megajax.convert.settings import Fields
from megajax.convert.weights import TensorPlace, linear, norm, spelling
from megajax.convert.windows import Window
from megajax.core.models.config import ModelConfig

_NO_WINDOW = Window(never=True)
_ROPE = rope(10_000.0)
_DELTA = f"{LAYER}linear_attn."
ACTIVATION = words("activation", "hidden_act", {"silu": "swiglu", "swish": "swiglu"})


def norms(*names: str) -> dict[str, TensorPlace]:
    """The norms of attention and MLP in a layer, and of their outputs if there are such."""
    ours = "attention_norm", "mlp_norm", "attention_output_norm", "mlp_output_norm"
    places = zip(ours, names, strict=False)
    return {f"{name}/scale": TensorPlace(f"{LAYER}{theirs}.weight", "D") for name, theirs in places}


_MIDDLE, _END = "post_attention_layernorm", "post_feedforward_layernorm"
NORMS = {  # by the order of a layer
    "pre": norms("input_layernorm", _MIDDLE),
    "sandwich": norms("input_layernorm", "pre_feedforward_layernorm", _MIDDLE, _END),
    **dict.fromkeys(("reordered", "pre-reordered"), norms(_MIDDLE, _END)),
}
MLP = {
    **linear("mlp/gate", f"{LAYER}mlp.gate_proj", "FD"),
    **linear("mlp/up", f"{LAYER}mlp.up_proj", "FD"),
    **linear("mlp/down", f"{LAYER}mlp.down_proj", "DF"),
}


def _joined(theirs: str, dims: str, parts: str, *ours: str) -> dict[str, TensorPlace]:
    """Products of attention that are joined in one tensor."""
    place = TensorPlace(f"{theirs}.weight", dims, parts=parts, turned=True)
    return {f"attention/{name}/weight": replace(place, part=part) for part, name in enumerate(ours)}


@dataclass(frozen=True)
class _Kind:
    """One of these classes."""

    name: str  # as in `…ForCausalLM`
    biases: tuple[str, ...] = ("none",)  # possible values of `model.bias`
    window: Window = _NO_WINDOW
    query_key_norm: Literal["", "head", "width"] = ""  # none, or over what
    kv_heads: int | None = None  # if the field is missing; None: as many as heads
    head_size: int | None = None  # if the field is missing; None: width / heads
    heads: Literal["free", "divide", "fill"] = "free"  # any; must divide the width; head sizes must add up to the width
    angles: OptionGroup = _ROPE
    norm_epsilon: float = 1e-6
    tied: bool = False
    activation: OptionGroup = ACTIVATION
    options: Mapping[str, Any] = field(default_factory=dict)  # others that have one value
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fields that have one value
    experts: ExpertFields | None = None  # instead of MLPs
    parts: tuple[OptionGroup, ...] = ()  # other options that this class alone has
    model_type: str = ""  # its value in config.json; empty: the name in lower case
    others: Mapping[str, Any] = field(default_factory=dict)  # further fields of its `Exchange`

    def read_heads(self, fields: Fields) -> dict[str, Any]:
        heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
        kv_heads = fields.optional("num_key_value_heads", "num_kv_heads", self.kv_heads) or heads
        if kv_heads > heads or heads % kv_heads:
            raise fields.refusal("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads, {heads}")
        if self.heads != "free" or fields.get("head_dim", self.head_size) is None:
            fields.check_divides("num_attention_heads", "hidden_size")
        if self.heads == "fill":
            fields.check("head_dim", None, hidden // heads)
        fields["head_dim"] = fields.optional("head_dim", "head_size", self.head_size) or hidden // heads
        return {"num_kv_heads": kv_heads, "head_size": fields["head_dim"]}

    def read_bias(self, fields: Fields) -> dict[str, Any]:
        """Llama says separately whether attention and MLP have biases; ours have them in both or neither."""
        if self.biases == ("all",):
            fields.check("attention_bias", True)
            return {"bias": "all"}
        chosen = "all" in self.biases
        for name in "attention_bias", "mlp_bias":
            fields.check(name, False, *((True,) if chosen else ()))
        attention, mlp = (fields.get(name, False) for name in ("attention_bias", "mlp_bias"))
        if attention != mlp:
            raise fields.refusal("mlp_bias", mlp, f"as attention_bias, {str(attention).lower()}")
        return {"bias": "all" if attention else self.biases[0]}

    def write_bias(self, model: ModelConfig) -> dict[str, Any]:
        if self.biases == ("all",):
            return {"attention_bias": True}
        if "all" in self.biases:
            return dict.fromkeys(("attention_bias", "mlp_bias"), model.bias == "all")
        return {"attention_bias": False} if self.query_key_norm else {}

    def lacks_bias(self, model: ModelConfig) -> Lacks:
        return {} if model.bias in self.biases else {"bias": self.biases[0]}

    def lacks_heads(self, model: ModelConfig) -> Lacks:
        return {} if self.heads == "free" else lacks_heads(model, fill=self.heads == "fill")

    @property
    def all_options(self) -> dict[str, Any]:
        """Our options that have one value in this class."""
        norm = {"query_key_norm": bool(self.query_key_norm), "query_key_norm_over": self.query_key_norm or "head"}
        return {"norm": "rmsnorm", "positions": "rotary", "layer_order": "pre", **norm, **self.options}

    def blocks(self) -> dict[str, TensorPlace]:
        """The places of a layer's weights."""
        width, gated = self.query_key_norm == "width", "attention_gate" in self.options
        return {
            **NORMS[self.all_options["layer_order"]],
            **linear("attention/query", f"{LAYER}self_attn.q_proj", "QD"),
            **linear("attention/key", f"{LAYER}self_attn.k_proj", "GD"),
            **linear("attention/value", f"{LAYER}self_attn.v_proj", "GD"),
            **linear("attention/output", f"{LAYER}self_attn.o_proj", "DQ"),
            **(_joined(f"{LAYER}self_attn.q_proj", "qD", "KK", "query", "attention_gate") if gated else {}),
            "attention/sinks": TensorPlace(f"{LAYER}self_attn.sinks", "H"),
            **norm("attention/query_norm", f"{LAYER}self_attn.q_norm", "Q" if width else "K"),
            **norm("attention/key_norm", f"{LAYER}self_attn.k_norm", "G" if width else "K"),
            **(self.experts.places() if self.experts else MLP),
        }


_QUERY_SCALAR = OptionGroup(
    ("query_scalar",),
    lambda fields: {"query_scalar": fields.value("query_pre_attn_scalar", "query_scalar", 256)},
    lambda model: {"query_pre_attn_scalar": model.query_scalar or model.head_size},
)
_CLAMPS = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # options that have the same names, and what is missing
_CLAMPED = OptionGroup(
    (*_CLAMPS,),
    lambda fields: {name: fields.value(name, name, each) for name, each in _CLAMPS.items()},
    lambda model: {name: getattr(model, name) for name in _CLAMPS},
)


def _read_dropout(fields: Fields) -> dict[str, float]:
    """Their rate is for attention only; ours also applies to the residual branches."""
    rate = fields.get("attention_dropout", 0.0)
    if rate is None or (type(rate) in (int, float) and rate == 0):
        return {"dropout": 0.0}
    raise fields.refusal("attention_dropout", rate, "0, or --model.dropout X, which is not of attention only")


DROPOUT = OptionGroup(("dropout",), _read_dropout, lambda model: {"attention_dropout": model.dropout})


def decoder(name: str, *, fixed: Mapping[str, Any], unused: tuple[str, ...] = (), **others: Any) -> Exchange:
    """The exchange of a class, with what all those named like Llama's have in common."""
    return Exchange(
        family="decoder",
        heads={"pretraining": Head((f"{name}ForCausalLM",), f"a {name}")},
        fixed={"is_causal": True, **fixed},
        shared={
            "table": TensorPlace("model.embed_tokens.weight", "VD"),
            **norm("final_norm", "model.norm"),
            "output": TensorPlace("lm_head.weight", "VD"),
        },
        copies={"lm_head.weight": "model.embed_tokens.weight"},
        unused=(f"{LAYER}self_attn.rotary_emb.inv_freq", *unused),  # older versions stored the angles
        **others,
    )


def _by_interval(fields: Fields, interval: int = 0) -> list[bool]:
    valid = "1 or more: every so many layers one is not linear"
    interval = interval or fields.whole("full_attention_interval", 4, valid, least=1)
    return [(n + 1) % interval > 0 for n in range(fields["num_hidden_layers"])]


def _exchange(kind: _Kind) -> Exchange:
    return decoder(
        kind.name,
        model_type=kind.model_type or kind.name.lower(),
        dialect="mixture" if kind.experts else "llama",
        options=kind.all_options | ({"renormalize_shares": True} if kind.experts and kind.experts.renormalized else {}),
        fixed={**kind.fixed, **(kind.experts.fixed if kind.experts else {})},
        aliases={kind.experts.number_too: kind.experts.number} if kind.experts else {},
        defaults={
            "norm_epsilon": kind.norm_epsilon,
            "tied_embedding": kind.tied,
            "renormalize_shares": kind.experts is not None and kind.experts.renormalizes,
        },
        parts=(
            kind.activation,
            OptionGroup(
                ("num_kv_heads", "head_size"),
                kind.read_heads,
                lambda model: {"num_key_value_heads": model.num_kv_heads, "head_dim": model.head_size},
                kind.lacks_heads,
            ),
            OptionGroup(("bias",), kind.read_bias, kind.write_bias, kind.lacks_bias),
            DROPOUT,
            kind.angles,
            *(() if "linear" in kind.others else (kind.window.options(),)),
            *((kind.experts.options(),) if kind.experts else ()),
            *kind.parts,
        ),
        blocks=kind.blocks(),
        **(kind.experts.of_exchange() if kind.experts else {}),
        **kind.others,
    )


_JOINED_BY_HEAD = {
    **_joined(f"{_DELTA}in_proj_qkvz", "yD", "llgg", "query", "key", "value", "attention_gate"),
    **_joined(f"{_DELTA}in_proj_ba", "bD", "rr", "write", "decay"),
}
_JOINED = _joined(f"{_DELTA}in_proj_qkv", "cD", "kkv", "query", "key", "value")


def _qwen_hybrid(name: str, experts: ExpertFields | None, joined: Mapping[str, TensorPlace], **others: Any) -> _Kind:
    """Qwen3-Next and its kind, in which products of linear attention are `joined`."""
    mlp = experts.places() if experts else MLP
    return _Kind(
        name,
        query_key_norm="head",
        head_size=256,
        angles=rope(10_000.0, share=0.25),
        options={"norm": "rmsnorm-1p", "attention_gate": "sigmoid", "shared_expert_gate": experts is not None},
        fixed={"sliding_window": None},
        experts=experts,
        parts=(linear_attention(_by_interval, heads=32, key_heads=16, key_size=128, value_size=128),),
        others={
            "linear": {**NORMS["pre"], **linear_places(_DELTA, joined=True), **joined, **mlp},
            "unused": ("mtp.",),  # modules for further tokens
        },
        **others,
    )


_OLMO_NORMS = norms("attention_layer_norm", "feedforward_layer_norm")
_GPT_OSS_YARN = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "original_max_position_embeddings": 4096,
}
_KINDS = (  # a model that fits several is exported as the first of them
    _Kind("Llama", biases=("none", "all"), heads="divide"),
    _Kind("Mistral", window=Window(), kv_heads=8),
    _Kind("Qwen2", biases=("query-key-value",), window=Window(switched=True, first=28), kv_heads=32),
    _Kind("Qwen3", window=Window(switched=True, first=28), query_key_norm="head", kv_heads=32, head_size=128),
    _Kind(
        "Gemma3",
        window=Window(pattern=6, local=True, own_base=True),
        query_key_norm="head",
        kv_heads=4,
        head_size=256,
        angles=rope_by_layer(1e6, 10_000.0, "rope_local_base_freq"),
        tied=True,
        activation=words("activation", "hidden_activation", {"gelu_pytorch_tanh": "geglu-tanh"}),
        options={"norm": "rmsnorm-1p", "layer_order": "sandwich", "scaled_embedding": True},
        fixed={"attn_logit_softcapping": None, "final_logit_softcapping": None, "use_bidirectional_attention": False},
        parts=(_QUERY_SCALAR,),
        model_type="gemma3_text",
    ),
    _Kind(
        "Olmo3",
        window=Window(pattern=4, own_base=True),
        query_key_norm="width",
        heads="fill",
        angles=rope_by_layer(500_000.0, 500_000.0),
        norm_epsilon=1e-5,
        options={"layer_order": "reordered"},
    ),
    _Kind(
        "OlmoHybrid",
        angles=rope(10_000.0, may_lack=True),
        query_key_norm="width",
        heads="fill",
        options={"layer_order": "pre-reordered"},
        fixed={"sliding_window": None},
        parts=(
            linear_attention(
                lambda fields: _by_interval(fields, min(4, fields["num_hidden_layers"])),
                heads=itemgetter("num_attention_heads"),
                key_heads=itemgetter("num_attention_heads"),
                key_size=lambda fields: 3 * fields["hidden_size"] // (4 * fields["linear_num_key_heads"]),
                value_size=lambda fields: 2 * fields["linear_key_head_dim"],
                epsilon=1e-5,
            ),
            words("linear_write", "linear_allow_neg_eigval", {True: 2.0, False: 1.0}),
        ),
        model_type="olmo_hybrid",
        others={
            "linear": _OLMO_NORMS | linear_places(_DELTA, joined=False) | MLP,
            "kept": dict.fromkeys(("bf16", "fp16"), ("A_log",)),
            "joined": joined_convolutions(_DELTA),
            "spelling": spelling(
                ("attention_layer_norm", "input_layernorm"),
                ("feedforward_layer_norm", "post_attention_layernorm"),
                ("post_attention_layernorm", "feedforward_layer_norm"),
            ),
        },
    ),
    _qwen_hybrid("Qwen3_5", None, _JOINED, kv_heads=4, model_type="qwen3_5_text"),
    _Kind("Mixtral", window=Window(None), kv_heads=8, angles=rope(1e6), norm_epsilon=1e-5, experts=MIXTRAL),
    _Kind(
        "Qwen3Moe",
        window=Window(switched=True),
        query_key_norm="head",
        kv_heads=4,
        experts=QWEN3_MOE,
        model_type="qwen3_moe",
    ),
    _qwen_hybrid("Qwen3Next", QWEN3_NEXT, _JOINED_BY_HEAD, kv_heads=2, model_type="qwen3_next"),
    _qwen_hybrid("Qwen3_5Moe", QWEN3_5_MOE, _JOINED, kv_heads=2, model_type="qwen3_5_moe_text"),
    _Kind("Olmoe", query_key_norm="width", heads="fill", norm_epsilon=1e-5, experts=OLMOE),
    _Kind(
        "GptOss",
        biases=("all",),
        window=Window(128, pattern=2),
        kv_heads=8,
        head_size=64,
        angles=rope(150_000.0, missing=_GPT_OSS_YARN),
        norm_epsilon=1e-5,
        activation=words("activation", "hidden_act", {"silu": "swiglu-clamped"}),
        options={"attention_sinks": True},
        experts=GPT_OSS,
        parts=(_CLAMPED,),
        model_type="gpt_oss",
        others={"quantized": "mxfp4", "kept": {"fp16": ("norm.weight",)}},
    ),
)
EXCHANGES = tuple(map(_exchange, _KINDS))

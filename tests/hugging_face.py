"""Small models in Hugging Face's format, by their `model_type`: written by hand, or by transformers."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file
from tiny import user_error

from megajax.convert.importing import open_source

CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "megatron-bert": "MegatronBertForPreTraining",
    "bert": "BertForPreTraining",
}
DECODERS = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "olmo3")
QWEN_HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
HYBRIDS = ("olmo_hybrid", "kimi_linear", *QWEN_HYBRIDS)
MIXTURES = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss")
DEEPSEEKS = ("deepseek_v3", "deepseek_v2")
ORDERS = {"megatron-bert": "pre", "bert": "post"}
TASKS = {"classes": "SequenceClassification", "span": "QuestionAnswering", "choice": "MultipleChoice"}  # by our head
_SIZES = {"vocab_size": 101, "max_position_embeddings": 24, "hidden_size": 24, "num_hidden_layers": 2}
_DECODER = _SIZES | {
    "intermediate_size": 40,
    "num_attention_heads": 6,  # of queries
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_MIXTURE = _DECODER | {"num_experts": 5, "num_experts_per_tok": 2}
_HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "partial_rotary_factor": 0.5,
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 5},
    "linear_conv_kernel_dim": 3,
}
_DEEPSEEK = _SIZES | {
    **{"intermediate_size": 40, "num_attention_heads": 6, "num_key_value_heads": 6, "first_k_dense_replace": 1},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 14, "n_shared_experts": 2},
    **{"qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "v_head_dim": 7, "kv_lora_rank": 9, "q_lora_rank": 11},
    **{"n_group": 2, "topk_group": 1, "num_nextn_predict_layers": 0, "routed_scaling_factor": 1.5},
}
_BERT = _SIZES | {
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_GPT2 = {"vocab_size": 101, "n_positions": 24, "n_embd": 24, "n_layer": 2, "n_head": 4}
_GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
SETTINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(DECODERS, _DECODER),
    **dict.fromkeys(("mixtral", "gpt_oss"), _DECODER | {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3_moe": _MIXTURE | {"moe_intermediate_size": 14},
    **dict.fromkeys(
        QWEN_HYBRIDS,
        _MIXTURE | _HYBRID | {"moe_intermediate_size": 14, "shared_expert_intermediate_size": 10},
    ),
    "qwen3_5_text": _DECODER | _HYBRID,
    "olmoe": _MIXTURE | {"head_dim": 4},
    "olmo3": _DECODER | {"head_dim": 4},
    "olmo_hybrid": _DECODER
    | {"head_dim": 4, "pad_token_id": None, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
    | {"linear_key_head_dim": 5, "linear_value_head_dim": 7, "linear_conv_kernel_dim": 3}
    | {"layer_types": ["linear_attention", "full_attention"]},
    "deepseek_v3": _DEEPSEEK,
    # Transformers rotates pairs of features as complex numbers, which must have even places in memory.
    "deepseek_v2": _DEEPSEEK | {"topk_method": "group_limited_greedy", "qk_nope_head_dim": 6, "kv_lora_rank": 10},
    "kimi_linear": _SIZES
    | {name: _DEEPSEEK[name] for name in _DEEPSEEK if name not in ("n_routed_experts", "num_nextn_predict_layers")}
    | {"q_lora_rank": None, "num_local_experts": 4, "layer_types": ["linear_attention", "full_attention"]}
    | {"linear_num_heads": 2, "linear_head_dim": 3, "linear_conv_kernel_dim": 3}
    | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
    **dict.fromkeys(ORDERS, _BERT),
    "gpt2": _GPT2,
}
# Settings that several tests change.
BIASES = {"attention_bias": True, "mlp_bias": True}
TIED = {"tie_word_embeddings": True}
LLAMA3 = {"factor": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 8}
# Sizes and angles of models that transformers makes.
PEER_SIZES = {"hidden_size": 48, "intermediate_size": 84, "num_attention_heads": 6}
PEER_LLAMA3 = LLAMA3 | {
    "factor": 8.0,
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "original_max_position_embeddings": 16,
}
# Both kinds of angles in 40 features of a head, some between them, in sequences longer than 8 tokens.
PEER_YARN = YARN | {"rope_theta": 30.0, "beta_fast": 1.1, "beta_slow": 0.2}
# A small model of ours, and the words of Llama's.
SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 24, "num_heads": 6, "sequence_length": 8, "vocab_size": 9}
ROTARY = {"norm": "rmsnorm", "positions": "rotary", "activation": "swiglu", "bias": "none"}
Shapes = dict[str, tuple[int, ...]]


def class_of(kind: str, head: str = "pretraining") -> str:
    """The class of transformers that has a head of ours."""
    return CLASSES[kind] if head == "pretraining" else CLASSES[kind].replace("PreTraining", TASKS[head])


def random_tensors(
    kind: str, dtype: Any = np.float32, *, head: str = "pretraining", classes: int = 2, **settings: Any
) -> dict[str, np.ndarray]:
    """Every tensor of a model; `settings` are fields of config.json beside or instead of `SETTINGS`, `classes` those of
    the head of that name."""
    fields, rng = SETTINGS[kind] | settings, np.random.default_rng(0)
    if kind in ORDERS:
        shapes = _bert_shapes(fields, kind, head, classes)
    elif kind in (*DEEPSEEKS, "kimi_linear"):
        shapes = _deepseek_shapes(fields, kind)
    else:
        shapes = _gpt2_shapes(fields) if kind == "gpt2" else _decoder_shapes(fields, kind)
    found = {name: rng.normal(0, 0.2, shape).astype(dtype) for name, shape in shapes.items()}
    for copy, of in (".embed_tokens", "model.embed_tokens"), (".shared_head.head", "lm_head"):
        found |= {name: found[f"{of}.weight"] for name in found if re.search(rf"\d{copy}\.weight$", name)}
    return found


def _gpt2_shapes(fields: dict[str, Any]) -> Shapes:
    d = fields["n_embd"]
    shapes: Shapes = {"wte.weight": (fields["vocab_size"], d), "wpe.weight": (fields["n_positions"], d)}
    shapes |= {"ln_f.weight": (d,), "ln_f.bias": (d,)}
    for layer in range(fields["n_layer"]):
        for name in "ln_1", "ln_2":
            shapes |= {f"h.{layer}.{name}.weight": (d,), f"h.{layer}.{name}.bias": (d,)}
        for name, inner, outer in (
            ("attn.c_attn", d, 3 * d),
            ("attn.c_proj", d, d),
            ("mlp.c_fc", d, 4 * d),
            ("mlp.c_proj", 4 * d, d),
        ):
            shapes |= {f"h.{layer}.{name}.weight": (inner, outer), f"h.{layer}.{name}.bias": (outer,)}
    return {f"transformer.{name}": shape for name, shape in shapes.items()}


def _bert_shapes(fields: dict[str, Any], kind: str, head: str, classes: int) -> Shapes:
    size, inner = fields["hidden_size"], fields["intermediate_size"]
    shapes: Shapes = {
        "bert.embeddings.word_embeddings.weight": (fields["vocab_size"], size),
        "bert.embeddings.position_embeddings.weight": (fields["max_position_embeddings"], size),
        "bert.embeddings.token_type_embeddings.weight": (2, size),
    }
    norms = ["bert.embeddings.LayerNorm" if kind == "bert" else "bert.encoder.ln"]
    linear: dict[str, tuple[int, int]] = {} if head == "span" else {"bert.pooler.dense": (size, size)}
    if head == "pretraining":
        shapes["cls.predictions.bias"] = (fields["vocab_size"],)
        norms.append("cls.predictions.transform.LayerNorm")
        linear |= {"cls.seq_relationship": (2, size), "cls.predictions.transform.dense": (size, size)}
    elif head == "span":
        linear["qa_outputs"] = (2, size)
    else:
        linear["classifier"] = (classes if head == "classes" else 1, size)
    for layer in range(fields["num_hidden_layers"]):
        start = f"bert.encoder.layer.{layer}."
        for name in "self.query", "self.key", "self.value", "output.dense":
            linear[f"{start}attention.{name}"] = (size, size)
        linear |= {f"{start}intermediate.dense": (inner, size), f"{start}output.dense": (size, inner)}
        own = ("attention.output.LayerNorm", "output.LayerNorm") if kind == "bert" else ("attention.ln", "ln")
        norms += [start + name for name in own]
    for name, shape in linear.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name in norms:
        shapes |= {f"{name}.weight": (size,), f"{name}.bias": (size,)}
    return shapes


def _decoder_shapes(fields: dict[str, Any], kind: str) -> Shapes:
    width, inner, size = fields["hidden_size"], fields["intermediate_size"], fields["head_dim"]
    queries, keys = (fields[f"num_{name}_heads"] * size for name in ("attention", "key_value"))
    everywhere = bool(fields.get("attention_bias")) or kind == "gpt_oss"
    shapes: Shapes = {"model.embed_tokens.weight": (fields["vocab_size"], width), "model.norm.weight": (width,)}
    if not fields.get("tie_word_embeddings", kind == "gemma3_text"):
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    for layer in range(fields["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        reordered, types = kind in ("olmo3", "olmo_hybrid"), fields.get("layer_types")
        if kind == "olmo_hybrid" and (types[layer] == "linear_attention" if types else layer % 4 < 3):
            shapes |= {f"{start}{name}": shape for name, shape in _olmo_delta_shapes(fields).items()}
            continue
        norms = ["post_attention_layernorm"] + ["input_layernorm"] * (not reordered)
        norms += ["post_feedforward_layernorm"] * (kind == "gemma3_text" or reordered)
        for name in norms + ["pre_feedforward_layernorm"] * (kind == "gemma3_text"):
            shapes[f"{start}{name}.weight"] = (width,)
        if kind in ("qwen3", "qwen3_moe", "gemma3_text", *QWEN_HYBRIDS):
            shapes |= {f"{start}self_attn.{name}_norm.weight": (size,) for name in "qk"}
        elif kind == "olmoe" or reordered:
            shapes |= {f"{start}self_attn.{name}_norm.weight": (n,) for name, n in (("q", queries), ("k", keys))}
        linear: list[tuple[str, tuple[int, int], bool]] = [
            ("self_attn.q_proj", (queries, width), everywhere or kind == "qwen2"),
            ("self_attn.k_proj", (keys, width), everywhere or kind == "qwen2"),
            ("self_attn.v_proj", (keys, width), everywhere or kind == "qwen2"),
            ("self_attn.o_proj", (width, queries), everywhere),
        ]
        products = [("gate_proj", (inner, width)), ("up_proj", (inner, width)), ("down_proj", (width, inner))]
        if kind == "gpt_oss":
            experts, own = fields["num_local_experts"], f"{start}mlp.experts."
            linear.append(("mlp.router", (experts, width), True))
            shapes[f"{start}self_attn.sinks"] = (fields["num_attention_heads"],)
            for name, inside, outside in ("gate_up_proj", width, 2 * inner), ("down_proj", inner, width):
                shapes |= {own + name: (experts, inside, outside), f"{own}{name}_bias": (experts, outside)}
        elif kind in MIXTURES or "num_experts" in fields:
            linear += _expert_shapes(fields, kind)
        else:
            linear += [(f"mlp.{name}", shape, everywhere) for name, shape in products]
        for name, shape, bias in linear:
            shapes[f"{start}{name}.weight"] = shape
            if bias:
                shapes[f"{start}{name}.bias"] = shape[:1]
        if kind in QWEN_HYBRIDS and (types[layer] == "linear_attention" if types else layer % 3 < 2):
            shapes = {name: shape for name, shape in shapes.items() if f"{start}self_attn" not in name}
            shapes |= {f"{start}linear_attn.{name}": shape for name, shape in _qwen_delta(fields, kind).items()}
        elif kind in QWEN_HYBRIDS:
            shapes[f"{start}self_attn.q_proj.weight"] = (2 * queries, width)
    return shapes


def _olmo_delta_shapes(fields: dict[str, Any]) -> Shapes:
    """Of a layer of linear attention of OLMo hybrid."""
    width, heads, inner = fields["hidden_size"], fields["linear_num_value_heads"], fields["intermediate_size"]
    keys, size = fields["linear_num_key_heads"] * fields["linear_key_head_dim"], fields["linear_value_head_dim"]
    rows = {"q": keys, "k": keys, "v": heads * size, "g": heads * size, "a": heads, "b": heads}
    own: Shapes = {f"linear_attn.{name}_proj": (number, width) for name, number in rows.items()}
    own |= {f"linear_attn.{name}_conv1d": (rows[name], 1, fields["linear_conv_kernel_dim"]) for name in "qkv"}
    own |= {"linear_attn.o_proj": (width, heads * size), "mlp.down_proj": (width, inner)}
    own |= {f"mlp.{name}_proj": (inner, width) for name in ("gate", "up")} | {"linear_attn.o_norm": (size,)}
    own |= dict.fromkeys(("attention_layer_norm", "feedforward_layer_norm"), (width,))
    shapes = {f"{name}.weight": shape for name, shape in own.items()}
    return shapes | {"linear_attn.A_log": (heads,), "linear_attn.dt_bias": (heads,)}


def _qwen_delta(fields: dict[str, Any], kind: str) -> Shapes:
    width, heads, size = fields["hidden_size"], fields["linear_num_value_heads"], fields["linear_value_head_dim"]
    keys, values = fields["linear_num_key_heads"] * fields["linear_key_head_dim"], heads * size
    products = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
    if kind == "qwen3_next":
        products = {"qkvz": 2 * keys + 2 * values, "ba": 2 * heads}
    shapes: Shapes = {f"in_proj_{name}.weight": (rows, width) for name, rows in products.items()}
    shapes |= {"conv1d.weight": (2 * keys + values, 1, fields["linear_conv_kernel_dim"]), "norm.weight": (size,)}
    return shapes | {"A_log": (heads,), "dt_bias": (heads,), "out_proj.weight": (width, values)}


def _deepseek_shapes(fields: dict[str, Any], kind: str) -> Shapes:
    kimi, width, heads = kind == "kimi_linear", fields["hidden_size"], fields["num_attention_heads"]
    experts, mixture = (
        fields["num_local_experts" if kimi else "n_routed_experts"],
        "block_sparse_moe" if kimi else "mlp",
    )
    plain, rotary, value = (fields[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    latent, of_query = fields["kv_lora_rank"], fields["q_lora_rank"]
    shapes: Shapes = {"model.embed_tokens.weight": (fields["vocab_size"], width), "model.norm.weight": (width,)}
    shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    attention: Shapes = {
        "kv_a_proj_with_mqa": (latent + rotary, width),
        "kv_a_layernorm": (latent,),
        "kv_b_proj": (heads * (plain + value), latent),
        "o_proj": (width, heads * value),
    }
    if of_query:
        attention |= {"q_a_proj": (of_query, width), "q_a_layernorm": (of_query,)}
    attention["q_b_proj" if of_query else "q_proj"] = (heads * (plain + rotary), of_query or width)

    def mlp(name: str, inner: int, products: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")) -> Shapes:
        return {f"{name}.{up}": (inner, width) for up in products[:2]} | {f"{name}.{products[2]}": (width, inner)}

    layers, modules = fields["num_hidden_layers"], fields.get("num_nextn_predict_layers", 0)
    for layer in range(layers + modules):
        own: Shapes = {"input_layernorm": (width,), "post_attention_layernorm": (width,)}
        linear = kimi and (fields["layer_types"] or ["linear_attention"])[layer : layer + 1] == ["linear_attention"]
        own |= {f"self_attn.{name}": each for name, each in (_kda_shapes(fields) if linear else attention).items()}
        if linear:
            heads, size = fields["linear_num_heads"], fields["linear_head_dim"]
            shapes[f"model.layers.{layer}.self_attn.A_log"] = (1, 1, heads, 1)
            shapes[f"model.layers.{layer}.self_attn.dt_bias"] = (heads * size,)
        if layer >= layers:  # copies of the first two: `random_tensors`
            own |= dict.fromkeys(("embed_tokens", "shared_head.head"), (fields["vocab_size"], width))
            own |= {"eh_proj": (width, 2 * width), **dict.fromkeys(("enorm", "hnorm", "shared_head.norm"), (width,))}
        if layer < fields["first_k_dense_replace"]:
            own |= mlp("mlp", fields["intermediate_size"])
        else:
            inner = fields["moe_intermediate_size"]
            own |= mlp(f"{mixture}.shared_experts", fields["n_shared_experts"] * inner)
            own[f"{mixture}.gate"] = (experts, width)
            for expert in range(experts):
                own |= mlp(f"{mixture}.experts.{expert}", inner, *[("w1", "w3", "w2")] * kimi)
            if kind != "deepseek_v2":
                shapes[f"model.layers.{layer}.{mixture}.gate.e_score_correction_bias"] = (experts,)
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    return shapes


def _kda_shapes(fields: dict[str, Any]) -> Shapes:
    """Of the products, convolutions and norm of Kimi's linear attention."""
    width, size, heads = fields["hidden_size"], fields["linear_head_dim"], fields["linear_num_heads"]
    shapes: Shapes = {f"{name}_proj": (heads * size, width) for name in "qkv"}
    shapes |= {f"{name}_conv1d": (heads * size, 1, fields["linear_conv_kernel_dim"]) for name in "qkv"}
    shapes |= {f"{name}_a_proj": (size, width) for name in "fg"}
    shapes |= {f"{name}_b_proj": (heads * size, size) for name in "fg"}
    return shapes | {"b_proj": (heads, width), "o_proj": (width, heads * size), "o_norm": (size,)}


def _expert_shapes(fields: dict[str, Any], kind: str) -> list[tuple[str, tuple[int, int], bool]]:
    """Of the products of router and experts of a layer; none has a bias."""
    number = fields["num_local_experts" if kind == "mixtral" else "num_experts"]
    width, inner = fields["hidden_size"], fields.get("moe_intermediate_size", fields["intermediate_size"])
    module = "block_sparse_moe" if kind == "mixtral" else "mlp"
    names = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    shapes = ((inner, width), (inner, width), (width, inner))
    found = [(f"{module}.gate", (number, width), False)]
    for expert in range(number):
        found += [
            (f"{module}.experts.{expert}.{name}", shape, False) for name, shape in zip(names, shapes, strict=True)
        ]
    if kind in QWEN_HYBRIDS:
        inner = fields["shared_expert_intermediate_size"]
        shared = zip(names, ((inner, width), (inner, width), (width, inner)), strict=True)
        found += [(f"mlp.shared_expert.{name}", shape, False) for name, shape in shared]
        found.append(("mlp.shared_expert_gate", (1, width), False))
    return found


def write_model(
    folder: Path,
    kind: str,
    tensors: dict[str, np.ndarray] | None = None,
    *,
    head: str = "pretraining",
    without: Iterable[str] = (),
    **settings: Any,
) -> Path:
    """A folder with config.json and model.safetensors; `settings` are fields of config.json, `without` names some that
    it lacks."""
    fields = {"model_type": kind, "architectures": [class_of(kind, head)]} | SETTINGS[kind] | settings
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({n: value for n, value in fields.items() if n not in without}))
    save_file(random_tensors(kind, head=head) if tensors is None else tensors, folder / "model.safetensors")
    return folder


def refusal(folder: Path, **overrides: Any) -> str:
    """The one line that an import of the folder ends with."""
    return user_error(open_source, folder, overrides)


def tensors_in(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of all its safetensors files."""
    found: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            assert file.metadata() == {"format": "pt"}
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
    return found


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Tensors are the same, bit for bit."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape), name
        assert tensor.tobytes() == expected[name].tobytes(), name


def peer_model(name: str, **settings: Any) -> Any:
    """A model of a class of `transformers` whose random weights all matter and of which nothing is dropped; `settings`
    are fields of its configuration."""
    import torch
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, name)
    of_kind = _GPT2 if name.startswith("GPT2") else _BERT if "Bert" in name else {"pad_token_id": None}
    settings = {field: value for field, value in of_kind.items() if not value} | settings
    settings |= {"experts_implementation": "eager"} if "num_experts_per_tok" in settings else {}  # can do fp64
    peer = kind(kind.config_class(initializer_range=0.2, attn_implementation="eager", **settings))
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for buffer in (buffer for name, buffer in peer.named_buffers() if name.endswith("e_score_correction_bias")):
            buffer.add_(0.1 * torch.randn_like(buffer))
    return peer.eval()

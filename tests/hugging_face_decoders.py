"""Small Llamas, Qwens and Mistrals in Hugging Face's format: written by hand, or by transformers."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from hugging_face import write_folder

KINDS = {  # model_type -> class
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}
SETTINGS = {  # six heads of queries, two of keys and values
    "vocab_size": 101,
    "max_position_embeddings": 24,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def decoder_tensors(kind: str, dtype: Any = np.float32, **settings: Any) -> dict[str, np.ndarray]:
    """Every tensor of a model; `settings` are fields of config.json beside or instead of `SETTINGS`."""
    fields = SETTINGS | settings
    width, inner, size = fields["hidden_size"], fields["intermediate_size"], fields["head_dim"]
    queries, keys = (fields[f"num_{name}_heads"] * size for name in ("attention", "key_value"))
    everywhere = bool(fields.get("attention_bias"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (fields["vocab_size"], width)}
    shapes["model.norm.weight"] = (width,)
    if not fields.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    for layer in range(fields["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        for name in "input_layernorm", "post_attention_layernorm":
            shapes[f"{start}{name}.weight"] = (width,)
        if kind == "qwen3":
            shapes |= {f"{start}self_attn.{name}_norm.weight": (size,) for name in "qk"}
        for name, shape, bias in (
            ("self_attn.q_proj", (queries, width), everywhere or kind == "qwen2"),
            ("self_attn.k_proj", (keys, width), everywhere or kind == "qwen2"),
            ("self_attn.v_proj", (keys, width), everywhere or kind == "qwen2"),
            ("self_attn.o_proj", (width, queries), everywhere),
            ("mlp.gate_proj", (inner, width), everywhere),
            ("mlp.up_proj", (inner, width), everywhere),
            ("mlp.down_proj", (width, inner), everywhere),
        ):
            shapes[f"{start}{name}.weight"] = shape
            if bias:
                shapes[f"{start}{name}.bias"] = shape[:1]
    rng = np.random.default_rng(0)
    return {name: rng.normal(0, 0.2, shape).astype(dtype) for name, shape in shapes.items()}


def write_decoder(
    folder: Path,
    kind: str = "llama",
    tensors: dict[str, np.ndarray] | None = None,
    *,
    without: Iterable[str] = (),
    **settings: Any,
) -> Path:
    """A folder with config.json and model.safetensors; `settings` are fields of config.json, `without` names some that
    it lacks."""
    fields = {"model_type": kind, "architectures": [KINDS.get(kind)]} | SETTINGS | settings
    return write_folder(folder, fields, decoder_tensors(kind) if tensors is None else tensors, without)


def peer_decoder(kind: str, **settings: Any) -> Any:
    """A model of `transformers` whose random weights all matter; `settings` are fields of its configuration."""
    import torch
    import transformers

    torch.manual_seed(0)
    name = KINDS[kind]
    config = getattr(transformers, name.replace("ForCausalLM", "Config"))(
        **settings, initializer_range=0.2, attn_implementation="eager", pad_token_id=None
    )
    peer = getattr(transformers, name)(config)
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return peer.eval()

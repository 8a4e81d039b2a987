"""Small GPT-2 models in Hugging Face's format: written by hand, or by transformers."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from megajax.models.config import ModelConfig

SETTINGS = {
    "model_type": "gpt2",
    "vocab_size": 101,
    "n_positions": 24,
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 4,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


def random_tensors(settings: dict[str, Any] = SETTINGS, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Every tensor of a model, without the prefix `transformer.`."""
    d, rng = settings["n_embd"], np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (settings["vocab_size"], d)}
    shapes |= {"wpe.weight": (settings["n_positions"], d), "ln_f.weight": (d,), "ln_f.bias": (d,)}
    for layer in range(settings["n_layer"]):
        for name, size in (("ln_1", d), ("ln_2", d), ("attn.c_attn", 3 * d), ("mlp.c_fc", 4 * d)):
            shapes[f"h.{layer}.{name}.weight"] = (d,) if "ln" in name else (d, size)
            shapes[f"h.{layer}.{name}.bias"] = (size,)
        for name, size in (("attn.c_proj", d), ("mlp.c_proj", 4 * d)):
            shapes |= {f"h.{layer}.{name}.weight": (size, d), f"h.{layer}.{name}.bias": (d,)}
    return {name: rng.normal(0, 0.2, shape).astype(dtype) for name, shape in shapes.items()}


def write_model(
    folder: Path,
    tensors: dict[str, np.ndarray] | None = None,
    *,
    prefix: str = "transformer.",
    without: Iterable[str] = (),
    **settings: Any,
) -> Path:
    """A folder with config.json and model.safetensors; `settings` are fields of config.json, `without` names some that
    it lacks."""
    tensors = random_tensors() if tensors is None else tensors
    named = {name if name.startswith("lm_head") else prefix + name: tensor for name, tensor in tensors.items()}
    return write_folder(folder, SETTINGS | settings, named, without)


def write_folder(
    folder: Path, fields: Mapping[str, Any], tensors: dict[str, np.ndarray], without: Iterable[str]
) -> Path:
    """config.json with these fields but those of the names `without`, and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({n: value for n, value in fields.items() if n not in without}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def peer_model(model: ModelConfig, **settings: Any) -> Any:
    """A GPT-2 of `transformers` with random weights of the size that makes differences visible; `settings` are further
    fields of config.json."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=model.vocab_size,
        n_positions=model.sequence_length,
        n_embd=model.hidden_size,
        n_layer=model.num_layers,
        n_head=model.num_heads,
        initializer_range=0.2,
        attn_implementation="eager",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **settings,
    )
    peer = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return peer

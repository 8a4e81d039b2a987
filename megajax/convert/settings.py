"""`config.json` of Hugging Face's GPT-2 as the configuration of a run, and back."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megajax import reading
from megajax.config import Config
from megajax.errors import UserError
from megajax.models.config import ModelConfig
from megajax.models.gpt2.model import LAYER_NORM_EPSILON
from megajax.options import options
from megajax.presets import resolve

_SIZES = {  # theirs -> ours
    "n_layer": "model.num_layers",
    "n_embd": "model.hidden_size",
    "n_head": "model.num_heads",
    "n_positions": "model.sequence_length",
    "vocab_size": "model.vocab_size",
}
_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_FIXED = {  # what our model is; also the defaults of GPT2Config, so a field may be missing
    "activation_function": "gelu_new",
    "layer_norm_epsilon": LAYER_NORM_EPSILON,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "tie_word_embeddings": True,
    "add_cross_attention": False,
}
_RECIPE = {  # for training further: a low learning rate does not undo what the model has learned
    "train.steps": 1000,
    "train.global_batch": 8,
    "train.microbatch": 1,
    "train.eval_batches": 20,
    "train.remat": "selective",
    "optimizer.learning_rate": 5e-5,
    "optimizer.warmup_steps": 100,
    "optimizer.decay_steps": 1000,
    "checkpoint.every": 100,
}


def read_settings(folder: Path, overrides: Mapping[str, Any]) -> Config:
    """The configuration of a run that trains the model of `folder/config.json` further.

    Args:
        folder: of the model.
        overrides: values by key that replace those of the model and of the recipe.

    Raises:
        UserError: it is not the GPT-2 that our model is.
    """
    file = folder / "config.json"
    if not reading.is_file(file):
        raise UserError(f"{folder}: no config.json there; valid: a folder that save_pretrained of transformers wrote")
    fields = reading.read_json(file)
    if not isinstance(fields, dict):
        raise UserError(f"{file}: not a JSON object; valid: the configuration of a GPT-2")
    _check(file, "model_type", fields.get("model_type"), "gpt2")
    for name, value in _FIXED.items():
        _check(file, name, fields.get(name, value), value)
    sizes = {}
    for name, key in _SIZES.items():
        sizes[key] = size = fields.get(name)
        option = options(Config)[key]
        if type(size) is not int or option.problem(size):
            raise UserError(f"{file}: {name} is {json.dumps(size)}; valid: {option.valid}")
    hidden, heads = fields["n_embd"], fields["n_head"]
    if hidden % heads:
        raise UserError(f"{file}: n_embd {hidden} is not divisible by n_head {heads}; valid: a multiple of it")
    inner = fields.get("n_inner")
    if inner not in (None, 4 * hidden):
        raise UserError(f"{file}: n_inner is {json.dumps(inner)}; valid: null, or {4 * hidden} (4 x n_embd)")
    dropout = {} if "model.dropout" in overrides else {"model.dropout": _dropout(file, fields)}
    std = fields.get("initializer_range", 0.02)
    init_std = {"model.init_std": std} if type(std) is float and std > 0 else {}  # weights that exist do not need it
    return resolve(_RECIPE | sizes | dropout | init_std, overrides)


def _dropout(file: Path, fields: Mapping[str, Any]) -> float:
    rates = [fields.get(name, 0.1) for name in _DROPOUT]
    for name, rate in zip(_DROPOUT, rates, strict=True):
        if type(rate) not in (int, float) or not 0 <= rate < 1:
            raise UserError(f"{file}: {name} is {json.dumps(rate)}; valid: 0 or more and less than 1")
    if len(set(rates)) > 1:
        told = ", ".join(f"{name} {rate}" for name, rate in zip(_DROPOUT, rates, strict=True))
        raise UserError(f"{file}: {told}; valid: all the same, or --model.dropout X")
    return rates[0]


def _check(file: Path, name: str, value: object, valid: object) -> None:
    if value != valid:
        raise UserError(f"{file}: {name} is {json.dumps(value)}; valid: {json.dumps(valid)}")


def to_settings(model: ModelConfig, end_of_text: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of `config.json` and `generation_config.json`.

    Args:
        model: whose they are.
        end_of_text: the id in its tokenizer, if it has one.
    """
    special = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    sizes = {
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_head": model.num_heads,
        "n_positions": model.sequence_length,
        "vocab_size": model.vocab_size,
        "n_inner": None,
    }
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "dtype": "float32", **sizes, **_FIXED}
    config |= dict.fromkeys(_DROPOUT, model.dropout) | {"initializer_range": model.init_std, "use_cache": True}
    return config | special, {"_from_model_config": True, **special}

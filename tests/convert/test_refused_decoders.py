"""What is no Llama, Qwen or Mistral like ours is refused in one line that names file and field, or option."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hugging_face_decoders import KINDS, decoder_tensors, write_decoder
from refusals import refusal
from tiny import tiny_config

from megajax.cli import main
from megajax.config import to_toml
from megajax.convert.exporting import export_config, export_hf
from megajax.convert.importing import import_hf, open_source
from megajax.errors import UserError

TIED = {"tie_word_embeddings": True}
LLAMA3 = {"factor": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((kind, {"model_type": kind}, r'model_type is .*valid: "gpt2", "llama", "mistral", "qwen2", "qwen3"')
      for kind in ("gemma", "phi3", "mixtral", "qwen3_moe", "llama4", "mistral3")),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, r'valid: \["LlamaForCausalLM"\]'),
    ("qwen2", {"architectures": ["LlamaForCausalLM"]}, r'valid: \["Qwen2ForCausalLM"\]'),
    ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config is .*valid: null"),
    ("llama", {"num_key_value_heads": 4}, "num_key_value_heads is 4; valid: a divisor of num_attention_heads, 6"),
    ("llama", {"num_key_value_heads": 0}, "num_key_value_heads is 0; valid: more than 0"),
    ("llama", {"hidden_size": 26}, "hidden_size 26 is not divisible by num_attention_heads 6"),
    ("llama", {"hidden_size": 18, "head_dim": None}, "head_dim is 3; valid: an even number"),
    ("qwen3", {"head_dim": 7}, "head_dim is 7; valid: an even number"),
    ("llama", {"intermediate_size": 40.0}, "intermediate_size is 40.0; valid: a whole number"),
    ("llama", {"hidden_act": "gelu"}, 'hidden_act is "gelu"; valid: "silu"'),
    ("llama", {"attention_bias": True}, "mlp_bias is false; valid: as attention_bias, true"),
    ("llama", {"mlp_bias": True}, "mlp_bias is true; valid: as attention_bias, false"),
    ("qwen3", {"attention_bias": True}, "attention_bias is true; valid: false"),
    ("mistral", {"mlp_bias": True}, "mlp_bias is true; valid: false"),
    ("llama", {"tie_word_embeddings": None}, "tie_word_embeddings is null; valid: true or false"),
    ("llama", {"rms_norm_eps": 0}, "rms_norm_eps is 0; valid: more than 0"),
    ("llama", {"attention_dropout": 0.1}, r"attention_dropout is 0.1; valid: 0, or --model\.dropout"),
    ("llama", {"sliding_window": 5}, "sliding_window is 5; valid: null"),
    ("mistral", {"sliding_window": 0}, "sliding_window is 0; valid: null, or a whole number above 0"),
    ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types is .*valid: sliding_attention 2 times"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, "max_window_layers is 1; valid: 0, all .* 2 and"),
    (
        "qwen3",
        {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
        "layer_types is .*valid: full_attention 2 times or sliding_attention 2 times: the same in all layers",
    ),
    ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "layer_types is .*valid: full_attention 2 times"),
    ("llama", {"rope_scaling": {"type": "yarn"}}, r'rope_scaling\.type is "yarn"; valid: "default", "linear", "llama3'),
    ("llama", {"rope_parameters": {"rope_type": "longrope"}}, r'rope_parameters\.rope_type is "longrope"; valid: "def'),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling\.factor is null; valid: a finite number"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, r"factor is 0\.5; valid: .*1 to"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4}}, "valid: more than low_freq"),
    ("llama", {"rope_scaling": "linear"}, 'rope_scaling is "linear"; valid: null, or an object'),
    ("llama", {"rope_parameters": {"full_attention": {}}}, r"rope_parameters\.full_attention is .*valid: without it"),
    ("llama", {"rope_theta": "1e4"}, "rope_theta is .*valid: a finite number"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; valid: 1"),
    ("llama", {"is_causal": False}, "is_causal is false; valid: true"),
    ("llama", {"num_hidden_layers": 3}, r"model\.layers\.2\..* missing from the safetensors; valid: all of a Llama"),
    ("llama", TIED, "lm_head.weight differs from model.embed_tokens.weight"),
    ("llama", {"eos_token_id": "2"}, 'eos_token_id is "2"; valid: null, an id, or several'),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "settings", "words"), REFUSED)
def test_refused(kind: str, settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    """One line that names the file, the field and what would be valid."""
    known = kind if kind in KINDS else "llama"
    line = refusal(write_decoder(tmp_path, known, decoder_tensors(known), **settings))
    assert re.search(words, line) and str(tmp_path) in line, line


@pytest.mark.parametrize("value", [np.nan, pytest.param(-np.inf, marks=pytest.mark.full)])
def test_numbers_that_are_none(value: float, tmp_path: Path) -> None:
    """Found when they are read, which is in another thread; nothing stays."""
    tensors = decoder_tensors("llama")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    source = open_source(write_decoder(tmp_path / "hf", "llama", tensors))
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight has values that are NaN or inf.*valid"):
        import_hf(source, tmp_path / "some" / "run")
    assert [entry.name for entry in tmp_path.iterdir()] == ["hf"]


def test_numbers_that_the_dtype_has_not(tmp_path: Path) -> None:
    """fp16 ends at 65504; nothing stays."""
    tensors = decoder_tensors("llama")
    tensors["model.norm.weight"][0] = 7e4
    import_hf(open_source(write_decoder(tmp_path / "hf", "llama", tensors)), tmp_path / "run")
    with pytest.raises(UserError, match=r"--dtype fp16: model\.norm\.weight has numbers beyond 65504; valid: bf16 or"):
        export_hf(tmp_path / "run", export_config(tmp_path / "run"), tmp_path / "back", dtype="fp16")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hf", "run"]


def test_flags(tmp_path: Path) -> None:
    for arguments, words in (
        (["export-hf", "a", "b", "--dtype", "fp8"], "--dtype 'fp8'; valid: fp32, bf16, fp16"),
        (["import-hf", "a", "b", "--model.sequence-length", "0"], "--model.sequence-length .*valid: .*1 to"),
    ):
        with pytest.raises(UserError, match=words) as error:
            main(["convert", *arguments])
        assert "\n" not in str(error.value)


def test_lengths(tmp_path: Path) -> None:
    """Rotary positions may be fewer than there, not more."""
    write_decoder(tmp_path)
    line = refusal(tmp_path, **{"model.sequence_length": 25})
    assert f"--model.sequence-length 25 with {tmp_path}; valid: 24 or less" in line


_SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 24, "num_heads": 6, "sequence_length": 8, "vocab_size": 9}
_ROTARY = {"norm": "rmsnorm", "positions": "rotary", "activation": "swiglu", "bias": "none"}


@pytest.mark.parametrize(
    ("options", "told", "valid"),
    [
        (_ROTARY | {"activation": "gelu"}, "--model.activation gelu", "--model.activation swiglu (LlamaForCausalLM)"),
        ({"sliding_window": 4}, "--model.sliding-window 4", "--model.sliding-window 0 (GPT2LMHeadModel)"),
        (
            _ROTARY | {"query_key_norm": True, "bias": "query-key-value"},
            "--model.query-key-norm and --model.bias query-key-value",
            "--no-model.query-key-norm (Qwen2ForCausalLM) or --model.bias none (Qwen3ForCausalLM)",
        ),
    ],
)
def test_a_model_of_no_class(options: dict[str, Any], told: str, valid: str, tmp_path: Path) -> None:
    """Refused before anything is read, with what the nearest classes would take."""
    (tmp_path / "config.toml").write_text(to_toml(tiny_config(**_SMALL | options)))
    with pytest.raises(UserError) as error:
        export_config(tmp_path)
    assert told in str(error.value) and f"valid: {valid}" in str(error.value)


def test_what_was_kept_of_the_import_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(to_toml(tiny_config()))
    for content in "{", "[]", '{"dtype": "fp32"}', '{"architecture": "", "dtype": "x", "length": 0, "tokens": {}}':
        (tmp_path / "imported.json").write_text(content)
        with pytest.raises(UserError, match=r"imported\.json: (damaged|not JSON).*valid"):
            export_config(tmp_path)

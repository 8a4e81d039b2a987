"""Llama, Qwen and Mistral: every field of config.json that changes the numbers, where the weights are, and what comes
out again."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from canonical_weights import from_tensors
from hugging_face_decoders import KINDS, SETTINGS, decoder_tensors, write_decoder
from refusals import refusal
from safetensors import safe_open

from megajax.convert.exporting import export_config, export_hf
from megajax.convert.families import exchange_for
from megajax.convert.importing import import_hf, open_source
from megajax.convert.weights import to_tensors
from megajax.models.config import ModelConfig
from megajax.settings.presets import load_preset, resolve

BIASES = {"attention_bias": True, "mlp_bias": True}
TIED = {"tie_word_embeddings": True}
LLAMA3 = {"factor": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def tensors_in(folder: Path) -> dict[str, np.ndarray]:
    """Of all its safetensors files."""
    found: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            assert file.metadata() == {"format": "pt"}
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
    return found


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Bit for bit."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape), name
        assert tensor.tobytes() == expected[name].tobytes(), name


_full = pytest.mark.full
_OUT_AND_IN = [
    ("llama", ml_dtypes.bfloat16, {}),
    pytest.param("qwen3", np.float16, TIED, marks=_full),
    pytest.param("llama", np.float32, BIASES | TIED, marks=_full),
    pytest.param("qwen2", ml_dtypes.bfloat16, TIED, marks=_full),
    pytest.param("mistral", np.float16, {"sliding_window": 5}, marks=_full),
]


@pytest.mark.parametrize(("kind", "dtype", "settings"), _OUT_AND_IN)
def test_import_then_export(kind: str, dtype: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    """In several files: the identical tensors, the class, the settings, and what ends a generation."""
    tensors = decoder_tensors(kind, dtype, **settings)
    ids = {"bos_token_id": 1, "eos_token_id": [2, 7]}
    folder = write_decoder(tmp_path / "hf", kind, tensors, **settings, **ids)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7], "temperature": 0.6}))
    import_hf(open_source(folder, {"model.sequence_length": 16}), tmp_path / "run")
    run, back = tmp_path / "run", tmp_path / "back"
    assert resolve(load_preset(run / "config.toml")).model.sequence_length == 16
    export_hf(run, export_config(run), back, shard_bytes=9000)
    assert_same(tensors_in(back), tensors)
    fields = json.loads((back / "config.json").read_text())
    assert fields.items() >= (SETTINGS | settings | ids).items() and fields["architectures"] == [KINDS[kind]]
    name = {np.float32: "float32", np.float16: "float16"}.get(dtype, "bfloat16")
    assert fields["dtype"] == name and fields["max_position_embeddings"] == 24
    assert json.loads((back / "generation_config.json").read_text())["temperature"] == 0.6
    index = json.loads((back / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in back.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files and len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors" and index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    again = open_source(back)
    assert again.config.model == dataclasses.replace(open_source(folder).config.model)
    assert again.origin == open_source(folder).origin


@pytest.mark.parametrize("kind", KINDS)
def test_where_the_weights_are(kind: str, tmp_path: Path) -> None:
    """Turned to [in, out], the heads in their order; every tensor once."""
    theirs = decoder_tensors(kind)
    source = open_source(write_decoder(tmp_path, kind, theirs))
    model, ours = source.config.model, source.weights.canonical(0)
    block, start = ours["blocks"], "model.layers.1."
    for name, heads in (("query", 6), ("key", 2), ("value", 2)):
        weight_QD = theirs[f"{start}self_attn.{name[0]}_proj.weight"]
        expected = weight_QD.reshape(heads, 8, 24).transpose(2, 0, 1)
        np.testing.assert_array_equal(block["attention"][name]["weight"][1], expected, err_msg=name)
        if kind == "qwen2":
            bias_Q = theirs[f"{start}self_attn.{name[0]}_proj.bias"]
            np.testing.assert_array_equal(block["attention"][name]["bias"][1], bias_Q.reshape(heads, 8))
    output_DQ = theirs[f"{start}self_attn.o_proj.weight"]
    np.testing.assert_array_equal(block["attention"]["output"]["weight"][1].reshape(48, 24), output_DQ.T)
    for name in "gate", "up", "down":
        np.testing.assert_array_equal(block["mlp"][name]["weight"][1], theirs[f"{start}mlp.{name}_proj.weight"].T)
    if kind == "qwen3":
        for name in "query", "key":
            scale_K = theirs[f"{start}self_attn.{name[0]}_norm.weight"]
            np.testing.assert_array_equal(block["attention"][f"{name}_norm"]["scale"][1], scale_K)
    for ours_name, name in (("attention_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")):
        np.testing.assert_array_equal(block[ours_name]["scale"][1], theirs[f"{start}{name}.weight"])
    for ours_name, name in (("table", "model.embed_tokens"), ("output", "lm_head")):
        np.testing.assert_array_equal(ours["shared"][ours_name][:101], theirs[f"{name}.weight"])
        assert not ours["shared"][ours_name][101:].any()
    places = source.exchange.places(model)
    assert_same(to_tensors(places, ours, model), theirs)
    assert_same(to_tensors(places, from_tensors(places, theirs.__getitem__, model), model), theirs)


READ: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {}, {"bias": "none", "norm_epsilon": 1e-6, "rope_theta": 1e4, "sliding_window": 0, "dropout": 0.0}),
    ("llama", {"rms_norm_eps": 1e-5, **TIED}, {"norm_epsilon": 1e-5, "tied_embedding": True}),
    ("llama", BIASES, {"bias": "all"}),
    ("llama", {"head_dim": 4}, {"head_size": 4}),
    ("llama", {"head_dim": None, "num_key_value_heads": None}, {"head_size": 4, "num_kv_heads": 6}),
    ("llama", {"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scaling": "none"}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 7}, "rope_theta": 8}, {"rope_theta": 7.0}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2}}, {"rope_scaling": "linear", "rope_factor": 2.0}),
    (
        "mistral",
        {"rope_parameters": {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 9}},
        {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_high_frequency": 4.0, "rope_original_length": 9},
    ),
    ("llama", {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, {"rope_original_length": 24}),
    ("mistral", {}, {"sliding_window": 4096, "bias": "none"}),
    ("mistral", {"sliding_window": None}, {"sliding_window": 0}),
    ("mistral", {"sliding_window": 5, "layer_types": ["sliding_attention"] * 2}, {"sliding_window": 5}),
    ("qwen2", {"sliding_window": 5}, {"sliding_window": 0, "bias": "query-key-value", "query_key_norm": False}),
    ("qwen2", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0}, {"sliding_window": 5}),
    ("qwen2", {"sliding_window": 5, "use_sliding_window": True}, {"sliding_window": 0}),  # from layer 28 on
    ("qwen3", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 2}, {"sliding_window": 0}),
    (
        "qwen3",
        {"sliding_window": 5, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2},
        {"sliding_window": 5, "query_key_norm": True, "bias": "none"},
    ),
    ("qwen3", {"layer_types": ["full_attention"] * 2, "pretraining_tp": 2}, {"sliding_window": 0}),
]


@pytest.mark.parametrize(("kind", "settings", "expected"), READ)
def test_settings(kind: str, settings: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    """As transformers understands them, also where they are missing; what is written is read as the same."""
    sizes = {
        "num_key_value_heads": settings.get("num_key_value_heads", 2) or 6,
        "head_dim": settings.get("head_dim", 8) or 4,
    }
    tensors = decoder_tensors(kind, **settings | sizes)
    source = open_source(write_decoder(tmp_path, kind, tensors, **settings))
    model = source.config.model
    assert {name: getattr(model, name) for name in expected} == expected
    assert source.exchange.lacks(model) == {} and source.exchange.architecture(model) == KINDS[kind]
    fields = source.exchange.settings(model, (), None)["config.json"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert open_source(tmp_path).config == source.config


def test_what_older_files_have_and_lack(tmp_path: Path) -> None:
    """Angles beside the weights, a tied head once more, fields that were not known yet."""
    tensors = decoder_tensors("llama", **TIED)
    tensors |= {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for n in range(2)}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    write_decoder(tmp_path, "llama", tensors, without=["architectures"], **TIED)
    assert open_source(tmp_path).config.model.tied_embedding
    lengths = {"num_key_value_heads": 6}
    write_decoder(tmp_path, "llama", decoder_tensors("llama", **lengths), without=["num_key_value_heads"])
    assert open_source(tmp_path).config.model.num_kv_heads == 6
    write_decoder(tmp_path, "qwen3", without=["head_dim"])
    assert "valid: [768, 24], by config.json" in refusal(tmp_path)  # 128, as Qwen3 has it


_SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 24, "num_heads": 6, "sequence_length": 8, "vocab_size": 9}
_ROTARY = {"norm": "rmsnorm", "positions": "rotary", "activation": "swiglu", "bias": "none"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "GPT2LMHeadModel"),
        ({"mlp_size": 10, "tied_embedding": False, "norm_epsilon": 1e-3}, "GPT2LMHeadModel"),
        ({"rope_theta": 5e5, "num_kv_heads": 2}, "LlamaForCausalLM"),
        ({"num_kv_heads": 2, "bias": "all"}, "LlamaForCausalLM"),
        ({"sliding_window": 7}, "MistralForCausalLM"),
        ({"hidden_size": 25, "head_size": 8}, "MistralForCausalLM"),
        ({"bias": "query-key-value", "sliding_window": 7}, "Qwen2ForCausalLM"),
        ({"query_key_norm": True}, "Qwen3ForCausalLM"),
    ],
)
def test_the_class_of_a_model(options: dict[str, Any], expected: str) -> None:
    """By its options, unless it came from another that can hold it."""
    rotary = {} if expected.startswith("GPT") else _ROTARY
    model = ModelConfig(**_SMALL | rotary | options)
    assert exchange_for(model, "", "RUN x").architecture(model) == expected
    if expected == "LlamaForCausalLM":
        came_from = "LlamaForCausalLM" if model.bias == "all" else "MistralForCausalLM"
        assert exchange_for(model, "MistralForCausalLM", "RUN x").architecture(model) == came_from

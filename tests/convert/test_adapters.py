"""Adapters of `peft` that an import merges, written by hand; and names of tensors as others write them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hugging_face import random_tensors, refusal, write_model
from safetensors.numpy import save_file
from tiny import user_error

from megajax.__main__ import main
from megajax.convert.exporting import export_config, export_hf
from megajax.convert.importing import import_hf, open_source
from megajax.host import limited

Q, EMBEDDING = "model.layers.1.self_attn.q_proj", "model.embed_tokens"
RNG = np.random.default_rng(0)


def drawn(*shape: int) -> np.ndarray:
    return RNG.normal(0, 0.1, shape).astype(np.float32)


PAIR = {f"{Q}.lora_A.weight": drawn(2, 24), f"{Q}.lora_B.weight": drawn(48, 2)}


def write_adapter(folder: Path, tensors: Mapping[str, np.ndarray], **options: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "base_model_name_or_path": "some/model"} | options
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    named = {f"base_model.model.{name}": np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    return folder


def test_merged_beside_the_model_or_from_a_folder(tmp_path: Path) -> None:
    tensors = random_tensors("llama")
    a, b = PAIR.values()
    expected = tensors[f"{Q}.weight"] + 3 * b @ a
    write_model(tmp_path / "base", "llama", tensors)
    write_model(tmp_path / "both", "llama", tensors)
    write_adapter(tmp_path / "both", PAIR, target_modules=["q_proj"])
    apart = write_adapter(tmp_path / "apart", PAIR, target_modules=["q_proj"])
    for folder, given in ((tmp_path / "both", None), (tmp_path / "base", apart)):
        weights = open_source(folder, None, given).weights
        np.testing.assert_allclose(weights.read(f"{Q}.weight"), expected, rtol=0, atol=1e-6)
        other = "model.layers.0.self_attn.q_proj.weight"
        assert np.array_equal(weights.read(other), tensors[other])
    line = user_error(open_source, tmp_path / "both", None, apart)
    assert f"--adapter {apart}: PATH {tmp_path / 'both'} holds an adapter too; valid: one adapter" in line
    line = refusal(apart)
    assert f"PATH {apart} holds only an adapter, not its base model, some/model; valid: the base model, with" in line
    assert "no adapter_config.json found" in user_error(open_source, tmp_path / "base", None, tmp_path / "base")


def test_an_embedding_that_is_no_longer_tied(tmp_path: Path) -> None:
    """The head keeps the base model's; replaced tokens alone stay tied."""
    tied = {"tie_word_embeddings": True}
    tensors, table = random_tensors("llama", **tied), drawn(101, 24)
    write_model(tmp_path, "llama", tensors, **tied)
    both = {f"{EMBEDDING}.weight": table, "lm_head.weight": table + 1}
    write_adapter(tmp_path, both, modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    assert f"holds base_model.model.lm_head.weight; valid: the same as of {EMBEDDING}, by ensure" in refusal(tmp_path)
    write_adapter(tmp_path, {f"{EMBEDDING}.weight": table}, modules_to_save=["embed_tokens"])
    source = open_source(tmp_path)
    assert not source.config.model.tied_embedding
    assert np.array_equal(source.weights.read(f"{EMBEDDING}.weight"), table)
    assert np.array_equal(source.weights.read("lm_head.weight"), tensors[f"{EMBEDDING}.weight"])
    tokens = {f"{EMBEDDING}.token_adapter.trainable_tokens_delta": table[:2]}
    write_adapter(tmp_path, tokens, trainable_token_indices=[7, 100])
    source = open_source(tmp_path)
    assert source.config.model.tied_embedding
    assert np.array_equal(source.weights.read(f"{EMBEDDING}.weight")[[100, 7]], table[[1, 0]])


@pytest.mark.parametrize(
    ("tensors", "options", "words"),
    [
        (PAIR, {"peft_type": "IA3"}, 'adapter_config.json: peft_type is "IA3"; valid: "LORA"'),
        (PAIR, {"init_lora_weights": "pissa"}, 'init_lora_weights is "pissa"; valid: true, false, "gaussian"'),
        (PAIR, {"alora_invocation_tokens": [1]}, "alora_invocation_tokens is [1]; valid: null or false"),
        (PAIR, {"use_dora": True, "lora_bias": True}, "lora_bias is true; valid: false"),
        (PAIR, {"use_dora": True}, f"{Q}.lora_magnitude_vector missing from the safetensors; valid: all of an adapter"),
        (PAIR, {"r": 0}, "r is 0; valid: a whole number above 0"),
        (PAIR, {"rank_pattern": {"q_proj": 4}}, "has shape [2, 24]; valid: [4, 24], by adapter_config.json"),
        (PAIR, {"alpha_pattern": {"q_proj": "2"}}, 'alpha_pattern.q_proj is "2"; valid: a finite number'),
        (PAIR, {"target_modules": "q_proj("}, 'target_modules is "q_proj("; valid: regular expressions (missing )'),
        (PAIR, {"layers_to_transform": "1"}, 'layers_to_transform is "1"; valid: null, or numbers of layers'),
        ({f"{Q}.lora_A.weight": drawn(2, 24)}, {}, f"{Q}.lora_B.weight missing from the safetensors; valid: all of an"),
        (PAIR | {f"{Q}.lora_B.bias": drawn(48)}, {"lora_bias": True}, f"holds base_model.model.{Q}.lora_B.bias; valid"),
        (PAIR, {"layers_to_transform": [0], "target_modules": ["q_proj"]}, f"holds base_model.model.{Q}.lora_A.weight"),
        (PAIR, {"target_parameters": ["gate_up_proj"]}, "lora_A.weight; valid: only what adapter_config.json selects"),
        (PAIR | {f"{Q}.lora_B.bias": drawn(48)}, {}, f"{Q}.lora_B.bias; valid: lora_bias true in adapter_config.json"),
        ({}, {}, "adapter_model.safetensors: holds no tensors of an adapter; valid: those that peft writes"),
        (PAIR, {"layers_pattern": "[", "layers_to_transform": 1, "target_modules": ["q_proj"]}, 'pattern is "["; vali'),
        (PAIR, {"target_modules": r"(.*)*\.x"}, "json: matching names with its regular expressions takes more than"),
        ({"model.layers.2.mlp.up_proj.weight": drawn(2)}, {}, "holds base_model.model.model.layers.2.mlp.up_proj.w"),
        ({f"{EMBEDDING}.token_adapter.trainable_tokens_delta": drawn(1, 24)}, {"trainable_token_indices": [101]},
         f"trainable_token_indices is [101]; valid: the ids of the tokens that {EMBEDDING} replaces"),
    ],
)  # fmt: skip
def test_refused(tensors: Mapping[str, np.ndarray], options: dict[str, Any], words: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(limited, "SECONDS", 0.5)
    write_adapter(write_model(tmp_path, "llama"), tensors, **options)
    assert words in refusal(tmp_path)


def test_a_pickle_or_nothing(tmp_path: Path) -> None:
    (write_adapter(write_model(tmp_path, "llama"), PAIR) / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors: No such file or directory" in refusal(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    assert "adapter_model.bin: pickle files can run code" in refusal(tmp_path)


def test_what_is_exported_again_has_it(tmp_path: Path) -> None:
    base, adapter = write_model(tmp_path / "base", "llama"), write_adapter(tmp_path / "adapter", PAIR)
    source = open_source(base, None, adapter)
    assert source.adapter == adapter
    import_hf(source, tmp_path / "run")
    export_hf(tmp_path / "run", export_config(tmp_path / "run"), tmp_path / "back")
    merged, plain = (open_source(folder).weights.read(f"{Q}.weight") for folder in (tmp_path / "back", base))
    a, b = PAIR.values()
    np.testing.assert_allclose(merged, plain + 3 * b @ a, rtol=0, atol=1e-6)
    line = user_error(main, ["convert", "import-hf", str(base), str(tmp_path / "new"), "--adapter", "no/such/place"])
    assert "--adapter no/such/place: no such folder" in line


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_prefixes_of_wrappers(prefix: str, tmp_path: Path) -> None:
    plain = random_tensors("gpt2")
    weights = open_source(write_model(tmp_path, "gpt2", {prefix + name: each for name, each in plain.items()})).weights
    for name, tensor in plain.items():
        assert np.array_equal(weights.read(name), tensor)


@pytest.mark.parametrize(
    ("kind", "tensors", "words"),
    [
        ("llama", {f"base_model.model.{name}": each for name, each in PAIR.items()}, "look like a peft model whose"),
        ("llama", {"layers.0.attention.wq.weight": drawn(2)}, "which look like the own format of Meta or Mistral;"),
        ("llama", {"model.layers.0.mlp.up_proj.qweight": drawn(2)}, "which look like quantized weights; valid"),
        ("llama", random_tensors("llama") | {"v_head.summary.weight": drawn(2)}, "a model with the value head of TRL"),
        ("llama", {"something.weight": drawn(2)}, "missing from the safetensors; valid: all of a Llama"),
    ],
)
def test_what_other_tensors_probably_are(kind: str, tensors: dict[str, np.ndarray], words: str, tmp_path: Path) -> None:
    assert words in refusal(write_model(tmp_path, kind, tensors))

"""Files that are damaged or are not a model's are refused in one line, by commands, too, and nothing is left behind."""

import fnmatch
import json
import pickle
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hugging_face import ROTARY, SMALL, random_tensors, refusal, write_model
from tiny import full, tiny_config, user_error

from megajax.__main__ import main
from megajax.convert.exporting import export_config, export_hf
from megajax.convert.importing import import_hf, local_folder, open_source
from megajax.convert.tensor_files import WEIGHTS
from megajax.core.errors import UserError
from megajax.core.models.registry import FAMILIES, FamilyEntry
from megajax.settings.config import to_toml

GPT2, BERT, PRE = (random_tensors(kind) for kind in ("gpt2", "bert", "megatron-bert"))
HEADS = {head: random_tensors("megatron-bert", head=head) for head in ("classes", "span", "choice")}
TABLE, BIAS = BERT["bert.embeddings.word_embeddings.weight"], BERT["cls.predictions.bias"]
NORM, ATTENTION = GPT2["transformer.ln_f.bias"], "transformer.h.0.attn.c_attn.weight"
OUTPUT = "bert.encoder.layer.0.output.dense.weight"
Tensors = Mapping[str, np.ndarray]


def without(tensors: Tensors, *words: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not any(word in name for word in words)}


@pytest.mark.parametrize(
    ("kind", "tensors", "words"),
    [
        ("gpt2", without(GPT2, "h.1.mlp.c_fc.bias"), r"transformer\.h\.1\.mlp\.c_fc\.bias missing"),
        ("gpt2", GPT2 | {ATTENTION: GPT2[ATTENTION].T.copy()}, r"c_attn\.weight has .* \[72, 24\]; valid: \[24, 72\]"),
        ("gpt2", GPT2 | {"transformer.ln_f.bias": NORM.astype(np.int32)}, "ln_f.bias has dtype I32; valid: F32, F16"),
        ("gpt2", GPT2 | {"transformer.h.2.ln_1.bias": NORM}, r"holds transformer\.h\.2\.ln_1\.bias"),
        ("gpt2", GPT2 | {"lm_head.weight": 2 * GPT2["transformer.wte.weight"]}, "lm_head.weight differs"),
        ("gpt2", {"model.layers.0.input_layernorm.weight": NORM}, "and 25 more missing"),
        ("bert", without(BERT, "cls.seq_relationship.bias"), r"cls\.seq_relationship\.bias missing .*head of masked"),
        ("bert", BERT | {OUTPUT: BERT[OUTPUT].T.copy()}, r"dense\.weight has shape \[96, 24\]; valid: \[24, 96\]"),
        ("bert", BERT | {"classifier.weight": BIAS}, r"holds classifier\.weight; .*only what a BertForPreTraining has"),
        ("bert", BERT | {"cls.predictions.decoder.weight": 2 * TABLE}, r"decoder\.weight differs from bert\.embed"),
        ("bert", BERT | {"cls.predictions.decoder.bias": BIAS + 1}, r"decoder\.bias differs from cls\.predictions\.b"),
        ("bert", PRE, r"bert\.embeddings\.LayerNorm\.weight, .* and 7 more missing"),
        ("classes", HEADS["choice"], r"classifier\.weight has shape \[1, 24\]; valid: \[2, 24\], by config"),
        ("classes", HEADS["classes"] | {"cls.predictions.bias": BIAS}, r"holds cls\.predictions\.bias; valid"),
        ("span", HEADS["classes"], r"qa_outputs\.weight, qa_outputs\.bias missing .*all of a BERT with a head of sp"),
        ("choice", without(HEADS["choice"], "pooler"), r"pooler\.dense\.bias missing .*with a head of choices"),
    ],
)
def test_tensors(kind: str, tensors: dict[str, np.ndarray], words: str, tmp_path: Path) -> None:
    """Missing, of another shape or type, too many, of another head or layer order, a head of its own."""
    if kind in HEADS:
        write_model(tmp_path, "megatron-bert", tensors, head=kind)
    else:
        write_model(tmp_path, kind, tensors)
    assert re.search(words, refusal(tmp_path)), refusal(tmp_path)


def test_damaged_weights(tmp_path: Path) -> None:
    """Truncated at several places, or other bytes altogether."""
    file = write_model(tmp_path, "gpt2") / WEIGHTS
    whole = file.read_bytes()
    for damaged in (whole[:-5], whole[:1000], whole[:4], b"", whole[::-1]):
        file.write_bytes(damaged)
        assert re.match(rf"(.* )?{file}: .*safetensors", refusal(tmp_path))


class Alarm:
    """Its pickle runs code when it is loaded."""

    def __reduce__(self):
        return (sys.exit, ("a pickle was loaded",))


def test_pickles_are_not_read(tmp_path: Path) -> None:
    """Neither under its own name nor under that of a safetensors file; beside safetensors it does not matter."""
    write_model(tmp_path, "gpt2")
    pickled = pickle.dumps(Alarm())
    (tmp_path / "pytorch_model.bin").write_bytes(pickled)
    open_source(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(pickled)
    assert "valid: a complete safetensors file" in refusal(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    line = refusal(tmp_path)
    assert re.search(r"pytorch_model\.bin: pickle files can run code.*valid: model\.safetensors", line)
    (tmp_path / "pytorch_model.bin").unlink()
    assert "no weights found" in refusal(tmp_path)


@pytest.mark.parametrize("value", [np.nan, full(-np.inf)])
@pytest.mark.slow
def test_numbers_that_are_none(value: float, tmp_path: Path) -> None:
    """Found when they are read, which is in another thread; nothing stays."""
    tensors = random_tensors("llama")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    source = open_source(write_model(tmp_path / "hf", "llama", tensors))
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight has values that are NaN or inf.*valid"):
        import_hf(source, tmp_path / "some" / "run")
    assert [entry.name for entry in tmp_path.iterdir()] == ["hf"]


def test_numbers_that_the_dtype_has_not(tmp_path: Path) -> None:
    """fp16 ends at 65504; nothing stays."""
    tensors = random_tensors("llama")
    tensors["model.norm.weight"][0] = 7e4
    import_hf(open_source(write_model(tmp_path / "hf", "llama", tensors)), tmp_path / "run")
    with pytest.raises(UserError, match=r"--dtype fp16: model\.norm\.weight has numbers beyond 65504; valid: bf16 or"):
        export_hf(tmp_path / "run", export_config(tmp_path / "run"), tmp_path / "back", dtype="fp16")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hf", "run"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ROTARY | {"activation": "gelu"}, "valid: a run with --model.activation swiglu .LlamaForCausalLM or "),
        ({"sliding_window": 4}, "valid: a run with --model.sliding-window 0 .GPT2LMHeadModel.$"),
        (
            ROTARY | {"query_key_norm": True, "bias": "query-key-value"},
            "valid: a run with --no-model.query-key-norm .Qwen2ForCausalLM.$",
        ),
        ({"family": "tiny"}, "holds a model of the family tiny; valid: decoder, bert"),
    ],
)
def test_a_model_of_no_class(options: dict[str, Any], words: str, monkeypatch, tmp_path: Path) -> None:
    """Refused before anything is read, with what the nearest class would take."""
    monkeypatch.setitem(FAMILIES, "tiny", FamilyEntry("tiny_family"))
    (tmp_path / "config.toml").write_text(to_toml(tiny_config(**SMALL | options)))
    with pytest.raises(UserError, match=words):
        export_config(tmp_path)


def test_what_was_kept_of_the_import_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(to_toml(tiny_config()))
    for content in "{", "[]", '{"dtype": "fp32"}', '{"architecture": "", "dtype": "x", "length": 0, "tokens": {}}':
        (tmp_path / "imported.json").write_text(content)
        with pytest.raises(UserError, match=r"imported\.json: (damaged|not JSON).*valid"):
            export_config(tmp_path)


def command(*arguments: object) -> str:
    """The line of `megajax convert`, which must end as a user's mistake."""
    return user_error(main, ["convert", *map(str, arguments)])


def test_the_command_line(tmp_path: Path) -> None:
    """Paths that are missing or files, and values of flags; nothing is written. tests/commands has other targets."""
    model = write_model(tmp_path / "hf", "gpt2")
    new = tmp_path / "some" / "run"
    assert "valid: import-hf, export-hf" in command()
    assert "RUN missing" in command("import-hf", model)
    assert "no such folder" in command("import-hf", tmp_path / "nowhere" / "at" / "all", new)
    assert "is a file" in command("import-hf", model / WEIGHTS, new)
    assert "no config.toml found" in command("export-hf", tmp_path, new)
    assert "--dtype 'fp8'; valid: fp32, bf16, fp16" in command("export-hf", "a", "b", "--dtype", "fp8")
    line = command("import-hf", "a", "b", "--model.sequence-length", "0")
    assert re.search("--model.sequence-length .*valid: .*1 to", line)
    assert [entry.name for entry in tmp_path.iterdir()] == ["hf"]


def test_the_hub_without_network(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    line = command("import-hf", "some-body/some-model", tmp_path / "run")
    assert "some-body/some-model: no such folder, and it cannot be read from the Hugging Face hub" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("sharded", [False, True])
def test_what_is_downloaded_from_the_hub(monkeypatch, sharded: bool, tmp_path: Path) -> None:
    """The weights that are read, and none beside them."""
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    index = json.dumps({"weight_map": {"a": shards[0], "b": shards[1]}})
    read = {"config.json": "{}", "tokenizer.json": "{}", "added_tokens.json": "{}"} | (
        {"model.safetensors.index.json": index, **dict.fromkeys(shards, "")} if sharded else {WEIGHTS: ""}
    )
    others = ("consolidated.safetensors", "original/model.safetensors", "onnx/model.onnx", "pytorch_model.bin", "a.md")

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        there = [*read, *others]
        for file in {file for pattern in allow_patterns for file in fnmatch.filter(there, pattern)}:
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_text(read.get(file, ""))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert local_folder("some-body/some-model") == tmp_path
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == read.keys()

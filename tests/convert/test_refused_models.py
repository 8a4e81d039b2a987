"""What is not a GPT-2 like ours is refused in one line that names file and field, and nothing is left behind."""

import pickle
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hugging_face import random_tensors, write_model
from refusals import assert_setting_refused, refusal
from tiny import tiny_config

from megajax.cli import main
from megajax.config import to_toml
from megajax.convert.exporting import export_config
from megajax.convert.importing import open_source
from megajax.convert.tensor_files import WEIGHTS
from megajax.errors import UserError
from megajax.models.registry import FAMILIES, Entry


@pytest.mark.parametrize(
    ("field", "value", "valid"),
    [
        ("model_type", "gemma", '"gpt2", "llama", "mistral", "qwen2", "qwen3"'),
        ("quantization_config", {"quant_method": "gptq"}, "null, with weights in F32, F16 or BF16"),
        ("activation_function", "relu", '"gelu_new", "gelu_pytorch_tanh", "gelu"'),
        ("layer_norm_epsilon", 0, "more than 0"),
        ("scale_attn_by_inverse_layer_idx", True, "false"),
        ("scale_attn_weights", False, "true"),
        ("reorder_and_upcast_attn", True, "false"),
        ("tie_word_embeddings", 1, "true or false"),
        ("n_inner", 0, "more than 0"),
        ("n_layer", 0, "1 to 10000"),
        ("n_layer", 99_999_999, "1 to 10000"),
        ("n_layer", 9999, "number of layers"),
        ("n_embd", "24", "whole number"),
        ("n_head", 5, "multiple"),
        ("attn_pdrop", 0.1, r"all the same, or --model\.dropout"),
        ("resid_pdrop", 1.0, "less than 1"),
    ],
)
def test_settings(field: str, value: object, valid: str, tmp_path: Path) -> None:
    assert_setting_refused(write_model(tmp_path, **{field: value}), field, valid)


def test_what_may_be_set_or_left_out(tmp_path: Path) -> None:
    """Different rates of dropout with a flag, an MLP of the usual size, fields that older files lack."""
    write_model(tmp_path, attn_pdrop=0.1, n_inner=96, without=["resid_pdrop"])
    assert open_source(tmp_path, {"model.dropout": 0.3}).config.model.dropout == 0.3
    assert "n_positions is null" in refusal(write_model(tmp_path, without=["n_positions"]))
    assert "model_type is null" in refusal(write_model(tmp_path, without=["model_type"]))
    (tmp_path / "config.json").write_text("{")
    assert "config.json: not JSON" in refusal(tmp_path)
    (tmp_path / "config.json").unlink()
    assert "no config.json" in refusal(tmp_path)


def test_tensors(tmp_path: Path) -> None:
    """Missing, of another shape or type, too many, a head of its own."""
    good = random_tensors()
    gone = {name: tensor for name, tensor in good.items() if name != "h.1.mlp.c_fc.bias"}
    turned = {"h.0.attn.c_attn.weight": good["h.0.attn.c_attn.weight"].T.copy()}
    cases = [
        (gone, r"transformer\.h\.1\.mlp\.c_fc\.bias missing"),
        (good | turned, r"c_attn\.weight has shape \[72, 24\]; valid: \[24, 72\]"),
        (good | {"ln_f.bias": good["ln_f.bias"].astype(np.int32)}, "ln_f.bias has dtype I32; valid: F32, F16, BF16"),
        (good | {"h.2.ln_1.bias": good["ln_f.bias"]}, r"holds transformer\.h\.2\.ln_1\.bias"),
        (good | {"lm_head.weight": 2 * good["wte.weight"]}, "lm_head.weight differs"),
        ({"model.layers.0.input_layernorm.weight": good["ln_f.bias"]}, "and 25 more missing"),
    ]
    for tensors, words in cases:
        assert re.search(words, refusal(write_model(tmp_path, tensors))), words


def test_damaged_weights(tmp_path: Path) -> None:
    """Truncated at several places, or other bytes altogether."""
    file = write_model(tmp_path) / WEIGHTS
    whole = file.read_bytes()
    for damaged in (whole[:-5], whole[:1000], whole[:4], b"", whole[::-1]):
        file.write_bytes(damaged)
        assert f"{file}: damaged, or not a safetensors file" in refusal(tmp_path)


class Alarm:
    """Its pickle runs code when it is loaded."""

    def __reduce__(self):
        return (sys.exit, ("a pickle was loaded",))


def test_pickles_are_not_read(tmp_path: Path) -> None:
    """Neither under its own name nor under that of a safetensors file; beside safetensors it does not matter."""
    write_model(tmp_path)
    pickled = pickle.dumps(Alarm())
    (tmp_path / "pytorch_model.bin").write_bytes(pickled)
    open_source(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(pickled)
    assert "not a safetensors file" in refusal(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    line = refusal(tmp_path)
    assert re.search(r"pytorch_model\.bin: a pickle, which can run any code.*valid: model\.safetensors", line)
    (tmp_path / "pytorch_model.bin").unlink()
    assert "no weights there" in refusal(tmp_path)


def test_a_family_that_is_not_exchanged(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(FAMILIES, "tiny", Entry("tiny_family"))
    (tmp_path / "config.toml").write_text(to_toml(tiny_config(family="tiny")))
    with pytest.raises(UserError, match="holds a model of the family tiny; valid: decoder, bert"):
        export_config(tmp_path)


def command(*arguments: object) -> str:
    """The line of `megajax convert`, which must end as a user's mistake."""
    with pytest.raises(UserError) as error:
        main(["convert", *map(str, arguments)])
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_command_line(tmp_path: Path) -> None:
    """Paths that are missing, are files or hold something; nothing is written."""
    model = write_model(tmp_path / "hf")
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").write_text("kept")
    new = tmp_path / "some" / "run"
    assert "valid: import-hf, export-hf" in command()
    assert "valid: import-hf, export-hf" in command("import")
    assert "RUN missing" in command("import-hf", model)
    assert f"RUN {full} is not empty" in command("import-hf", model, full)
    assert f"RUN {full / 'file'} is a file" in command("import-hf", model, full / "file")
    assert "no such folder" in command("import-hf", tmp_path / "nowhere" / "at" / "all", new)
    assert "is a file" in command("import-hf", model / WEIGHTS, new)
    assert "no config.toml there" in command("export-hf", full, new)
    assert f"PATH {full} is not empty" in command("export-hf", new, full)
    (model / WEIGHTS).write_bytes(b"")
    assert "damaged" in command("import-hf", model, new)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["full", "hf"]
    assert [entry.name for entry in full.iterdir()] == ["file"]


def test_the_hub_without_network(monkeypatch, tmp_path: Path) -> None:
    """One line, and nothing written."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    line = command("import-hf", "some-body/some-model", tmp_path / "run")
    assert "some-body/some-model: no such folder, and the Hugging Face hub does not give it" in line
    assert not (tmp_path / "run").exists()

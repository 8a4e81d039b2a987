"""A BERT that goes in and out again is the same, bit for bit, in every form that files take."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from canonical_weights import from_tensors, places_of
from hugging_face_bert import CLASSES, SETTINGS, TYPES, bert_tensors, write_bert
from safetensors.numpy import load_file
from tiny import tiny_config, tiny_program

from megajax.config import to_toml
from megajax.convert.exporting import export_config, export_hf
from megajax.convert.importing import import_hf, open_source
from megajax.data.tokenizers import train_tokenizer
from megajax.runs.checkpoint import Checkpoints
from megajax.settings.presets import load_preset, resolve


def export(run: Path, folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a run's newest checkpoint."""
    export_hf(run, export_config(run), folder)
    return load_file(folder / "model.safetensors")


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Bit for bit."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (np.float32, expected[name].shape), name
        assert tensor.tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize("order", ["pre", "post"])
def test_import_then_export(order: str, tmp_path: Path) -> None:
    """The identical tensors, settings and vocabulary; the run's preset is one of a BERT."""
    tensors = bert_tensors(order)
    tokenizer = train_tokenizer(["some words of some text"], 100, "wordpiece")
    tokenizer.save(tmp_path / "hf")
    source = open_source(write_bert(tmp_path / "hf", order, tensors))
    assert source.tokenizer == tokenizer and not source.weights.fresh
    import_hf(source, tmp_path / "run")
    config = resolve(load_preset(tmp_path / "run" / "config.toml"))
    assert (config.model.family, config.model.layer_order) == ("bert", order)
    assert config.optimizer.learning_rate == 5e-5 and config.run_dir == str(tmp_path / "run")

    assert_same(export(tmp_path / "run", tmp_path / "back"), tensors)
    fields = json.loads((tmp_path / "back" / "config.json").read_text())
    assert fields.items() >= (SETTINGS | {"model_type": TYPES[order], "pad_token_id": 0}).items()
    assert fields["architectures"] == [CLASSES[order]]
    name = "tokenizer.json"
    assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()
    again = open_source(tmp_path / "back")
    assert again.tokenizer == tokenizer and again.config == source.config


@pytest.mark.parametrize("order", ["pre", "post"])
def test_where_the_weights_are(order: str, tmp_path: Path) -> None:
    """Each under its own name and turned to [in, out], the heads in their order; of the last layer."""
    theirs = bert_tensors(order)
    ours = open_source(write_bert(tmp_path, order, theirs)).weights.canonical(0)
    shared, layer = ours["shared"], jax.tree.map(lambda leaf: leaf[1], ours["blocks"])
    start, size, heads = "bert.encoder.layer.1.", 24, 4
    for name in "query", "key", "value":
        weight_QD, bias_Q = (theirs[f"{start}attention.self.{name}.{part}"] for part in ("weight", "bias"))
        found = layer["attention"][name]
        np.testing.assert_array_equal(found["weight"], weight_QD.reshape(heads, -1, size).transpose(2, 0, 1))
        np.testing.assert_array_equal(found["bias"], bias_Q.reshape(heads, -1))
    weight_DQ = theirs[f"{start}attention.output.dense.weight"]
    np.testing.assert_array_equal(
        layer["attention"]["output"]["weight"], weight_DQ.reshape(size, heads, -1).transpose(1, 2, 0)
    )
    for found, name in (
        (layer["mlp"]["up"], f"{start}intermediate.dense"),
        (layer["mlp"]["down"], f"{start}output.dense"),
        (shared["head"]["masked"]["dense"], "cls.predictions.transform.dense"),
        (shared["head"]["pooler"]["dense"], "bert.pooler.dense"),
        (shared["head"]["order"], "cls.seq_relationship"),
    ):
        np.testing.assert_array_equal(found["weight"], theirs[f"{name}.weight"].T, err_msg=name)
        np.testing.assert_array_equal(found["bias"], theirs[f"{name}.bias"], err_msg=name)
    first, second, outside = {
        "pre": (f"{start}attention.ln", f"{start}ln", "bert.encoder.ln"),
        "post": (f"{start}attention.output.LayerNorm", f"{start}output.LayerNorm", "bert.embeddings.LayerNorm"),
    }[order]
    for found, name in (
        (layer["attention_norm"], first),
        (layer["mlp_norm"], second),
        (shared["norm"], outside),
        (shared["head"]["masked"]["norm"], "cls.predictions.transform.LayerNorm"),
    ):
        np.testing.assert_array_equal(found["scale"], theirs[f"{name}.weight"], err_msg=name)
        np.testing.assert_array_equal(found["bias"], theirs[f"{name}.bias"], err_msg=name)
    for name, kind in (("table", "word"), ("positions", "position"), ("token_types", "token_type")):
        table = theirs[f"bert.embeddings.{kind}_embeddings.weight"]
        np.testing.assert_array_equal(shared[name][: len(table)], table, err_msg=name)
    np.testing.assert_array_equal(shared["head"]["masked"]["bias"][:101], theirs["cls.predictions.bias"])
    assert not shared["table"][101:].any() and not shared["head"]["masked"]["bias"][101:].any()


def test_export_then_import(tmp_path: Path) -> None:
    """A run on (1, 2, 2): the main weights of step 7 without the vocabulary's padding; without a tokenizer."""
    config = tiny_config((1, 2, 2), family="bert", layer_order="post", num_layers=2, sequence_length=24, dropout=0.25)
    layout, tensors = tiny_program(config).layout, bert_tensors("post", SETTINGS)
    weights = from_tensors(places_of(config.model), tensors.__getitem__, config.model)
    weights["shared"]["table"][101:] = weights["shared"]["head"]["masked"]["bias"][101:] = 1
    checkpoints = Checkpoints(tmp_path / "run", layout, keep=1)
    checkpoints.save(7, layout.from_canonical(layout.begin(weights)))
    checkpoints.close()
    (tmp_path / "run" / "config.toml").write_text(to_toml(config))
    assert_same(export(tmp_path / "run", tmp_path / "hf"), tensors)
    assert sorted(file.name for file in (tmp_path / "hf").iterdir()) == ["config.json", "model.safetensors"]

    source = open_source(tmp_path / "hf", {"model.vocab_multiple": 64})
    assert source.config.model == dataclasses.replace(config.model, scan_layers="auto")
    found = source.weights.canonical(seed=0)
    weights["shared"]["table"][101:] = weights["shared"]["head"]["masked"]["bias"][101:] = 0
    jax.tree.map(np.testing.assert_array_equal, found, weights)


def test_older_names_and_copies(tmp_path: Path) -> None:
    """LayerNorms as TensorFlow named them, the table once more as the head, positions as a buffer: the same model."""
    tensors = bert_tensors("post")
    older = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    older |= {
        "cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"].copy(),
        "cls.predictions.decoder.bias": tensors["cls.predictions.bias"].copy(),
        "bert.embeddings.position_ids": np.arange(24)[None],
    }
    source = open_source(write_bert(tmp_path / "hf", "post", older, architectures=["BertForMaskedLM"]))
    assert not source.weights.fresh
    for name, tensor in tensors.items():
        assert source.weights.read(name).tobytes() == tensor.tobytes(), name


def test_without_the_order_head(tmp_path: Path) -> None:
    """It and the pooler are what a run with this seed begins with, all else is what is there."""
    tensors = {
        name: tensor
        for name, tensor in bert_tensors("pre").items()
        if not name.startswith(("bert.pooler", "cls.seq_relationship"))
    }
    architectures = ["MegatronBertForMaskedLM"]
    source = open_source(
        write_bert(tmp_path / "hf", "pre", tensors, architectures=architectures, initializer_range=0.3)
    )
    assert list(source.weights.fresh) == ["the pooler", "the order head"]
    import_hf(source, tmp_path / "run")
    program = tiny_program(source.config)
    begun = jax.device_get(program.layout.canonical_weights(program.layout.init().params))["shared"]["head"]
    found = source.weights.canonical(source.config.seed)["shared"]["head"]
    assert np.abs(begun["order"]["weight"]).max() > 0.1
    for part in ("pooler", "order"):
        jax.tree.map(np.testing.assert_array_equal, found[part], begun[part])
    back = export(tmp_path / "run", tmp_path / "back")
    assert_same({name: back[name] for name in tensors}, tensors)
    assert_same(
        {"bert.pooler.dense.weight": back["bert.pooler.dense.weight"]},
        {"bert.pooler.dense.weight": np.ascontiguousarray(begun["pooler"]["dense"]["weight"].T)},
    )

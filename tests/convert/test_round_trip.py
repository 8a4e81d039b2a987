"""What goes out and in again is the same, bit for bit, in every form that files take."""

import dataclasses
import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from canonical_weights import from_tensors, places_of
from hugging_face import SETTINGS, random_tensors, write_model
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tiny import tiny_config, tiny_program

from megajax.config import to_toml
from megajax.convert.exporting import export_config, export_hf
from megajax.convert.importing import import_hf, open_source
from megajax.data.tokenizers import load_tokenizer, train_tokenizer
from megajax.errors import UserError
from megajax.runs.checkpoint import Checkpoints
from megajax.settings.presets import load_preset, resolve


def export(run: Path, folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a run's newest checkpoint, without the prefix."""
    export_hf(run, export_config(run), folder)
    tensors = load_file(folder / "model.safetensors")
    assert all(name.startswith("transformer.") for name in tensors)
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Bit for bit."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape), name
        assert tensor.tobytes() == expected[name].tobytes(), name


def test_import_then_export(tmp_path: Path) -> None:
    """The identical tensors, with the settings that they came with."""
    tensors = random_tensors()
    import_hf(open_source(write_model(tmp_path / "hf", tensors)), tmp_path / "run")
    assert_same(export(tmp_path / "run", tmp_path / "back"), tensors)
    fields = json.loads((tmp_path / "back" / "config.json").read_text())
    assert fields.items() >= SETTINGS.items() and fields["architectures"] == ["GPT2LMHeadModel"]
    with safe_open(tmp_path / "back" / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
    assert sorted(file.name for file in (tmp_path / "back").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def test_export_then_import(tmp_path: Path) -> None:
    """A bf16 run on (1, 2, 2): the main weights of step 7 without the vocabulary's padding; fresh optimizer state."""
    config = tiny_config((1, 2, 2), precision="bf16", num_layers=3, vocab_size=300, dropout=0.25)
    tensors = random_tensors(SETTINGS | {"n_layer": 3, "n_positions": 16, "vocab_size": 300})
    layout = tiny_program(config).layout
    weights = from_tensors(
        places_of(config.model), lambda name: tensors[name.removeprefix("transformer.")], config.model
    )
    weights["shared"]["table"][300:] = 1
    checkpoints = Checkpoints(tmp_path / "run", layout, keep=1)
    checkpoints.save(7, layout.from_canonical(layout.begin(weights)))
    checkpoints.close()
    (tmp_path / "run" / "config.toml").write_text(to_toml(config))
    tokenizer = train_tokenizer(["some words of some text"], 300)
    tokenizer.save(tmp_path / "run" / "data" / "tokenizer")
    assert_same(export(tmp_path / "run", tmp_path / "hf"), tensors)

    source = open_source(tmp_path / "hf", {"model.vocab_multiple": 64})
    kept = dataclasses.replace(config.model, scan_layers="auto")
    assert source.tokenizer == tokenizer and source.config.model == kept
    import_hf(source, tmp_path / "again")
    assert load_tokenizer(tmp_path / "again" / "data" / "tokenizer") == tokenizer
    one = tiny_program(resolve(load_preset(tmp_path / "again" / "config.toml")))
    reader = Checkpoints(tmp_path / "again", one.layout)
    assert reader.steps() == [0]
    found = jax.device_get(one.layout.to_canonical(reader.restore(0)))
    reader.close()
    weights["shared"]["table"][300:] = 0
    jax.tree.map(np.testing.assert_array_equal, found.params, weights)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves((found.step, found.optimizer)))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_without_a_prefix_and_with_buffers(dtype, tmp_path: Path) -> None:
    """As GPT2Model saves it, with the masks of older versions; weights in half precision are those in fp32, and go out
    in either."""
    tensors = random_tensors(dtype=dtype)
    buffers = {f"h.{layer}.attn.bias": np.tri(24, dtype=np.uint8)[None, None] for layer in range(2)}
    buffers |= {"h.1.attn.masked_bias": np.full((), -1e4, np.float32)}
    source = open_source(write_model(tmp_path / "hf", tensors | buffers, prefix=""))
    import_hf(source, tmp_path / "run")
    assert_same(export(tmp_path / "run", tmp_path / "back"), tensors)
    export_hf(tmp_path / "run", export_config(tmp_path / "run"), tmp_path / "wide", dtype="fp32")
    expected = {f"transformer.{name}": tensor.astype(np.float32) for name, tensor in tensors.items()}
    assert_same(load_file(tmp_path / "wide" / "model.safetensors"), expected)


def test_several_files_and_a_tied_head(tmp_path: Path) -> None:
    """Sharded as save_pretrained does it, with the table once more as the head."""
    tensors = random_tensors() | {"lm_head.weight": random_tensors()["wte.weight"]}
    folder = write_model(tmp_path / "hf", tensors)
    shards = split(folder)
    source = open_source(folder)
    for name, tensor in random_tensors().items():
        assert source.weights.read(f"transformer.{name}").tobytes() == tensor.tobytes()

    index = folder / "model.safetensors.index.json"
    shards[1].rename(tmp_path / "gone")
    with pytest.raises(UserError, match=r"model-1\.safetensors: .*does not exist"):
        open_source(folder)
    for text in ('{"weight_map": {"a": "../model-0.safetensors"}}', '{"weight_map": {"a": "b.bin"}}', "{}", "[", "[]"):
        index.write_text(text)
        with pytest.raises(UserError, match=r"index\.json: .*valid"):
            open_source(folder)


def split(folder: Path) -> list[Path]:
    """model.safetensors as two files and an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = [folder / f"model-{number}.safetensors" for number in range(2)]
    for number, shard in enumerate(shards):
        save_file({name: tensors[name] for name in names[number::2]}, shard)
    places = {name: shards[number % 2].name for number, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return shards

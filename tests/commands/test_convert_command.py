"""A model is imported, trained on, evaluated and exported, each by its command."""

import json
from pathlib import Path

import numpy as np
import pytest
from hugging_face import random_tensors, tensors_in, write_model
from processes import Commands
from results import checkpoint_steps, validation
from tiny import full

from megajax.data.text.tokenizers import load_tokenizer, train_tokenizer


def convert(commands: Commands, *arguments: object) -> str:
    return commands.run("-m", "megajax", "convert", *arguments).ok()


@pytest.mark.parametrize("mesh", [(), full(("--mesh.data", 2, "--mesh.tensor", 2, "--simulate-devices", 4))], ids=len)
@pytest.mark.slow
def test_import_train_evaluate_export(commands: Commands, corpus: Path, mesh: tuple, tmp_path: Path) -> None:
    """Training goes on from the imported weights, with a learning rate that changes nothing; the export holds them."""
    model, run = tmp_path / "hf", tmp_path / "run"
    tokenizer = train_tokenizer([corpus.read_text()], 280)
    tokenizer.save(model)
    sizes = {"vocab_size": 300, "n_layer": 1}
    tensors = random_tensors("gpt2", **sizes)
    write_model(model, "gpt2", tensors, **sizes, **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0))
    told = convert(commands, "import-hf", model, run, "--model.vocab-multiple", 64)
    assert f"megajax train {run / 'config.toml'}" in told and checkpoint_steps(run) == [0]
    assert "continue training with --data.path TEXT.\n" in (run / "config.toml").read_text()

    flags = ("--data.path", corpus, "--train.global-batch", 4, "--train.steps", 2, "--checkpoint.keep", 1)
    still = ("--optimizer.learning-rate", 1e-12, "--sample.tokens", 0, "--train.eval-batches", 0)
    assert "resumed from step 0" in commands.run("train.py", run / "config.toml", *flags, *still, *mesh).ok()
    assert "bit for bit" in commands.run("-m", "megajax", "replay", run, "--steps", "1:2").ok()
    assert load_tokenizer(run / "data" / "tokenizer") == tokenizer
    imported = commands.perplexity(run, "--step", 0)
    assert imported["step"] == 0 and imported["loss"] == pytest.approx(validation(run)[2], rel=1e-6)

    figures = json.loads(convert(commands, "export-hf", run, tmp_path / "back", "--json"))
    assert figures == {"path": str(tmp_path / "back"), "step": 2, "parameters": sum(x.size for x in tensors.values())}
    for name, tensor in tensors_in(tmp_path / "back").items():
        np.testing.assert_allclose(tensor, tensors[name], rtol=0, atol=1e-9, err_msg=name)
    assert load_tokenizer(tmp_path / "back") == tokenizer

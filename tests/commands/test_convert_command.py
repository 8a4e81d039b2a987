"""A model is imported, trained on, evaluated and exported, each by its command."""

import json
from pathlib import Path

import numpy as np
import pytest
from hugging_face import random_tensors, tensors_in, write_model
from processes import Commands
from results import checkpoint_steps, validation
from saved_tokenizers import write_saved
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
    assert load_tokenizer(run / "data" / "tokenizer") == tokenizer
    imported = commands.perplexity(run, "--step", 0)
    assert imported["step"] == 0 and imported["loss"] == pytest.approx(validation(run)[2], rel=1e-6)

    figures = json.loads(convert(commands, "export-hf", run, tmp_path / "back", "--json"))
    assert figures == {"path": str(tmp_path / "back"), "step": 2, "parameters": sum(x.size for x in tensors.values())}
    for name, tensor in tensors_in(tmp_path / "back").items():
        np.testing.assert_allclose(tensor, tensors[name], rtol=0, atol=1e-9, err_msg=name)
    assert load_tokenizer(tmp_path / "back") == tokenizer


@pytest.mark.full
def test_a_mixture_whose_experts_are_sharded(commands: Commands, corpus: Path, tmp_path: Path) -> None:
    """Scored, continued and trained on instructions as on one device; no token is dropped where none is trained on."""
    model, run, file = tmp_path / "hf", tmp_path / "run", tmp_path / "text.txt"
    write_saved(model, "mistral")
    sizes = {"vocab_size": 704, "num_hidden_layers": 1, "num_experts": 6}
    write_model(model, "qwen3_moe", random_tensors("qwen3_moe", **sizes), **sizes)
    convert(commands, "import-hf", model, run, "--model.vocab-multiple", 64)
    capacity = ("--model.expert-capacity", 0.5, "--model.balance", "loss")
    mesh = ("--mesh.expert", 2, "--simulate-devices", 2)
    file.write_text(corpus.read_text()[:600])
    scores = [commands.evaluate("wikitext103", run, "--data", file, *flags)["loss"] for flags in ((), mesh)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-6)
    write = ("-m", "megajax", "generate", "--checkpoint", run, "--prompt", "the end", "--max-tokens", 12)
    texts = [commands.run(*write, "--temperature", 0, *flags).ok() for flags in ((), mesh)]
    assert texts[0] == texts[1] and len(texts[0]) > len("the end")
    records = tmp_path / "records.jsonl"
    records.write_text('{"prompt": "What is 1 and 2?", "completion": " It is 3."}\n' * 8)
    tuned = ("--init", run, "--run-dir", tmp_path / "tuned", "--task.name", "instructions", "--data.reset-attention")
    data = ("--data.train", records, "--data.dev", records, "--train.epochs", 1, "--train.global-batch", 2)
    told = commands.run("train.py", run / "config.toml", *tuned, *data, "--sample.tokens", 0, *capacity, *mesh).ok()
    assert "; fresh: none" in told


@pytest.mark.full
def test_a_bert_without_the_order_head(commands: Commands, tmp_path: Path) -> None:
    """What is drawn anew is said; the export is of the class with both heads."""
    left_out = ("bert.pooler", "cls.seq_relationship")
    whole = random_tensors("bert")
    tensors = {name: tensor for name, tensor in whole.items() if not name.startswith(left_out)}
    write_model(tmp_path / "hf", "bert", tensors, architectures=["BertForMaskedLM"])
    told = convert(commands, "import-hf", tmp_path / "hf", tmp_path / "run")
    assert "not in the safetensors, so initialized randomly: the pooler and the order head\n" in told
    convert(commands, "export-hf", tmp_path / "run", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["architectures"] == ["BertForPreTraining"]
    again = json.loads(convert(commands, "import-hf", tmp_path / "back", tmp_path / "again", "--json"))
    assert again["fresh"] == [] and again["parameters"] == sum(x.size for x in whole.values())

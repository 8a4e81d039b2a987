"""Training on preferences, from the files to the figures: the commands, seen from outside."""

import json
import math
import shutil
from pathlib import Path

import pytest
from processes import MESH_222, Commands
from results import assert_close_losses, curve
from saved_tokenizers import write_saved

PRESET = "configs/finetune/preferences-demo.toml"
SIZE = "--model.num-layers 2 --model.hidden-size 32 --model.num-heads 4 --model.vocab-size 704 --model.vocab-multiple"
SIZE += " 64 --model.sequence-length 64 --train.global-batch 8 --train.microbatch 1 --train.epochs 2 --train.log-every"
SIZE += " 1 --checkpoint.every 3 --sample.tokens 0 --optimizer.learning-rate 0.01"


@pytest.mark.full
def test_the_chosen_answers_gain_on_any_mesh(commands: Commands, tmp_path: Path) -> None:
    """From the reference, which is kept, also by a run that goes on."""
    write_saved(tmp_path / "tokenizer", "mistral")
    pairs = [{"prompt": f"What is {n}?", "chosen": f" It is {n}.", "rejected": f" I say {n + 1}."} for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    line = ("train.py", PRESET, *SIZE.split(), "--tokenizer.path", tmp_path / "tokenizer")
    line += ("--data.train", tmp_path / "pairs.jsonl", "--run-dir")
    one, other, first = tmp_path / "one", tmp_path / "other", tmp_path / "first"
    (tmp_path / "answers.jsonl").write_text("".join(f'{{"prompt": "{n}", "completion": " {n}"}}\n' for n in range(9)))
    answers = ("--task.name", "instructions", "--data.train", tmp_path / "answers.jsonl", "--train.steps", 1)
    commands.run(*line, first, *answers).ok()
    line = (*line[:-1], "--init", first, "--run-dir")
    commands.run(*line, one).ok()
    losses = [loss for _, loss, _ in curve(one)]
    assert losses[0] == pytest.approx(math.log(2), rel=1e-5) and losses[-1] < 0.6
    commands.run(*line, other, *MESH_222, "--train.steps", 4).ok()
    reference = (other / "reference.npy").read_bytes()
    shutil.rmtree(other / "data")
    (other / "reference.npy").write_bytes(reference[:-33] + b"?" + reference[-32:])  # a byte of the last value
    done = commands.run(*line, other, *MESH_222, "--sequence-parallel").ok()
    assert "reference.npy is missing or damaged: computed again from --init" in done
    assert (other / "reference.npy").read_bytes() == reference
    assert_close_losses(curve(other), curve(one))
    found = commands.evaluate("preferences", one, "--data", tmp_path / "pairs.jsonl")
    assert (found["records"], found["accuracy"]) == (40, 100)
    assert commands.evaluate("preferences", first, "--data", tmp_path / "pairs.jsonl")["accuracy"] < 100  # before

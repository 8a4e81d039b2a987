"""What train.py reads: text, JSONL, folders, prepared datasets, a given tokenizer."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
from processes import Commands, Run, curve

TWO_STEPS = ("--train.steps", 2)


@pytest.mark.parametrize("named", [False, pytest.param(True, marks=pytest.mark.full)])
def test_folders_and_jsonl(commands: Commands, corpus: Path, named: bool, tmp_path: Path) -> None:
    """A folder of text and JSONL files; one that is not UTF-8 is skipped and counted. A JSONL file with the same
    documents in the same order gives the same losses."""
    documents = corpus.read_text().split("\n\n")
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    for number, document in enumerate(documents[:50]):
        (folder / "b" / f"{number:02}.txt").write_text(document)
    (folder / "a.md").write_bytes("naïve".encode("latin-1"))
    lines = [json.dumps({"text": document, "source": "x"}) + "\n" for document in documents]
    (folder / "c.jsonl").write_text("".join(lines[50:]))
    run = tmp_path / "a run"  # a space is no problem either
    done = commands.train(run, "--data.path", folder, *TWO_STEPS)
    assert re.search(r"\b1 file\w* skipped|skipped\D* 1 file", done.out), done.out
    assert re.search(rf"\b{len(documents)} documents", done.out), done.out
    assert len(curve(run)) == 2
    if named:
        (tmp_path / "all.jsonl").write_text("".join(lines))
        done = commands.train(tmp_path / "other", "--data.path", tmp_path / "all.jsonl", *TWO_STEPS)
        assert "skipped" not in done.out
        assert curve(tmp_path / "other") == curve(run)


def test_a_prepared_dataset(commands: Commands, straight: Run, tmp_path: Path) -> None:
    """The tokens of a run, given as PREFIX of .bin and .idx, train like the text they came from; without a tokenizer
    there is no sample."""
    for file in (straight.folder / "data").glob("tokens.*"):
        shutil.copy(file, tmp_path)
    done = commands.train(tmp_path / "run", "--data.path", tmp_path / "tokens", *TWO_STEPS, "--sample.tokens", 2)
    assert curve(tmp_path / "run") == curve(straight.folder)[:2]
    assert "validation perplexity" in done.out


@pytest.mark.full
def test_the_tokenizer_of_gpt2(commands: Commands, test_data: Path, tmp_path: Path) -> None:
    """`--tokenizer.path` with OpenAI's two files, and the vocabulary that goes with them."""
    vocabulary = ("--model.vocab-size", 50257, "--model.vocab-multiple", 64, "--model.num-layers", 1)
    done = commands.train(tmp_path, "--tokenizer.path", test_data / "gpt2-bpe", *vocabulary, *TWO_STEPS)
    losses = [loss for _, loss, _ in curve(tmp_path)]
    assert losses[0] == pytest.approx(math.log(50257), abs=0.3)
    assert "validation perplexity" in done.out

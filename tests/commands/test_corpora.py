"""What train.py reads: text, JSONL, folders, prepared datasets, a given tokenizer, several corpora."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
from mistakes import train_mistake
from processes import Commands, Run
from results import assert_close_losses, curve, records

from megajax.data.text.tokenizers import load_tokenizer

pytestmark = pytest.mark.slow

TWO_STEPS = ("--train.steps", 2)


@pytest.mark.full
@pytest.mark.parametrize("named", [False, True])
def test_folders_and_jsonl(commands: Commands, corpus: Path, named: bool, tmp_path: Path) -> None:
    """Latin-1 is skipped and counted; the same documents in the same order as JSONL give the same losses."""
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
    """The tokens of a run train like the text they came from; without a tokenizer there is no sample."""
    for file in (straight.folder / "data").glob("tokens.*"):
        shutil.copy(file, tmp_path)
    done = commands.train(tmp_path / "run", "--data.path", tmp_path / "tokens", *TWO_STEPS, "--sample.tokens", 2)
    assert curve(tmp_path / "run") == curve(straight.folder)[:2]
    assert "validation perplexity" in done.out


@pytest.mark.full
def test_the_tokenizer_of_gpt2(commands: Commands, test_data: Path, tmp_path: Path) -> None:
    vocabulary = ("--model.vocab-size", 50257, "--model.vocab-multiple", 64, "--model.num-layers", 1)
    done = commands.train(tmp_path, "--tokenizer.path", test_data / "gpt2-bpe", *vocabulary, *TWO_STEPS)
    losses = [loss for _, loss, _ in curve(tmp_path)]
    assert losses[0] == pytest.approx(math.log(50257), abs=0.3)
    assert "validation perplexity" in done.out


FOUR_STEPS = ("--train.steps", 4, "--train.eval-every", 2, "--checkpoint.every", 2)


@pytest.fixture(scope="module")
def halves(corpus: Path, straight: Run, tmp_path_factory) -> list[Path]:
    """The corpus in two texts, and the tokenizer of another run."""
    folder = tmp_path_factory.mktemp("halves")
    documents = corpus.read_text().split("\n\n")
    parts = []
    for number, part in enumerate((documents[:20], documents[20:])):
        parts.append(folder / f"{number}.jsonl")
        parts[-1].write_text("".join(json.dumps({"text": document}) + "\n" for document in part))
    load_tokenizer(straight.folder / "data" / "tokenizer").save(folder / "tokenizer")
    return parts


def flags(halves: list[Path], weights: tuple[float, float] = (0.25, 0.75)) -> tuple:
    entries = [f"{{path = '{path}', weight = {weight}}}" for path, weight in zip(halves, weights, strict=True)]
    named = f"[{{name = 'first', path = '{halves[0]}'}}, {{name = 'second', path = '{halves[1]}'}}]"
    tokenizer = halves[0].parent / "tokenizer"
    return "--data.sources", f"[{', '.join(entries)}]", "--data.validation", named, "--tokenizer.path", tokenizer


@pytest.mark.full
def test_a_blend_on_two_meshes_and_resumed(commands: Commands, halves: list[Path], tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    done = commands.train(one, *flags(halves), *FOUR_STEPS)
    shares = re.findall(r"data \((0\.\d+) of the samples\)", done.out)
    assert shares == ["0.25", "0.75"] and re.search(r"waited for data: \d+\.\d\d%", done.out)
    assert len(re.findall(r"validation loss of (?:first|second) ", done.out)) == 4
    mesh = ("--mesh.data", 2, "--simulate-devices", 2, "--optimizer.zero", 0)
    commands.train(two, *flags(halves), *FOUR_STEPS, "--train.steps", 2)
    commands.train(two, *flags(halves), *FOUR_STEPS, *mesh)
    assert_close_losses(curve(two), curve(one))
    lines = [[line for line in records(run) if "validation_loss" in line] for run in (one, two)]
    for before, after in zip(*lines, strict=True):
        assert {"validation_loss/first", "validation_loss/second"} < before.keys()
        assert before == pytest.approx(after, rel=1e-6)
    assert commands.perplexity(two)["loss"] == pytest.approx(lines[1][-1]["validation_loss"], rel=1e-6)


def test_text_without_a_tokenizer_is_refused(commands: Commands, halves: list[Path], tmp_path: Path) -> None:
    *without, _, _ = flags(halves)
    assert "all corpora must share one tokenizer" in train_mistake(commands, tmp_path / "a", *without, *FOUR_STEPS)
    assert not list(tmp_path.glob("a/data/*"))

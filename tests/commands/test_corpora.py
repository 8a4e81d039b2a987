"""Several corpora, which share a tokenizer."""

import json
import re
from pathlib import Path

import pytest
from mistakes import train_mistake
from processes import Commands, Run
from results import assert_close_losses, curve, records

from megajax.data.text.tokenizers import load_tokenizer

pytestmark = pytest.mark.slow


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

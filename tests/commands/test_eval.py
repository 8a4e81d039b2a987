"""`eval.py`: the numbers that training saw, on any mesh, for any checkpoint and any text; the tasks of the paper."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
from processes import Commands, Run
from results import contents, records, validation

from megajax.data.text.tokenizers import load_tokenizer


def test_the_whole_validation_split(commands: Commands, straight: Run) -> None:
    """As training measured it, also of an earlier step. The run is only read."""
    before = contents(straight.folder)
    result = commands.perplexity(straight.folder)
    assert (result["step"], result["loss"]) == (20, pytest.approx(validation(straight.folder)[20], rel=1e-6))
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    said = float(re.findall(r"([\d.]+) bits per byte", straight.finished.out)[-1])  # without the split's first token
    assert result["bits_per_byte"] == pytest.approx(said, rel=2e-3)
    earlier = commands.perplexity(straight.folder, "--step", 10)
    assert (earlier["step"], earlier["loss"]) == (10, pytest.approx(validation(straight.folder)[10], rel=1e-6))
    assert contents(straight.folder) == before


def test_the_best_step(commands: Commands, straight: Run, tmp_path: Path) -> None:
    """The one of the lowest validation loss, whatever else metrics.jsonl holds."""
    run = shutil.copytree(straight.folder, tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if "validation_loss" in line:
            line["validation_loss"] += line["step"]  # now that of step 10 is the lowest
    lines += [{"step": 15, "validation_loss": None}, {"step": 17, "validation_loss": 0.5}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "metrics.jsonl").write_text(text + '{"step": 21, "validation_l')
    result = commands.perplexity(run, "--step", "best")
    assert (result["step"], result["loss"]) == (10, pytest.approx(validation(straight.folder)[10], rel=1e-6))


def test_any_text(commands: Commands, straight: Run, tmp_path: Path) -> None:
    """Every token but the first is predicted once, the end of the text included."""
    text = "Some text.\n\nWith naïve words — and 𝒻ancy ones; " * 40
    (tmp_path / "some.txt").write_text(text, encoding="utf-8")
    result = commands.perplexity(straight.folder, "--data", tmp_path / "some.txt", "--step", "latest")
    tokens = load_tokenizer(straight.folder / "data" / "tokenizer").encode(text)
    assert result["tokens"] == len(tokens)
    assert result["loss"] > validation(straight.folder)[20], "a text of another kind"
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    bits = result["loss"] * result["tokens"] / math.log(2)
    assert result["bits_per_byte"] == pytest.approx(bits / len(text.encode()))


def test_wikitext(commands: Commands, straight: Run, tmp_path: Path) -> None:
    """Perplexity per word of the file; on a mesh, with a split vocabulary, the same as on one device."""
    text = " \n = The End = \n \n " + "It 's a well @-@ known end , said the others ' king . \n " * 20
    file = tmp_path / "wiki.test.tokens"
    file.write_text(text, encoding="utf-8")
    mesh = ("--mesh.pipe", 2, "--mesh.tensor", 2, "--simulate-devices", 4, "--pipeline.vocabulary", "split")
    mesh += ("--train.microbatch", 16)
    result = commands.evaluate("wikitext103", straight.folder, "--data", file, "--overlap", 8, *mesh)
    plain = "\n= The End =\n" + "\nIt's a well-known end, said the others' king." * 20 + "\n"
    predicted = len(load_tokenizer(straight.folder / "data" / "tokenizer").encode(plain)) - 1
    assert (result["task"], result["step"], result["overlap"]) == ("wikitext103", 20, 8)
    assert (result["T_o"], result["T"]) == (len(text.strip().split(" ")), predicted)
    assert result["windows"] == 1 + -(-(predicted - 32) // 8)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert result["tokens_per_second"] > 0
    (tmp_path / "plain.txt").write_text(plain)
    subwords = commands.perplexity(straight.folder, "--data", tmp_path / "plain.txt", "--overlap", 8)
    assert subwords["tokens"] == predicted + 1, "the end of the text"
    assert result["loss"] * result["T_o"] == pytest.approx(subwords["loss"] * subwords["tokens"], rel=0.02)


@pytest.mark.full
def test_lambada_while_a_run_trains(commands: Commands, begun: Path, corpus: Path, tmp_path: Path) -> None:
    """By `--evaluate`, on two devices of a pipe: the figures of `megajax eval`, in metrics.jsonl and on a line."""
    words, file = corpus.read_text(encoding="utf-8").split(), tmp_path / "lambada.jsonl"
    passages = (" ".join(words[at : at + 9]) for at in range(0, 400, 20))
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in passages))
    flags = ("--evaluate", f"lambada={file}", "--evaluate-every", 2, "--train.steps", 12)
    done = commands.train(begun, *flags, "--mesh.pipe", 2, "--simulate-devices", 2)
    found = {line["step"]: line for line in records(begun) if "lambada/accuracy" in line}
    assert [*found] == [10, 12] and "step 12/12  lambada  accuracy" in done.out
    result = commands.evaluate("lambada", begun, "--data", file)
    for name in ("accuracy", "loss", "perplexity"):
        assert found[12][f"lambada/{name}"] == pytest.approx(result[name], rel=1e-6)


def test_lambada(commands: Commands, straight: Run, corpus: Path, tmp_path: Path) -> None:
    """Words that the model has seen follow each other are easier than those that never do."""
    words = corpus.read_text(encoding="utf-8").split()
    results = []
    for name, shift in (("seen", 0), ("shuffled", 17)):
        passages = [" ".join([*words[at : at + 12], words[at + 12 + shift]]) for at in range(0, 2000, 20)]
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in passages))
        results.append(commands.evaluate("lambada", straight.folder, "--data", file))
    seen, shuffled = results
    assert seen["passages"] == shuffled["passages"] == 100
    assert seen["perplexity"] < shuffled["perplexity"]
    assert 0 <= seen["accuracy"] <= 1 and 0 < seen["several_subwords"] <= 100

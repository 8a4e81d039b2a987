"""`--data.reset-attention`, from the flag to the figures."""

import shutil
from pathlib import Path

import pytest
from processes import Commands, validation


def forgetful(run: Path, copy: Path) -> Path:
    """A copy of a run whose configuration does not know that attention is reset."""
    shutil.copytree(run, copy)
    text = (copy / "config.toml").read_text()
    assert "reset_attention = true" in text
    (copy / "config.toml").write_text(text.replace("reset_attention = true", "reset_attention = false"))
    return copy


@pytest.mark.full
def test_training_and_evaluation_reset_attention(commands: Commands, tmp_path: Path) -> None:
    """`eval.py` measures what validation did; without the reset the loss is another."""
    run = tmp_path / "run"
    commands.train(run, "--data.reset-attention", "--train.steps", 1, "--data.validation-fraction", 0.3)
    expected = validation(run)[1]
    assert commands.perplexity(run)["loss"] == pytest.approx(expected, rel=1e-6)
    assert commands.perplexity(forgetful(run, tmp_path / "copy"))["loss"] != pytest.approx(expected, rel=1e-5)


@pytest.mark.full
def test_any_text_is_evaluated_with_attention_reset(commands: Commands, tmp_path: Path) -> None:
    """`--data FOLDER`: its files are documents, kept apart if those of the run were."""
    run, text = tmp_path / "run", tmp_path / "text"
    commands.train(run, "--data.reset-attention", "--train.steps", 1)
    text.mkdir()
    for number in range(20):
        (text / f"{number}.txt").write_text(f"Document {number}: short. " * (1 + number % 2))
    kept_apart = commands.perplexity(run, "--data", text)
    joined = commands.perplexity(forgetful(run, tmp_path / "copy"), "--data", text)
    assert kept_apart["tokens"] == joined["tokens"] > 100
    assert kept_apart["loss"] != pytest.approx(joined["loss"], rel=1e-5)

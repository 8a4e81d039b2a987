"""Other precisions, attention that is reset, and a wrong device: a few steps each."""

import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest
from processes import Commands
from results import assert_same_checkpoint, training, validation

from megajax.core.parallel.collectives import axis_index
from megajax.core.program.bind import BoundModel

TWO = ("--mesh.pipe", 2, "--simulate-devices", 2)


FP16 = ("--precision", "fp16", "--loss-scale.initial", 2.0**26)
FP16 += ("--optimizer.gradient-dtype", "fp16", "--optimizer.zero", 3, "--sequence-parallel")


@pytest.mark.full
def test_skipped_steps_survive_a_resume(commands: Commands, tmp_path: Path) -> None:
    """The learning rate waits for them; the scale comes down."""
    straight, stopped, steps = tmp_path / "straight", tmp_path / "stopped", 14
    flags = ("--checkpoint.every", 2, "--train.eval-every", 20, *FP16)
    commands.train(straight, *flags, "--train.steps", steps)
    commands.train(stopped, *flags, "--train.steps", 2)
    commands.train(stopped, *flags, "--train.steps", steps)
    lines = {name: [line[name] for line in training(straight)] for name in training(straight)[0]}
    number = lines["skipped_steps"][-1]
    assert 3 <= number <= steps - 5
    assert lines["skipped_steps"] == [*range(1, number + 1), *[number] * (steps - number)]
    assert lines["learning_rate"][: number + 1] == [0.0] * (number + 1) and lines["learning_rate"][number + 1] > 0
    assert lines["loss_scale"][: number + 1] == [2.0 ** (26 - step) for step in range(number + 1)]
    for name in lines.keys() - {"seconds", "tokens_per_second", "tflops_per_device", "data_seconds"}:
        assert [line[name] for line in training(stopped)] == lines[name]
    assert_same_checkpoint(stopped, straight, steps)
    result = commands.perplexity(straight, "--precision", "fp32", *TWO)
    assert result["loss"] == pytest.approx(validation(straight)[steps], rel=1e-3)


@pytest.mark.full
def test_attention_that_is_reset(commands: Commands, tmp_path: Path) -> None:
    """A copy of the run that does not know of it measures something else; also of a folder of documents."""
    run, copy, text = tmp_path / "run", tmp_path / "copy", tmp_path / "text"
    commands.train(run, "--data.reset-attention", "--train.steps", 1, "--data.validation-fraction", 0.3)
    config = (shutil.copytree(run, copy) / "config.toml").read_text()
    assert "reset_attention = true" in config
    (copy / "config.toml").write_text(config.replace("reset_attention = true", "reset_attention = false"))
    text.mkdir()
    for number in range(20):
        (text / f"{number}.txt").write_text(f"Document {number}: short. " * (1 + number % 2))
    assert commands.perplexity(run)["loss"] == pytest.approx(validation(run)[1], rel=1e-6)
    for data in ((), ("--data", text)):
        apart, joined = (commands.perplexity(each, *data) for each in (run, copy))
        assert apart["tokens"] == joined["tokens"] > 100
        assert apart["loss"] != pytest.approx(joined["loss"], rel=1e-5)


@pytest.mark.slow
def test_a_device_that_becomes_wrong(commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the fourth step on, which is rechecked: the run ends with a code of its own, or goes on."""
    right = BoundModel.layer

    def layer(self, *arguments):
        y, figures = right(self, *arguments)
        wrong = (axis_index("data") == 2) & (self.step >= 3)
        return jnp.where(wrong, y.at[0, 0, 0].multiply(1 + 2**-12), y), figures

    monkeypatch.setattr(BoundModel, "layer", layer)
    line = ("train.py", commands.preset, "--run-dir", tmp_path, "--mesh.data", 4, "--simulate-devices", 4)
    line += ("--train.recheck", 2, "--train.steps", 6, "--train.eval-every", 0)
    ended, named = commands.run(*line), "different bits in gradients or losses: data 2, device 2 (cpu) of"
    assert ended.code == 3 and f"step 4: --train.recheck found {named} process 0 on " in ended.err
    assert commands.run(*line, "--train.recheck-continue").code == 0
    figures = [(line.get("recheck_differs"), line["skipped_steps"]) for line in training(tmp_path)]
    assert figures == [(None, 0), (0, 0), (None, 0), (1, 1), (None, 1), (1, 2)]
    assert (tmp_path / "log.txt").read_text().count(named) == 2  # of the steps that were skipped

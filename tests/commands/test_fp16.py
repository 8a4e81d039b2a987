"""fp16 with a loss scale that is too large at first: skipped steps in a run that stops and goes on."""

from pathlib import Path

import pytest
from processes import Commands, assert_same_checkpoint, training, validation

FLAGS = ("--precision", "fp16", "--loss-scale.initial", 2.0**26, "--loss-scale.growth-every", 4)
FLAGS += ("--optimizer.gradient-dtype", "fp16", "--optimizer.zero", 3, "--sequence-parallel")
STEPS = 14


@pytest.mark.full
def test_skipped_steps_survive_a_resume(commands: Commands, tmp_path: Path) -> None:
    """The first steps overflow and are counted, the learning rate waits for them, the scale comes down and later grows;
    a run that stopped among them goes on bit for bit. What it leaves is evaluated in fp32 on another mesh."""
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    flags = ("--checkpoint.every", 2, "--train.eval-every", 20, *FLAGS)
    commands.train(straight, *flags, "--train.steps", STEPS)
    commands.train(stopped, *flags, "--train.steps", 2)
    commands.train(stopped, *flags, "--train.steps", STEPS)
    lines = {name: [line[name] for line in training(straight)] for name in training(straight)[0]}
    number = lines["skipped_steps"][-1]
    assert 3 <= number <= STEPS - 5
    assert lines["skipped_steps"] == [*range(1, number + 1), *[number] * (STEPS - number)]
    assert lines["learning_rate"][: number + 1] == [0.0] * (number + 1) and lines["learning_rate"][number + 1] > 0
    assert lines["loss_scale"][: number + 1] == [2.0 ** (26 - step) for step in range(number + 1)]
    assert lines["loss_scale"][number + 4] == 2 * lines["loss_scale"][number]
    for name in lines.keys() - {"seconds", "tokens_per_second", "tflops_per_device", "data_seconds"}:
        assert [line[name] for line in training(stopped)] == lines[name]
    assert_same_checkpoint(stopped, straight, STEPS)
    result = commands.perplexity(straight, "--precision", "fp32", "--mesh.pipe", 2, "--simulate-devices", 2)
    assert result["loss"] == pytest.approx(validation(straight)[STEPS], rel=1e-3)

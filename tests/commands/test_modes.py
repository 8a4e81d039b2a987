"""Other precisions, schedules and forms of the model: a few steps each."""

import math
from pathlib import Path

import pytest
from processes import Commands, Run, assert_close_losses, curve, validation


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["gpipe", pytest.param("1f1b", marks=pytest.mark.full)])
def test_recomputed_unrolled_layers_on_two_stages(
    commands: Commands, straight: Run, schedule: str, tmp_path: Path
) -> None:
    """`--pipeline.schedule`, `--train.remat layer` and unrolled layers give the numbers of one device."""
    flags = ("--pipeline.schedule", schedule, "--train.remat", "layer", "--model.scan-layers", "false")
    commands.train(tmp_path, *flags, "--mesh.pipe", 2, "--simulate-devices", 2, "--train.steps", 3)
    assert_close_losses(curve(tmp_path), curve(straight.folder)[:3])


@pytest.mark.parametrize(
    ("precision", "flags"),
    [
        ("bf16", "--pipeline.schedule gpipe --train.remat layer"),
        pytest.param("fp64", "--model.dropout 0 --model.scan-layers false", marks=pytest.mark.full),
    ],
)
def test_precisions_and_forms(commands: Commands, straight: Run, precision: str, flags: str, tmp_path: Path) -> None:
    """bf16 and fp64 train, from the same start as fp32, and their checkpoints evaluate as training did."""
    commands.train(tmp_path, "--precision", precision, *flags.split(), "--train.steps", 3)
    losses = [loss for _, loss, _ in curve(tmp_path)]
    assert len(losses) == 3 and all(map(math.isfinite, losses))
    assert losses[0] == pytest.approx(curve(straight.folder)[0][1], abs=0.05)
    assert losses[2] < losses[0]
    relative = 1e-3 if precision == "bf16" else 1e-9
    assert commands.perplexity(tmp_path)["loss"] == pytest.approx(validation(tmp_path)[3], rel=relative)

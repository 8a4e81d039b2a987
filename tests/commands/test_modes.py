"""Other precisions, schedules, forms of the model and of attention: a few steps each."""

import math
import shutil
from pathlib import Path

import pytest
from processes import Commands, Run
from results import assert_close_losses, assert_same_checkpoint, curve, training, validation

TWO = ("--mesh.pipe", 2, "--simulate-devices", 2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("precision", "flags"),
    [
        ("bf16", "--pipeline.schedule gpipe --train.remat layer"),
        ("fp64", "--model.dropout 0 --model.scan-layers false"),
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


@pytest.mark.full
def test_a_run_goes_from_bf16_to_fp8_and_back(commands: Commands, straight: Run, tmp_path: Path) -> None:
    """On another mesh in between; evaluation computes in fp8 as training did."""
    commands.train(tmp_path, "--precision", "bf16", "--train.steps", 2)
    done = commands.train(tmp_path, "--precision", "fp8", "--train.steps", 4, *TWO)
    assert "on a CPU fp8 is slower than bf16 and only good for checking" in done.out
    assert commands.perplexity(tmp_path)["loss"] == pytest.approx(validation(tmp_path)[4], rel=1e-3)
    commands.train(tmp_path, "--precision", "bf16", "--train.steps", 6)
    for (step, loss, _), (_, expected, _) in zip(curve(tmp_path), curve(straight.folder)[:6], strict=True):
        assert loss == pytest.approx(expected, abs=0.05), step


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
def test_a_run_changes_its_pipeline_on_the_way(commands: Commands, straight: Run, tmp_path: Path) -> None:
    """Interleaved, then 1F1B with a split vocabulary and selective recomputation: the numbers of one device."""
    layers = ("--model.num-layers", 4)
    interleaved = ("--pipeline.schedule", "interleaved", "--pipeline.chunks", 2, *layers)
    split = ("--pipeline.vocabulary", "split")
    commands.train(tmp_path / "one", *layers, "--train.steps", 10)
    commands.train(tmp_path / "two", *interleaved, *TWO, "--train.steps", 5)
    for flags in ((), (*TWO, *split)):
        result = commands.perplexity(tmp_path / "two", *flags)
        assert result["step"] == 5
        assert result["loss"] == pytest.approx(validation(tmp_path / "two")[5], rel=1e-6)
    selective = ("--train.remat", "selective", "--train.microbatch", 2)
    commands.train(tmp_path / "two", *layers, *split, *selective, *TWO, "--train.steps", 10)
    assert_close_losses(curve(tmp_path / "two"), curve(tmp_path / "one"))
    assert validation(tmp_path / "two")[10] == pytest.approx(validation(tmp_path / "one")[10], rel=1e-6)


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

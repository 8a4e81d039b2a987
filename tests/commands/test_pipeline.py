"""Pipelines by command: runs that change schedule, chunks and vocabulary on the way, `--profile-pipeline`."""

from pathlib import Path

import pytest
from processes import Commands, Run, assert_close_losses, curve, validation

from megajax.training import pipeline_timing


@pytest.mark.full
def test_a_run_changes_its_pipeline_on_the_way(commands: Commands, straight: Run, tmp_path: Path) -> None:
    """Interleaved, then 1F1B with a split vocabulary, selective recomputation: the numbers of one device.

    What the interleaved run left is evaluated on one device, and by two that split the vocabulary.
    """
    two = ("--mesh.pipe", 2, "--simulate-devices", 2)
    interleaved = ("--pipeline.schedule", "interleaved", "--pipeline.chunks", 2, "--model.num-layers", 4)
    layers = ("--model.num-layers", 4)
    split = ("--pipeline.vocabulary", "split")
    commands.train(tmp_path / "one", *layers, "--train.steps", 10)
    commands.train(tmp_path / "two", *interleaved, *two, "--train.steps", 5)
    for flags in ((), (*two, *split)):
        result = commands.perplexity(tmp_path / "two", *flags)
        assert result["step"] == 5
        assert result["loss"] == pytest.approx(validation(tmp_path / "two")[5], rel=1e-6)
    selective = ("--train.remat", "selective", "--train.microbatch", 2)
    commands.train(tmp_path / "two", *layers, *split, *selective, *two, "--train.steps", 10)
    assert_close_losses(curve(tmp_path / "two"), curve(tmp_path / "one"))
    assert validation(tmp_path / "two")[10] == pytest.approx(validation(tmp_path / "one")[10], rel=1e-6)


@pytest.mark.parametrize(
    "flags",
    [
        "--pipeline.schedule interleaved --pipeline.chunks 2 --model.num-layers 4 --train.remat layer",
        pytest.param(
            "--pipeline.vocabulary split --train.remat stage --pipeline.weight-gradients deferred",
            marks=pytest.mark.full,
        ),
    ],
)
def test_profile(commands: Commands, flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for every chunk of every stage with its layers and times, the bubble beside the predicted one; what
    deferred weight gradients would change; no run."""
    monkeypatch.setattr(pipeline_timing, "ROUNDS", 3)
    monkeypatch.setattr(pipeline_timing, "SECONDS_PER_MEASUREMENT", 0.03)
    arguments = ("--profile-pipeline", "--mesh.pipe", 2, "--simulate-devices", 2, "--model.dropout", 0, *flags.split())
    done = commands.train(tmp_path / "run", *arguments)
    assert not (tmp_path / "run").exists()
    lines = done.out.splitlines()
    limits = next(i for i, line in enumerate(lines) if line.startswith("max-deferred"))
    rows = [line.split() for line in lines[2:limits] if line[0].isdigit()]
    expected = [["0", "0", "1"], ["0", "1", "1"], ["1", "0", "1"], ["1", "1", "1"]]
    assert [row[:3] for row in rows] == (expected if "interleaved" in flags else [["0", "0", "2"], ["1", "0", "1"]])
    assert {len(row) for row in rows} == {7} and all(float(time) >= 0 for row in rows for time in row[3:])
    assert any(float(row[3]) > 0 for row in rows) and any(float(row[6]) > 0 for row in rows)
    bubble = next(line for line in lines if line.startswith("bubble over ideal"))
    published = (2 - 1) / (2 * 8) if "interleaved" in flags else (2 - 1) / 8
    predicted = published / 3 if "deferred" in flags else published
    assert f"{predicted:.4f} predicted for equal stages" in bubble and f"= {published:.4f})" in bubble
    together, *deferred = [line.split() for line in lines[limits + 1 : limits + 5]]
    assert together[0] == "together" and together[2:4] == ["1.000", "0.00"]
    assert [row[0] for row in deferred] == ["0", "1", "2"]
    kept = [float(row[3]) for row in deferred]
    assert 0 < kept[0] < kept[1] < kept[2] and len({row[4] for row in (together, *deferred)}) == 1
    assert any("all stages together: embedding" in line for line in lines) == ("split" in flags)

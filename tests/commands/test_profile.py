"""`--profile STEPS`, a trace that tools open, and `--profile-pipeline`."""

import gzip
import json
from pathlib import Path

import jax
import pytest
from processes import Commands, Run
from results import curve

from megajax.training import pipeline_timing


@pytest.mark.slow
def test_a_trace_of_two_steps(commands: Commands, straight: Run, tmp_path: Path) -> None:
    """In the run directory; the losses are those of a run without it. A start after these steps goes on without a
    trace."""
    done = commands.train(tmp_path, "--train.steps", 5, "--profile", "3:4")
    (session,) = (tmp_path / "profile" / "plugins" / "profile").iterdir()
    assert f"profile of steps 3 to 4: {session}" in done.out.splitlines()
    (trace,) = session.glob("*.trace.json.gz")
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"], "what Perfetto opens"
    (planes,) = session.glob("*.xplane.pb")
    names = {plane.name for plane in jax.profiler.ProfileData.from_file(str(planes)).planes}
    assert "/host:CPU" in names
    assert curve(tmp_path) == curve(straight.folder)[:5]
    assert not list(tmp_path.glob("profile.partial*"))
    assert 'profile = ""' in (tmp_path / "config.toml").read_text(), "a start's, not the run's"
    passed = commands.train(tmp_path, "--train.steps", 6, "--profile", "3:4").out
    assert "--profile 3:4: nothing is traced, because this start trains steps 6 to 6\n" in passed
    assert [*(tmp_path / "profile" / "plugins" / "profile").iterdir()] == [session]


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [
        "--pipeline.schedule interleaved --pipeline.chunks 2 --model.num-layers 4 --train.remat layer",
        "--pipeline.vocabulary split --train.remat stage --pipeline.weight-gradients deferred",
    ],
)
def test_stages(commands: Commands, flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for every chunk of every stage and the bubble beside the predicted one; what deferral would change."""
    monkeypatch.setattr(pipeline_timing, "ROUNDS", 3)
    monkeypatch.setattr(pipeline_timing, "SECONDS_PER_MEASUREMENT", 0.01)
    arguments = ("--profile-pipeline", "--mesh.pipe", 2, "--simulate-devices", 2, "--model.dropout", 0, *flags.split())
    done = commands.train(tmp_path / "run", *arguments)
    assert not (tmp_path / "run").exists()
    lines = done.out.splitlines()
    limits = next(i for i, line in enumerate(lines) if "of together" in line)
    rows = [line.split() for line in lines[2:limits] if line[0].isdigit()]
    expected = [["0", "0", "1"], ["0", "1", "1"], ["1", "0", "1"], ["1", "1", "1"]]
    assert [row[:3] for row in rows] == (expected if "interleaved" in flags else [["0", "0", "2"], ["1", "0", "1"]])
    assert {len(row) for row in rows} == {7} and all(float(time) >= 0 for row in rows for time in row[3:])
    assert any(float(row[3]) > 0 for row in rows) and any(float(row[6]) > 0 for row in rows)
    bubble = next(line for line in lines if line.startswith("bubble "))
    published = (2 - 1) / (2 * 8) if "interleaved" in flags else (2 - 1) / 8
    predicted = published / 3 if "deferred" in flags else published
    assert f"{predicted:.4f} predicted for equal stages" in bubble and f"= {published:.4f})" in bubble
    together, *deferred = [line.split() for line in lines[limits + 1 : limits + 3]]
    assert together[0] == "together" and together[2:4] == ["1.000", "0.00"]
    assert [row[0] for row in deferred] == ["deferred"]
    assert float(deferred[0][3]) > 0 and together[4] == deferred[0][4]
    assert any("summed over stages: embedding" in line for line in lines) == ("split" in flags)

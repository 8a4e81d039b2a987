"""`--profile STEPS`, a trace that tools open."""

import gzip
import json
from pathlib import Path

import jax
import pytest
from processes import Commands, Run
from results import curve


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

"""`--profile STEPS`: a trace that tools open, and a table of parts; a run trains as without it."""

import gzip
import json
import re
from pathlib import Path

import jax
import pytest
from processes import Commands, Run, curve


def test_a_trace_of_two_steps(commands: Commands, straight: Run, tmp_path: Path) -> None:
    """In the run directory, with the program's scopes; the losses are those of a run without it."""
    done = commands.train(tmp_path, "--train.steps", 5, "--profile", "3:4")
    (session,) = (tmp_path / "profile" / "plugins" / "profile").iterdir()
    lines = done.out.splitlines()
    assert f"profile of steps 3 to 4: {session}" in lines
    rows = {row[:34].strip(): row[34:].split() for row in lines[lines.index(f"profile of steps 3 to 4: {session}") :]}
    parts = {"attention, products", "attention, scores", "MLP", "norms", "head and loss", "optimizer"}
    assert parts <= rows.keys()
    assert all(float(cell) >= 0 for part in parts for cell in rows[part][:-1])
    total, span = map(float, re.findall(r"([\d.]+) ms", done.out.partition("operations take")[2])[:2])
    assert total > 0 and span > 0
    (trace,) = session.glob("*.trace.json.gz")
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"], "what Perfetto opens"
    (planes,) = session.glob("*.xplane.pb")
    names = {plane.name for plane in jax.profiler.ProfileData.from_file(str(planes)).planes}
    assert "/host:CPU" in names
    assert curve(tmp_path) == curve(straight.folder)[:5]
    assert not list(tmp_path.glob("profile.partial*"))
    assert 'profile = ""' in (tmp_path / "config.toml").read_text(), "a start's, not the run's"


@pytest.mark.parametrize("text", ["3:2", "0:4", "1-3", "1:1000", "101", "x"])
def test_steps_that_are_none(text: str, commands: Commands, tmp_path: Path) -> None:
    done = commands.run("train.py", commands.preset, "--run-dir", tmp_path / "run", "--profile", text)
    assert done.code == 2 and done.err.startswith(f"error: --profile {text}; valid: FIRST:LAST")
    assert not (tmp_path / "run").exists()


def test_steps_that_this_start_does_not_take(commands: Commands, half: Run) -> None:
    before = (half.folder / "metrics.jsonl").read_bytes()
    done = commands.run("train.py", commands.preset, "--run-dir", half.folder, "--profile", "9:12")
    assert done.code == 2
    assert done.err == "error: --profile 9:12: this start takes the steps 11 to 20; valid: some of them\n"
    assert (half.folder / "metrics.jsonl").read_bytes() == before

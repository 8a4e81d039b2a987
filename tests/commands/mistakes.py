"""How a user's mistake ends: exit code 2, and one line that names the flag or file and what would be valid."""

import re
from pathlib import Path
from typing import Any

import pytest
from processes import Commands, Finished, contents


def redundant(*values: object) -> Any:
    """A case whose like is already among the default tests."""
    return pytest.param(*values, marks=pytest.mark.full)


def mistake(commands: Commands, script: str, *arguments: object) -> str:
    """The one line of a command that must end as a user's mistake."""
    return one_line(commands.run(script, *arguments))


def one_line(done: Finished) -> str:
    """The line of a command that ended as a user's mistake."""
    assert done.code == 2, (done.code, done.out, done.err)
    assert "Traceback" not in done.out + done.err
    lines = [line for line in done.err.splitlines() if line.strip()]
    assert len(lines) == 1, done.err
    return lines[0]


def assert_says(line: str, *words: str) -> None:
    """Every word, `A|B` being either of two, is in the line."""
    for word in words:
        assert re.search(word, line), (word, line)


def train_mistake(commands: Commands, run_dir: Path, *arguments: object, preset: object = None) -> str:
    """The line of train.py, which must leave the run directory as it was, not there in most cases."""
    before = contents(run_dir) if run_dir.exists() else None
    line = mistake(commands, "train.py", preset or commands.preset, "--run-dir", run_dir, *arguments)
    assert (contents(run_dir) if run_dir.exists() else None) == before, "written to"
    return line

"""How a user's mistake ends: exit code 2, and one line that names the flag or file and what would be valid."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from processes import Commands, Finished
from results import contents


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


def failure(done: Finished) -> str:
    """The last line of a command that failed, with exit code 1."""
    assert done.code == 1, (done.code, done.out, done.err)
    return done.err.splitlines()[-1]


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


def by_line(*tables: tuple[str, str]) -> list[Any]:
    """The commands of tables and what is named, as parameters of a test. A table is the beginning of commands, and how
    each goes on, divided by bars; behind an arrow what is named, which otherwise is the last flag."""
    rows = [(begin, *row.partition("=>")[::2]) for begin, text in tables for row in text.split("|")]
    lines = [(f"{begin} {end.strip()}".strip(), named.strip()) for begin, end, named in rows]
    return [
        pytest.param(line, named or "--" + re.split("[ =]", line.rpartition(" --")[2])[0], id=f"{number} {line[-60:]}")
        for number, (line, named) in enumerate(lines)
    ]


def golden(lines: Mapping[str, str]) -> list[tuple[str, str]]:
    """Tables of commands and their whole lines."""
    return [(command, f"=> error: {line}") for command, line in lines.items()]


def assert_refused(commands: Commands, line: str, named: str, names: Mapping[str, object]) -> None:
    """The command ends with a line that names this, or is this if it begins with "error: ", and what would be valid; it
    writes nothing.

    `names` stand in capitals in the command and in what is named: texts, and paths, below which nothing may change.
    """
    places = [path for name, path in names.items() if isinstance(path, Path) and re.search(rf"\b{name}\b", line)]
    before = [unlocked(path) for path in places]

    def filled(text: str) -> str:
        return re.sub(r"\b[A-Z]+\b", lambda match: str(names.get(match[0], match[0])), text)

    done = commands.run(*filled(line).split())
    said = one_line(done)
    assert line.startswith("train.py") or not done.out
    assert said == filled(named) if named.startswith("error: ") else filled(named) in said, said
    assert re.search("; valid: |; did you mean |needs at least ", said), said
    assert len(said) < 600, "a long value is not repeated"
    assert [unlocked(path) for path in places] == before, "written to"


def unlocked(folder: Path) -> dict[str, str]:
    """The contents of a folder, without the lock of a test that another worker runs."""
    return {name: digest for name, digest in contents(folder).items() if not name.endswith("run.lock")}

"""The commands of README.md and docs: every one is read by the parser of its command, and some run as they are written
(`classes.py`)."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
from blocks import PAGES, ROOT, Command, blocks, commands, files
from classes import FULL, QUICK, STAND_INS

from megajax.__main__ import main
from megajax.core.errors import UserError
from megajax.core.options import options
from megajax.settings.config import Config
from megajax.settings.flags import Parser
from megajax.settings.other_names import OURS
from megajax.settings.presets import load_preset, resolve
from megajax.settings.validation import validate_imagined, with_data

COMMANDS = commands()


def test_what_runs_stands_on_a_page() -> None:
    assert {*QUICK, *FULL} <= {command.text for command in COMMANDS}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files that pages show."""
    for name, text in files().items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _of_megajax(command: Command) -> list[str]:
    """The words after `megajax`; none if it is another program's. A batch script's are those of `megajax train`."""
    words = command.words
    if words[0] == "sbatch":
        script = next(index for index, word in enumerate(words) if word.endswith(".sbatch"))
        return ["train", *words[script + 1 :]]
    if words[:2] == ["podman", "run"]:
        return words[words.index("megajax") + 1 :]
    return words[1:] if words[0] == "megajax" else []


class _Read(BaseException):
    """A command's parser has read its command line."""


def _wrong(words: list[str]) -> str:
    """What `megajax WORDS...` says of its command line, which its parser reads; of presets the configuration on its
    mesh is checked, too. A run's config.toml, which is not there, is the preset that `classes.py` says."""
    words = [STAND_INS.get(word, "demo") if word.endswith("/config.toml") else word for word in words]
    parse = Parser.parse_args

    def parse_and_leave(self: Parser, *arguments: Any) -> NoReturn:
        args = parse(self, *arguments)
        if hasattr(args, "preset"):
            validate_imagined(with_data(resolve(load_preset(args.preset), self.overrides(args)), 8))
        raise _Read

    with mock.patch.object(Parser, "parse_args", parse_and_leave):
        try:
            main(words)
        except UserError as error:
            return str(error)
        except _Read:
            return ""
        except SystemExit as end:  # --help, --version
            assert not end.code
            return ""
    raise AssertionError(f"{words}: did not ask its parser")


def test_flags_and_presets_are_known(folder: Path, no_names_stay: None) -> None:
    """Of every command of megajax, by its own parser: a flag that was renamed or removed, a preset that is not there, a
    value or a mesh that is not valid. Beside the plugins that pages show."""
    plugins = [code for page in PAGES for code in _plugins(page)]
    for name, code in plugins:
        Path(name).write_text(code)
    problems = {command: _wrong(words) for command in COMMANDS if (words := _of_megajax(command))}
    wrong = [f"{command}\n    {problem}" for command, problem in problems.items() if problem]
    assert len(plugins) == 2 and len(problems) > 40 and not wrong, "\n".join(wrong)


def _plugins(page: Path) -> list[tuple[str, str]]:
    """The names and code of the Python files that a page shows."""
    shown = re.findall(r"```python\n(# (\w+\.py)\n.*?)```", page.read_text(), re.DOTALL)
    return [(name, code) for code, name in shown]


def test_commands_in_the_text_are_known(folder: Path) -> None:
    """Those between backquotes, but for the ones with gaps (`megajax plan PRESET …`) and what recipes make new. Where
    only some of a command's words are told, they are known."""
    found, wrong = 0, []
    names = "train|eval|plan|verify|schedule|generate|convert|prepare"
    for page in PAGES:
        for span in re.findall(rf"`megajax ((?:{names}) [^`]*)`", page.read_text()):
            text = " ".join(span.split())
            if re.search(r"…|\.\.\.|[\[{|]|\b([A-Z]|PRESET|TASK|COMMAND|STEPS)\b|relu-squared|gpipe-fifo", text):
                continue
            found += 1
            problem = _wrong(Command(page.name, 0, text).words)
            if problem and not re.match(r"[^;]*( needs a value| missing)[;( ]", problem):
                wrong.append(f"{page.name}: {text}\n    {problem}")
    assert found >= 10 and not wrong, "\n".join(wrong)


def _rows() -> list[tuple[list[str], list[list[str]]]]:
    """The rows of docs/flags.md: our flags, and the code in each of the other columns."""
    lines = [line for line in (ROOT / "docs" / "flags.md").read_text().splitlines() if line.startswith("| `--")]
    cells = [[re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split("|")] for line in lines]
    return [(ours, theirs) for ours, *theirs in cells]


def test_flags_beside_those_of_others_are_ours() -> None:
    """They exist, with the values shown, and are those that the error for the other's name tells."""
    known = {option.flag: option for option in options(Config).values()}
    rows = _rows()
    beside: dict[str, list[str]] = {}
    for ours, theirs in rows:
        for flag, *value in (text.split() for text in ours if text.startswith("--")):
            option = known.get(flag.replace("--no-", "--"))
            assert option and set(value) <= set(map(str, option.choices)), (flag, value)
        for name in (name.split()[0] for cell in theirs for name in cell):
            beside[name] = [*beside.get(name, []), *ours]
    for name, ours in beside.items():
        told = OURS.get(name.removeprefix("--").replace("-", "_").rpartition(".")[2], "")
        assert not told.startswith("--") or re.split("[ ,]", told)[0] in " ".join(ours), (name, told, ours)
    assert len(rows) > 50 and len(beside) > 100


def _run(text: str, folder: Path, minutes: float) -> subprocess.CompletedProcess[str]:
    """A command as it is written, by bash; `megajax` and `python` are those of the tests."""
    programs = folder / ".programs"
    programs.mkdir(exist_ok=True)
    for name, line in (
        ("megajax", f'exec {sys.executable} -m megajax "$@"'),
        ("python", f'exec {sys.executable} "$@"'),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    paths = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    as_users = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    return subprocess.run(
        ["bash", "-c", text], cwd=folder, env=as_users | paths, capture_output=True, text=True, timeout=60 * minutes
    )


@pytest.mark.parametrize("text", QUICK)
def test_quick_commands(text: str, folder: Path) -> None:
    done = _run(text, folder, 2)
    assert done.returncode == 0, done.stderr
    assert QUICK[text] in done.stdout
    assert "--plot" not in text or (folder / "timeline.png").stat().st_size > 10_000


@pytest.mark.full
def test_longer_commands(folder: Path) -> None:
    """As a reader would, from the top: each goes on with what those before it left."""
    (folder / "README.md").symlink_to(ROOT / "README.md")
    for name, first in (("train", 0), ("dev", 1000), ("pairs", 2000)):
        right = "chosen" if name == "pairs" else "completion"
        records = [{"prompt": f"{n} + 1 =", right: f" {n + 1}", "rejected": f" {n}"} for n in range(first, first + 100)]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    for text in FULL:
        done = _run(text, folder, 60)
        assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert (folder / "runs" / "demo" / "loss.png").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_other_blocks(page: Path) -> None:
    """Python compiles, TOML is read, and what a diff changes stands in the code."""
    for language, line, lines in blocks(page):
        text = "\n".join(lines)
        if language == "python":
            compile(text, f"{page}:{line}", "exec")
        elif language == "toml":
            tomllib.loads(text)
        elif language == "diff":
            code = "\n".join(file.read_text() for file in (ROOT / "megajax").rglob("*.py"))
            assert "\n".join(each[1:] for each in lines if each[:1] in (" ", "-")) in code, f"{page}:{line}"

"""What stands where a command expects a file of its own: one line that names it, exit code 2, nothing written."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import Commands, Run, contents


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    """Who opens a named pipe to read would wait for ever."""
    signal.alarm(120)
    yield
    signal.alarm(0)


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def replaced(old: str, new: str) -> Callable[[Path], object]:
    return lambda file: file.write_text(file.read_text().replace(old, new, 1))


ODD: list[tuple[str, Callable[[Path], object], str]] = [
    ("metrics.jsonl", pipe, "is a named pipe"),
    ("metrics.jsonl", lambda file: file.write_text("Dear diary\n" * 20), "holds no figures of a run"),
    ("metrics.jsonl", lambda file: file.write_text("x" * 100_000), "line 1 has more than 65536 bytes"),
    ("config.toml", lambda file: file.write_text("a = " + "[" * 10_000), "nested"),
    ("config.toml", lambda file: file.write_text("seed = " + "9" * 5000), "digits"),
    ("data/tokens.bin", lambda file: file.write_bytes(bytes(file.stat().st_size)), "not what was written"),
    ("data/tokenizer/merges.txt", lambda file: file.unlink(), "No such file"),
    ("data/report.json", pipe, "not the report of a corpus"),
]


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [case if number in (0, 1, 5) else pytest.param(*case, marks=pytest.mark.full) for number, case in enumerate(ODD)],
)
def test_files_of_a_run(
    commands: Commands, half: Run, name: str, change: Callable[[Path], object], problem: str, tmp_path: Path
) -> None:
    """Training does not go on with them, and the run stays as it is."""
    run = shutil.copytree(half.folder, tmp_path / "run")
    change(run / name)
    before = contents(run / "checkpoints")
    done = commands.run("train.py", commands.preset, "--run-dir", run)
    assert done.code == 2, (done.out, done.err)
    (line,) = done.err.strip().splitlines()
    assert str(run / name) in line and problem in line
    assert contents(run / "checkpoints") == before


@pytest.mark.parametrize("command", ["eval.py perplexity --checkpoint RUN", "train.py RUN/config.toml --run-dir RUN"])
def test_a_configuration_larger_than_the_checkpoint(
    commands: Commands, half: Run, command: str, tmp_path: Path
) -> None:
    """The checkpoint is not damaged: the key that was changed is named, with the number that would be right."""
    run = shutil.copytree(half.folder, tmp_path / "run")
    replaced("num_layers = 3", "num_layers = 5")(run / "config.toml")
    done = commands.run(*command.replace("RUN", str(run)).split())
    assert done.code == 2, (done.out, done.err)
    (line,) = done.err.strip().splitlines()
    assert "config.toml: model.num_layers is 5; valid: 3" in line and "damaged" not in line


def test_tokens_that_no_model_has(commands: Commands, half: Run, tmp_path: Path) -> None:
    folder = shutil.copytree(half.folder / "data" / "tokenizer", tmp_path / "tokenizer")
    vocabulary = json.loads((folder / "vocab.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(vocabulary | {"large": 2**40}))
    done = commands.run("train.py", commands.preset, "--run-dir", tmp_path / "run", "--tokenizer.path", folder)
    assert done.code == 2 and "vocab.json: no vocabulary; valid: one JSON object of token: id" in done.err, done.err
    assert not (tmp_path / "run").exists()

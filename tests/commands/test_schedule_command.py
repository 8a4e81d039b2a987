"""`megajax schedule`: what it prints, draws and refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from inside import call

from megajax.cli import main


def schedule(capsys, *arguments: object) -> str:
    main(["schedule", *map(str, arguments)])
    return capsys.readouterr().out


INTERLEAVED = ("--mesh.pipe", 4, "--pipeline.schedule", "interleaved", "--pipeline.chunks", 2, "--microbatches", 8)


def test_one_row_a_stage(capsys) -> None:
    """The table as text, with ticks, bubble and chunks in flight beside what is published."""
    lines = schedule(capsys, *INTERLEAVED).splitlines()
    stages = [line for line in lines if line.startswith("stage")]
    assert len(stages) == 4 and all(line.count("|") == 26 for line in stages)
    cells = [part.split() for part in stages[3].split("|")[1:]]
    assert cells[:4] == [[".", "."]] * 3 + [["0a", "."]] and cells[7] == ["0b", "0b"]
    rest = "\n".join(lines)
    assert "ticks             26" in rest
    assert "0.1875" in rest and "published (p-1)/(v*m) = 0.1875" in rest
    assert "11, 9, 7, 5 by stage" in rest


def test_json(capsys) -> None:
    """Per tick a list over stages of [forward, backward], each [microbatch, chunk] or null."""
    found = json.loads(schedule(capsys, *INTERLEAVED, "--json").splitlines()[-1])
    assert found["ticks"] == 26 == len(found["table"])
    assert found["bubble_overhead"] == pytest.approx(3 / 16) and found["in_flight"] == [11, 9, 7, 5]
    assert found["table"][0] == [[[0, 0], None], *[[None, None]] * 3]
    assert found["table"][7] == [[[3, 1], None], [[2, 1], None], [[1, 1], None], [[0, 1], [0, 1]]]
    for direction in (0, 1):
        ran = [(*cells[s][direction], s) for cells in found["table"] for s in range(4) if cells[s][direction]]
        assert sorted(ran) == sorted((i, c, s) for i in range(8) for c in range(2) for s in range(4))


@pytest.mark.parametrize("suffix", ["png", "svg", "SVG"])
def test_plot(capsys, tmp_path: Path, suffix: str) -> None:
    """The timeline as a picture; nothing else is left behind."""
    file = tmp_path / f"timeline.{suffix}"
    assert str(file) in schedule(capsys, "--mesh.pipe", 3, "--microbatches", 4, "--plot", file)
    assert list(tmp_path.iterdir()) == [file]
    content = file.read_bytes()
    if suffix == "png":
        assert content.startswith(b"\x89PNG")
    else:
        assert content.count(b"<path") > 2 * 3 * 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--mesh.pipe 2 --microbatches 0", "--microbatches 0; valid: 1 to"),
        ("--mesh.pipe 2", "--microbatches missing; valid:"),
        ("--mesh.pipe 0 --microbatches 2", "--mesh.pipe 0; valid: 1 to 100000"),
        (
            "--microbatches 2 --pipeline.schedule zigzag",
            "'zigzag'; valid: 1f1b, gpipe, interleaved",
        ),
        ("--microbatches 2 --pipeline.schedule interleaved --pipeline.chunks 2", "--mesh.pipe 1; valid: --mesh.pipe 2"),
        ("--microbatches 2 --pipeline.schedule interleaved --mesh.pipe 2", "--pipeline.chunks 1 with"),
        ("--microbatches 2 --pipeline.chunks 2 --mesh.pipe 2", "--pipeline.chunks 2 with --pipeline.schedule 1f1b"),
        ("--microbatches 2 --plot timeline.pdf", "--plot timeline.pdf; valid: a file that ends in .png or .svg"),
        ("--microbatches 2 --plot no/such/folder.png", "--plot no/such/folder.png: cannot be written"),
        ("--microbatches 100000000 --mesh.pipe 4", "a table of 400000000 forwards; valid: at most 250000"),
        ("--microbatches 1 --mesh.pipe 100000", "and 500 stages"),
        ("--microbatches 2 --microbatch 2", "--microbatch: unknown flag; did you mean --microbatches?"),
    ],
)
def test_bad_input(arguments: str, words: str) -> None:
    """One line on standard error, exit code 2, nothing on standard output."""
    code, out, err = call("-m", "megajax", "schedule", *arguments.split())
    assert code == 2 and not out
    assert words in err and err.count("\n") == 1


@pytest.mark.parametrize(("arguments", "words"), [((), "COMMAND missing"), (("frobnicate",), "unknown command 'frob")])
def test_unknown_commands(arguments: tuple[str, ...], words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "megajax", *arguments], capture_output=True, text=True, timeout=100)
    assert (
        done.returncode == 2 and words in done.stderr and "; valid: convert, generate, prepare, schedule" in done.stderr
    )

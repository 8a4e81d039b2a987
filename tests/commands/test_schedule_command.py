"""`megajax schedule`: what it prints and draws."""

import json
from pathlib import Path

import matplotlib
import pytest
from tiny import full

from megajax.__main__ import main
from megajax.commands.timeline_picture import COLOURS


def schedule(capsys, *arguments: object) -> str:
    main(["schedule", *map(str, arguments)])
    return capsys.readouterr().out


INTERLEAVED = ("--mesh.pipe", 4, "--pipeline.schedule", "interleaved", "--pipeline.chunks", 2, "--microbatches", 8)


def test_one_row_a_stage(capsys) -> None:
    lines = schedule(capsys, *INTERLEAVED).splitlines()
    stages = [line for line in lines if line.startswith("stage")]
    assert len(stages) == 4 and all(line.count("|") == 26 for line in stages)
    cells = [part.split() for part in stages[3].split("|")[1:]]
    assert cells[:4] == [[".", "."]] * 3 + [["F0a", "."]] and cells[7] == ["F0b", "B0b"]
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


DEFERRED = ("--pipeline.weight-gradients", "deferred")


def test_deferral_as_json(capsys) -> None:
    """The third element of a cell is a list, those in the place of a forward first; together, there is none."""
    arguments = ("--mesh.pipe", 2, "--microbatches", 2, "--json")
    found = json.loads(schedule(capsys, *arguments, *DEFERRED))
    assert found["table"] == [
        [[[0, 0], None, []], [None, None, []]],
        [[[1, 0], None, []], [[0, 0], [0, 0], []]],
        [[None, [0, 0], [[0, 0]]], [[1, 0], [1, 0], []]],
        [[None, [1, 0], [[1, 0]]], [None, None, [[0, 0], [1, 0]]]],
    ]
    assert found["entries"] == {"forward": 2, "factors": 2, "by_stage": [2, 2]}
    assert (found["time"], found["ideal_time"]) == (7, 6) and found["bubble_overhead"] == pytest.approx(1 / 6)
    together = json.loads(schedule(capsys, *arguments))
    assert together["entries"] == {"forward": 2, "factors": 0, "by_stage": together["in_flight"]}
    assert {len(cell) for row in together["table"] for cell in row} == {2}


PASSES = ["forward", "backward", "input gradient", "weight gradient"]


@pytest.mark.parametrize(
    ("suffix", "flags", "words"),
    [("png", (), []), ("SVG", (), PASSES[:2]), ("svg", DEFERRED, [PASSES[0], *PASSES[2:]])],
)
def test_plot(capsys, tmp_path: Path, suffix: str, flags: tuple, words: list[str]) -> None:
    file = tmp_path / f"timeline.{suffix}"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        assert str(file) in schedule(capsys, "--mesh.pipe", 3, "--microbatches", 4, "--plot", file, *flags)
    assert list(tmp_path.iterdir()) == [file]
    if suffix == "png":
        assert file.read_bytes().startswith(b"\x89PNG")
        return
    content = file.read_text()
    assert content.count("<path") > 2 * 3 * 4 and (COLOURS[2][0] in content) == bool(flags)
    assert [word for word in PASSES if f">{word}<" in content] == words


LARGE = ("--mesh.pipe", 16, "--pipeline.schedule", "interleaved", "--pipeline.chunks", 2, "--microbatches", 512)


def test_a_large_schedule_in_parts(capsys) -> None:
    """Warm-up, one group of microbatches and cool-down, and what is left out; figures and JSON are of the whole."""
    lines = schedule(capsys, *LARGE).splitlines()
    assert len(lines) < 70 and max(map(len, lines)) < 1000
    assert [line for line in lines if ": ticks" in line] == [
        "warm-up: ticks 0 to 46",
        "steady: ticks 512 to 543",
        "cool-down: ticks 1,023 to 1,069",
    ]
    assert "left out: 944 of 1,070 ticks; --json has them" in lines
    first = [line for line in lines if line.startswith("stage 0 ")]
    assert [row.split("|")[1].split() for row in first] == [["F0a", "."], ["F256a", "B226a"], ["F511b", "B481a"]]
    assert "ticks             1070" in lines
    assert len(json.loads(schedule(capsys, *LARGE, "--json"))["table"]) == 1070


@pytest.mark.parametrize("flags", [("--mesh.pipe", 128, "--microbatches", 8), full(LARGE)])
def test_plot_of_a_large_schedule(capsys, tmp_path: Path, flags: tuple) -> None:
    """All of its passes, as pixels without names: the file stays small."""
    file = tmp_path / "large.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        schedule(capsys, *flags, "--plot", file)
    content = file.read_text()
    assert "<image" in content and ">stage 0<" in content and ">3<" not in content and len(content) < 500_000

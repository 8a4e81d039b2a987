"""The log of a run: what is written, what is shown, and what a resumed run keeps."""

import errno
import gc
import importlib
import io
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import RecordWriter
from tiny import tiny_config

from megajax.core.errors import UserError
from megajax.host.transcript import transcript
from megajax.runs.metrics import read_metrics
from megajax.settings.config import to_toml
from megajax.training import display, trackers
from megajax.training.display import Display, StepsDisplay, time_text
from megajax.training.experts_plot import ExpertsPlot
from megajax.training.given import NOTHING
from megajax.training.loop import Trainer
from megajax.training.plot import Curves, LossPlot, plot_loss, smoothed
from megajax.training.run_log import RunLog

MORE = {"loss_scale": 1.0, "skipped_steps": 0, "tokens": 512, "seconds": 0.5, "tokens_per_second": 1024.0}
MORE |= {"data_seconds": 0.001}


def log_steps(log: RunLog, first: int, last: int) -> None:
    for step in range(first, last + 1):
        log.record_step(step, {"loss": 10 / 3 / step, "grad_norm": 0.1, "learning_rate": 1e-4, **MORE})


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def events(run_dir: Path) -> Iterator[Event]:
    """What TensorBoard's files hold, read record by record: length, checksum, event, checksum."""
    for path in sorted((run_dir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            yield Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]


def tensorboard_points(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """The points of all figures, later files' purges applied."""
    points: dict[str, list[tuple[int, float]]] = {}
    for event in events(run_dir):
        if event.HasField("session_log"):
            points = {tag: [point for point in old if point[0] < event.step] for tag, old in points.items()}
        for value in event.summary.value:
            if value.HasField("simple_value"):
                points.setdefault(value.tag, []).append((event.step, value.simple_value))
    return points


def test_a_run_writes_metrics_events_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLog(tmp_path, total_steps=20, log_every=10) as log:
        log_steps(log, 1, 20)
        log.record_validation(20, 2.5)
        assert len(lines(tmp_path)) == 21, "every line is there at once"
        log.display.print("[done] in plain words")
    first, last = lines(tmp_path)[0], lines(tmp_path)[-1]
    assert first == {"step": 1, "loss": 10 / 3, "grad_norm": 0.1, "learning_rate": 1e-4, **MORE}
    assert last == {"step": 20, "validation_loss": 2.5}
    events = tensorboard_points(tmp_path)
    names = {"grad_norm", "learning_rate", "loss_scale", "skipped_steps", "tokens_per_second"}
    assert set(events) == {"loss/training", "loss/validation"} | names
    assert events["loss/validation"] == [(20, 2.5)]
    assert [step for step, _ in events["loss/training"]] == list(range(1, 21))
    assert matplotlib.image.imread(tmp_path / "loss.png").shape[:2] == (585, 1040)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl", "tensorboard"]
    said = capsys.readouterr().out.splitlines()
    assert "step 10/20  loss 0.3333  1,024 tokens/s  0:05 left" in said[0] and said[3:] == ["[done] in plain words"]
    assert "step 20/20  loss 0.1667" in said[1] and "validation loss 2.5000  perplexity 12.18" in said[2]


LOADS = np.arange(8, dtype=np.int32).reshape(2, 4)
FOREIGN = b'\xff\x00\n[1]\n{}\n# a spike\n{"step": 7, "note": "here"}\n{"step":  2, "loss": 1e0}\n'


@pytest.mark.parametrize("tail", [b"", b'{"step": 3, "loss": 1.0}', b'{"step": 7, "lo', b'{"st', b"my own words"])
def test_a_resumed_run_drops_only_later_and_half_written_records(
    tail: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All other lines stay byte for byte, also those of loads."""
    drawn: list[int] = []
    monkeypatch.setattr("megajax.training.plot.plot_loss", lambda *_: None)
    monkeypatch.setattr("megajax.training.experts_plot.plot_loads", lambda path, name, loads: drawn.append(len(loads)))

    def log_both(log: RunLog, first: int, last: int) -> None:
        for step in range(first, last + 1):
            log.record_step(
                step, {"loss": 10 / 3 / step, "grad_norm": 0.1, "learning_rate": 1e-4, **MORE}, LOADS * step
            )

    file = tmp_path / "metrics.jsonl"
    with RunLog(tmp_path, total_steps=6) as log:
        log_both(log, 1, 4)
        log.record_validation(4, 2.0)
        kept = file.read_bytes()
        log_both(log, 5, 6)
    straight = read_metrics(tmp_path)
    with file.open("ab") as end:
        end.write(FOREIGN + tail)
    kept += FOREIGN + (tail + b"\n" if tail.startswith(b"my") else b"")
    with RunLog(tmp_path, total_steps=6, finished_steps=4) as log:
        assert file.read_bytes() == kept
        log_both(log, 5, 6)
    again = read_metrics(tmp_path)
    foreign = again.pop(9)
    assert foreign == {"step": 2, "loss": 1.0} and again[9].pop("resumed_from") == 4, "where it went on"
    assert again == straight and straight[1] == {"step": 1, "expert_load": LOADS.tolist()}
    assert [step for step, _ in tensorboard_points(tmp_path)["loss/training"]] == [1, 2, 3, 4, 5, 6]
    assert drawn == [4, 6, 6], "at the validation and at each end, with those of the first start"


def test_any_number_of_loads_of_any_size_is_read(tmp_path: Path) -> None:
    large = {"step": 1, "expert_load": [[10_000_000] * 512] * 128}
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(large)}\n" + '{"step": 2, "expert_load": [[1, 2]]}\n' * 1001)
    assert len(read_metrics(tmp_path)) == 1002
    for load in ("[]", "[[]]", "[[1], [1, 2]]", "[[-1]]", "[[1.5]]", "[[true]]", "[1]", "5", "null"):
        (tmp_path / "metrics.jsonl").write_text(f'{{"step": 2, "expert_load": {load}}}\n')
        assert read_metrics(tmp_path) == [], load


def test_only_one_process_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLog(tmp_path / "run", total_steps=3, log_every=1, write=False) as log:
        log_steps(log, 1, 3)
        log.record_validation(3, 1.0)
        log.display.print("hello")
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_a_run_that_starts_anew_keeps_nothing_and_one_that_cannot_be_written_is_a_mistake(tmp_path: Path) -> None:
    for _ in range(2):
        with RunLog(tmp_path, total_steps=3) as log:
            log_steps(log, 1, 3)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        RunLog(tmp_path / "file" / "run", total_steps=1)


def test_a_loss_that_is_not_finite_is_null(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    with RunLog(tmp_path, total_steps=2) as log:
        log.record_step(1, {"loss": np.nan, "grad_norm": np.inf, "learning_rate": 0.0, **MORE})
        log.record_validation(1, np.inf)
    assert [(line.get("loss"), line.get("grad_norm")) for line in lines(tmp_path)] == [(None, None), (None, None)]
    with RunLog(tmp_path, total_steps=2, finished_steps=1):
        pass
    assert len(read_metrics(tmp_path)) == 2


def test_a_picture_of_any_name_and_any_number_of_points(tmp_path: Path) -> None:
    for training, validation in (([], []), ([(1, 3.0)], []), ([], [(1, 3.0)]), ([(1, 3.0), (2, float("nan"))], [])):
        plot_loss(tmp_path / "loss.png", "a $run_{1 走る", Curves(training, validation))
        assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_the_list_of_the_end_has_what_is_drawn_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without validations nothing is drawn before."""
    monkeypatch.setattr("megajax.training.plot.plot_loss", lambda path, *_: path.touch())
    run = object.__new__(Trainer)
    run.config = SimpleNamespace(run_dir=str(tmp_path))  # type: ignore[assignment]
    run.checkpoints = run.watchdog = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
    run.supplied = NOTHING
    run.log = RunLog(tmp_path, total_steps=2)
    log_steps(run.log, 1, 2)
    monkeypatch.setattr(run, "_steps", lambda: None)
    monkeypatch.setattr(run, "_summary", lambda: None)
    run.go()
    assert f"  {tmp_path / 'loss.png'}  loss curves\n" in capsys.readouterr().out


def test_a_terminal_shows_a_bar_with_loss_speed_and_time_left() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=200, color_system=None, legacy_windows=False, _environ={})
    shower = StepsDisplay(100, 0, 1, console=console)
    figures = {"tokens": 1000, "learning_rate": 1e-3, "grad_norm": 2.0, "tflops_per_device": 30.0, "mfu": 0.5}
    shower.show_step(1, figures | {"loss": 5.5, "seconds": 30.0})  # the step that compiled
    shower.show_step(2, figures | {"loss": 5.25, "seconds": 0.5})
    shower.show_step(3, figures | {"loss": 5.0, "seconds": 0.5})
    shower.print("[a] note")
    with shower.phase("validation", 4, announced=False) as advance:
        advance(3)
        time.sleep(0.25)
    shower.close_steps()
    shown = screen.getvalue()
    assert "step 3/100" in shown and "loss 5.0000  2,000 tokens/s  0:48 left  30 TFLOP/s per device  50.0% MFU" in shown
    assert re.search(r"validation\s+━+.*0:00", shown), "a bar and a clock of its own"
    assert "[a] note\n" in shown
    with Display(console=console).phase("tokenizing data[v1]/corpus[/v1].txt"):  # which may hold what is markup to Rich
        pass
    assert "tokenizing data[v1]/corpus[/v1].txt" in screen.getvalue()


def test_what_is_said_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In log.txt: plain lines as without a terminal, which nothing in them can command; of every start, as long as the
    file is not too large, and the disk not full."""
    console = Console(file=io.StringIO(), force_terminal=True, width=200, _environ={})
    transcript.end()
    transcript.add("before the run directory is known")
    for _ in range(2):
        transcript.begin(tmp_path)
        shower = StepsDisplay(6, 0, 3, console=console)
        with shower.phase("compiling \x1b[2Jthe step"):
            pass
        log = {"learning_rate": 1e-3, "grad_norm": 2.0, "tokens": 1000, "loss": 5.5, "seconds": 0.5}
        for step in range(1, 7):
            shower.show_step(step, log)
        shower.print("a \x9b0m\u202esample\tof\ntwo lines, \udce9")
        shower.close_steps()
        transcript.end()
    assert "\x1b[2J" not in console.file.getvalue()
    text = "  2,000 tokens/s  0:0{} left  learning rate 0.001  gradient norm 2"
    steps = [f"step {step}/6  loss 5.5000{text.format((6 - step + 1) // 2)}" for step in (3, 6)]
    said = ["compiling \\u001b[2Jthe step", *steps, "a \\u009b0m\\u202esample\tof", "two lines, \\udce9"]
    first, early, *rest = (tmp_path / "log.txt").read_text().splitlines()
    assert first.startswith("--- 20") and early == "before the run directory is known"
    assert rest[:5] == rest[6:] == said and rest[5].startswith("--- 20")

    monkeypatch.setattr("megajax.host.transcript.MOST_BYTES", 100)
    transcript.begin(tmp_path)
    for number in range(100):
        transcript.add(f"line {number}")
    kept = "".join((tmp_path / name).read_text() for name in ("log.txt.1", "log.txt"))
    assert len(kept) <= 220 and kept.endswith("line 97\nline 98\nline 99\n")
    monkeypatch.setattr("megajax.host.transcript._opened", lambda file: os.open("/dev/full", os.O_WRONLY))
    transcript.begin(tmp_path)
    transcript.add("no room")
    transcript.end()


def test_a_group_continues_a_log(tmp_path: Path) -> None:
    before = os.umask(0o002)
    transcript.begin(tmp_path)
    os.umask(before)
    transcript.end()
    assert (tmp_path / "log.txt").stat().st_mode & 0o777 == 0o664


def test_the_speed_while_the_batch_grows(capsys: pytest.CaptureFixture[str]) -> None:
    """Twice the tokens in twice the time are the same speed; the steps that are left have the new size."""
    progress = StepsDisplay(100, 0, 1)
    figures = {"loss": 5.0, "learning_rate": 1e-3, "grad_norm": 2.0, "mfu": 0.5}
    for step in range(1, 21):
        progress.show_step(step, figures | {"tokens": 1000, "seconds": 0.5})
    progress.show_step(21, figures | {"tokens": 2000, "seconds": 1.0})
    *_, old, new = capsys.readouterr().out.splitlines()
    assert "2,000 tokens/s  0:40 left  50.0% MFU" in old and "2,000 tokens/s  1:19 left  50.0% MFU" in new
    assert [time_text(seconds) for seconds in (0, 59.6, 3600, 90_061)] == ["0:00", "1:00", "1:00:00", "1d 01:01:01"]


def test_what_has_taken_the_run_directory_s_place_gets_no_picture(tmp_path: Path) -> None:
    """The log goes on in the file that it has; nothing is drawn in a folder of somebody else's."""
    run_dir = tmp_path / "run"
    log = RunLog(run_dir, total_steps=4, console=Console(file=io.StringIO()))
    log_steps(log, 1, 2)
    run_dir.rename(tmp_path / "elsewhere")
    run_dir.mkdir()
    log_steps(log, 3, 4)
    log.record_validation(4, 2.0)
    log.close()
    assert list(run_dir.iterdir()) == [] and len(lines(tmp_path / "elsewhere")) == 5


def test_a_disk_that_has_no_room_for_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run goes on without them, as long as metrics.jsonl has room."""

    def full(self: RecordWriter, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with RunLog(tmp_path, total_steps=40, log_every=100) as log:
        log_steps(log, 1, 2)
        monkeypatch.setattr(RecordWriter, "write", full)
        log_steps(log, 3, 40)
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 41))
    told = f"{tmp_path / 'tensorboard'} cannot be written: no space left on device; recording there has stopped"
    assert told in " ".join(capsys.readouterr().out.split())
    assert [step for step, _ in tensorboard_points(tmp_path)["loss/training"]] == [1, 2]


def test_what_a_plot_shows() -> None:
    """Skipped steps, where the run went on, the tokens of all steps; of a file without these, losses."""
    old, new = Curves(), Curves()
    for step in range(1, 5):
        old.add({"step": step, "loss": 1.0})
        more = {"tokens": 8, "skipped_steps": int(step >= 3)} | ({"resumed_from": 2} if step == 3 else {})
        new.add({"step": step, "loss": None if step == 3 else 1.0, **more})
    assert (old.training, old.tokens, old.skipped, old.resumed) == ([(n, 1.0) for n in range(1, 5)], [], [], [])
    assert new.tokens == [(1, 8), (2, 16), (3, 24), (4, 32)] and (new.skipped, new.resumed) == ([3], [2])


def test_a_smoothed_line_keeps_straight_ones() -> None:
    line = np.linspace(9.0, 1.0, 200)
    np.testing.assert_allclose(smoothed(line)[:-5], line[:-5])
    assert smoothed(np.tile([1.0, 3.0], 100))[50:] == pytest.approx(2.0, abs=0.2)


def test_texts_for_tensorboard(tmp_path: Path) -> None:
    with RunLog(tmp_path, total_steps=2) as log:
        log.record_config(config := tiny_config())
        log.record_text(2, "sample", "def read(")
    values = [value for event in events(tmp_path) for value in event.summary.value]
    found = {value.tag: value.tensor.string_val[0].decode() for value in values}
    lines = "\n".join(f"    {line}" for line in to_toml(config).splitlines())
    assert found == {"config/text_summary": lines, "sample/text_summary": "    def read("}


def test_a_phase_where_nobody_watches(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line when it begins, and one from time to time."""
    monkeypatch.setattr(display, "_EVERY", 0.01)
    with Display().phase("validation", 9) as advance:
        advance(4)
        time.sleep(0.1)
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert (first, second) == ("validation", "validation: 0:00, 4 of 9")


@pytest.mark.usefixtures("quick_collections")
@pytest.mark.parametrize("picture", ["loss.png", pytest.param("experts.png", marks=pytest.mark.full)])
def test_drawn_figures_are_freed(picture: str, tmp_path: Path) -> None:
    """Without a full collection, which is rare in a long run."""
    curves = Curves()
    curves.add({"step": 1, "loss": 4.0, "tokens": 100})
    loads = [(1, np.ones((2, 4), np.int32))]
    tracker = LossPlot(tmp_path, curves) if picture == "loss.png" else ExpertsPlot(tmp_path, loads)
    gc.collect()
    gc.disable()
    tracker.close(finished=True)
    kept = [each for each in gc.get_objects() if isinstance(each, Figure)]
    gc.enable()
    assert not kept and (tmp_path / picture).exists()


def test_a_hidden_package_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """But one that is imported already is; so torch, which takes seconds, is not imported."""
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    with trackers._hidden("wave"), trackers._hidden("json"):
        with pytest.raises(ImportError):
            importlib.import_module("wave")
        assert importlib.import_module("json") is json
    assert importlib.import_module("wave") and sys.modules["json"] is json

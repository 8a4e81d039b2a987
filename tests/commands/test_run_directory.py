"""What a run leaves behind, and what it prints."""

import math
import re
import shutil
from pathlib import Path

import pytest
from processes import Commands, Run
from results import checkpoint_steps, contents, records, training, validation


def test_every_step_is_recorded_once_with_its_figures(straight: Run) -> None:
    """metrics.jsonl: 20 training lines in order, validation lines on schedule, numbers in full precision."""
    lines = training(straight.folder)
    assert [line["step"] for line in lines] == list(range(1, 21))
    for line in lines:
        assert line.keys() >= {"step", "loss", "grad_norm", "learning_rate", "tokens", "seconds", "tokens_per_second"}
        assert line["tokens"] == 8 * 32 and line["seconds"] > 0 and line["grad_norm"] > 0
        assert line["tokens_per_second"] == pytest.approx(line["tokens"] / line["seconds"])
        flops = 72 * 8 * 32 * 3 * 32**2 * (1 + 32 / (6 * 32) + 320 / (12 * 3 * 32))  # the paper's count, by hand
        assert line["tflops_per_device"] == pytest.approx(flops / line["seconds"] / 1e12)
    assert any(len(repr(line["loss"])) > 10 for line in lines), "not rounded"
    rates = [line["learning_rate"] for line in lines]
    assert rates[0] < max(rates) == pytest.approx(3e-3) and rates[-1] < rates[10], "warm-up, then decay"
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5, "it learns"
    assert list(validation(straight.folder)) == [10, 20]
    assert len(records(straight.folder)) == 22


def test_the_files_of_a_run(straight: Run) -> None:
    folder = straight.folder
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert [file.stat().st_size > 100 for file in folder.rglob("events.out.tfevents*")] == [True]
    assert checkpoint_steps(folder) == [10, 15, 20]
    assert {entry.name for entry in (folder / "checkpoints").iterdir()} == {"10", "15", "20"}
    assert (folder / "config.toml").is_file()
    heading, said = (folder / "log.txt").read_text().split("\n", 1)
    assert re.fullmatch(rf"--- 20\d\d-\S+ \S+ train.py \S+ --run-dir {folder} --sample.tokens 8 .*'the end'", heading)
    assert said == straight.finished.out
    assert "batch: 8 sequences per step; 8 microbatches of 1 with gradient accumulation\n" in said
    assert not [path for path in folder.rglob("*") if "partial" in path.name or "tmp" in path.name]


def test_without_validation_nothing_is_held_out(commands: Commands, corpus: Path, tmp_path: Path) -> None:
    """Of a single document, which could not be divided, for a fifth of an epoch; `eval` then needs a text."""
    (tmp_path / "texts").mkdir()
    shutil.copy(corpus, tmp_path / "texts")
    run, flags = tmp_path / "run", ("--train.eval-every", 0, "--data.validation-fraction", 0, "--train.epochs", 0.2)
    done = commands.train(run, *flags, "--data.path", tmp_path / "texts")
    steps = math.ceil(0.2 * float(re.search(r"an epoch is ([\d.]+) steps", done.out)[1]))
    assert f"not validated (no validation data) after {steps} steps" in done.out
    assert [line["step"] for line in records(run)] == [*range(1, steps + 1)] and not validation(run)
    assert checkpoint_steps(run)[-1] == steps > 5
    refused = commands.run("eval.py", "perplexity", "--checkpoint", run)
    assert refused.code == 2 and f"--data missing: {run} has no validation split" in refused.err
    assert commands.perplexity(run, "--data", corpus)["loss"] > 0


def test_a_finished_run_is_left_as_it_is(commands: Commands, straight: Run, tmp_path: Path) -> None:
    run = shutil.copytree(straight.folder, tmp_path / "run")
    before = contents(run / "checkpoints")
    assert "20 steps" in commands.train(run).out
    assert records(run) == records(straight.folder) and contents(run / "checkpoints") == before

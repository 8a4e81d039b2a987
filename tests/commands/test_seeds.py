"""--seeds: several runs one after the other, and the median of them."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from finetuning import Finetuning, dev_of, stop_after
from mistakes import assert_says, one_line
from processes import assert_same_checkpoint, checkpoint_steps, contents, curve

LAST = 10  # step


def report(folder: Path) -> dict[str, Any]:
    """What seeds.json says."""
    return json.loads((folder / "seeds.json").read_text())


def finished(tuning: Finetuning, folder: Path, figures: dict[int, float]) -> None:
    """Runs of seeds with such accuracies, as if each had been trained."""
    for seed, accuracy in figures.items():
        run = shutil.copytree(tuning.run("mnli"), folder / f"seed-{seed}")
        preset, metrics = run / "config.toml", run / "metrics.jsonl"
        text = preset.read_text()
        assert text.count("\nseed = 0\n") == 1 or text.startswith("seed = 0\n")
        preset.write_text(re.sub(r"^seed = 0$", f"seed = {seed}", text, flags=re.M))
        metrics.write_text(re.sub(r'"dev/accuracy": [0-9.]+', f'"dev/accuracy": {accuracy}', metrics.read_text()))


@pytest.mark.parametrize(
    ("figures", "median"),
    [
        ({0: 70.0, 1: 10.0, 2: 40.0}, 2),
        ({4: 20.0, 5: 10.0, 6: 90.0, 7: 30.0}, 4),
        ({0: 100.0, 1: 9.5, 2: 90.0, 3: 9.0, 4: 10.5}, 4),
    ],
)
def test_finished_seeds_are_not_trained_again(
    tuning: Finetuning, tmp_path: Path, figures: dict[int, float], median: int
) -> None:
    """Their median by dev score, the lower one of two, its checkpoint, and all figures are reported."""
    folder, seeds = tmp_path / "seeds", ("--seeds", len(figures), "--seed", min(figures))
    finished(tuning, folder, figures)
    before = contents(folder)
    done = tuning.train("mnli", folder, *seeds)
    assert {name: digest for name, digest in contents(folder).items() if name != "seeds.json"} == before
    found = report(folder)
    assert (found["median_seed"], found["median"], found["figure"]) == (median, figures[median], "accuracy")
    checkpoint = folder / f"seed-{median}" / "checkpoints" / str(LAST)
    assert Path(found["median_checkpoint"]) == checkpoint and checkpoint.is_dir()
    assert Path(found["median_run"]) == folder / f"seed-{median}"
    assert {entry["seed"]: entry["accuracy"] for entry in found["seeds"]} == figures
    for entry in found["seeds"]:
        assert entry["records"] == 24 and "accuracy_matched" in entry
    lines = done.out.splitlines()
    for seed, accuracy in figures.items():
        assert f"seed {seed}: accuracy {accuracy:.2f}" + ("  (median)" if seed == median else "") in lines
    assert f"median accuracy {figures[median]:.2f}: {checkpoint}" in lines[-1]


@pytest.mark.full
def test_seeds_stopped_in_the_middle(tuning: Finetuning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three seeds, of which SIGTERM stops the second: the same command goes on with it, and leaves the first alone;
    each ends as a run with that seed by itself."""
    folder, flags = tmp_path / "seeds", ("--seeds", 3)
    finished(tuning, folder, {0: 33.0})
    stop_after(monkeypatch, 4)
    assert tuning.start("mnli", folder, *flags).code == 143
    assert len(curve(folder / "seed-0")) == LAST and 4 <= checkpoint_steps(folder / "seed-1")[-1] < LAST
    assert not (folder / "seed-2").exists() and not (folder / "seeds.json").exists()
    first = contents(folder / "seed-0")
    done = tuning.train("mnli", folder, *flags)
    assert contents(folder / "seed-0") == first and "finished: " in done.out and "resumed from step" in done.out
    alone = tmp_path / "alone"
    tuning.train("mnli", alone, "--seed", 1)
    assert_same_checkpoint(folder / "seed-1", alone, LAST)
    assert curve(folder / "seed-1") == curve(alone) and curve(folder / "seed-1") != curve(folder / "seed-0")
    found = report(folder)
    assert [entry["seed"] for entry in found["seeds"]] == [0, 1, 2]
    for entry in found["seeds"]:
        dev = dev_of(Path(entry["run"]))
        assert {name: entry[name] for name in dev} == dev
    ranked = sorted(found["seeds"], key=lambda entry: entry["accuracy"])
    assert ranked[1]["accuracy"] == found["median"]


def test_a_seed_that_changed_its_task_is_refused(tuning: Finetuning, tmp_path: Path) -> None:
    folder = tmp_path / "seeds"
    finished(tuning, folder, {0: 50.0})
    before = contents(folder)
    assert_says(
        one_line(tuning.start("qqp", folder, "--seeds", 2)), "task.name mnli, not qqp|model.num_classes 3, not 2"
    )
    assert contents(folder) == before


@pytest.mark.parametrize("content", ["{}", '{"kind": "others"}', "not JSON", ""])
def test_a_foreign_report_is_refused(tuning: Finetuning, tmp_path: Path, content: str) -> None:
    """And untouched."""
    (tmp_path / "seeds.json").write_text(content)
    line = one_line(tuning.start("mnli", tmp_path, "--seeds", 2))
    assert_says(line, r"seeds\.json was not written by --seeds", "valid: another --run-dir")
    assert [path.name for path in tmp_path.iterdir()] == ["seeds.json"]
    assert (tmp_path / "seeds.json").read_text() == content


def test_the_directory_of_one_run_is_refused(tuning: Finetuning) -> None:
    run = tuning.run("mnli")
    before = contents(run)
    line = one_line(tuning.start("mnli", run, "--seeds", 2))
    assert_says(line, f"--run-dir {run} is the directory of one run", "valid: a new folder, or without --seeds")
    assert contents(run) == before


def test_the_directory_of_seeds_is_no_run(tuning: Finetuning, tmp_path: Path) -> None:
    """For train.py without --seeds, eval.py and --init."""
    finished(tuning, tmp_path, {0: 50.0})
    before = contents(tmp_path)
    assert_says(one_line(tuning.start("mnli", tmp_path)), f"--run-dir {tmp_path}", "valid: ")
    assert_says(
        one_line(tuning.start("mnli", tmp_path / "seed-9", "--init", tmp_path)), f"--init {tmp_path}", "valid: "
    )
    done = tuning.commands.run("eval.py", "mnli", "--checkpoint", tmp_path, "--data", tuning.file("mnli", "dev"))
    assert_says(one_line(done), f"--checkpoint {tmp_path}", "valid: ")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", ["a file", "a folder of something else"])
def test_a_place_of_something_else_is_refused(tuning: Finetuning, tmp_path: Path, kind: str) -> None:
    """As by one run, before the data are looked at."""
    place = tmp_path / "place"
    file = place if kind == "a file" else place / "thesis.txt"
    file.parent.mkdir(exist_ok=True)
    file.write_text("precious")
    before = contents(tmp_path)
    for flags in ((), ("--seeds", 2)):
        assert_says(
            one_line(tuning.start("mnli", place, "--data.dev", "no.tsv", *flags)), f"--run-dir {place}", "valid: "
        )
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--seeds", 0), ["--seeds 0", "valid: 1 to 1000"]),
        (("--seeds", 3, "--seed", 2**31 - 2), ["--seeds 3", "--seed 2147483646", "valid: "]),
        (("--seeds", "many"), ["--seeds", "valid: a whole number"]),
    ],
)
def test_numbers_of_seeds(tuning: Finetuning, tmp_path: Path, flags: tuple, words: list[str]) -> None:
    assert_says(one_line(tuning.start("mnli", tmp_path / "run", *flags)), *words)
    assert not (tmp_path / "run").exists()

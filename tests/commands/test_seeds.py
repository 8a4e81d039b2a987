"""--seeds: several runs one after the other, and the median of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from finetuning import Finetuning, dev_of, stop_after
from results import assert_same_checkpoint, checkpoint_steps, contents, curve

LAST = 10  # step


def report(folder: Path) -> dict[str, Any]:
    """What seeds.json says."""
    return json.loads((folder / "seeds.json").read_text())


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
    tuning.finish_seeds(folder, figures)
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
        assert f"seed {seed}: accuracy {accuracy:.2f}%" + ("  (median)" if seed == median else "") in lines
    assert f"median accuracy {figures[median]:.2f}%: {checkpoint}" in lines[-1]


@pytest.mark.full
def test_seeds_stopped_in_the_middle(tuning: Finetuning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM stops the second: the same command goes on with it, and leaves the first alone."""
    folder, flags = tmp_path / "seeds", ("--seeds", 3)
    tuning.finish_seeds(folder, {0: 33.0})
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

"""`--dry-run`: what a run would end with before its first step, and nothing that stays."""

import tempfile
from pathlib import Path

import pytest
from finetuning import Finetuning
from mistakes import assert_says, train_mistake
from processes import Commands, Run
from results import contents

TWO = ("--mesh.data", 2, "--simulate-devices", 2, "--optimizer.zero", 3)  # the program of a resume, too


@pytest.fixture(autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def tried(commands: Commands, *arguments: object) -> str:
    """What a dry run prints; it must succeed."""
    done = commands.run("train.py", *arguments, "--dry-run")
    assert not done.err
    return done.ok()


@pytest.mark.slow
def test_a_new_run(commands: Commands, tmp_path: Path, temporary: Path) -> None:
    out = tried(commands, commands.preset, "--run-dir", tmp_path / "run", *TWO)
    assert_says(out.replace("\n", " "), r"data 2 x pipe 1 x tensor 1", r"data: [\d,]+ tokens in", r"memory: [\d.]+ MiB")
    last = out.splitlines()[-2:]
    assert_says(last[0], r"compiled the step in [\d.]+ s: [\d.]+ MiB of state .*, [\d.]+ MiB of temporaries")
    assert_says(last[1], f"nothing was trained or kept; .* would train steps 1 to 20 in {tmp_path / 'run'}")
    assert not list(tmp_path.iterdir()) and not list(temporary.iterdir())


def test_a_run_that_goes_on(commands: Commands, straight: Run, temporary: Path) -> None:
    """Past the end of the decay; and one that is finished."""
    before = contents(straight.folder)
    assert "nothing to train" in tried(commands, straight.folder / "config.toml")
    out = tried(commands, commands.preset, "--run-dir", straight.folder, "--train.steps", 30)
    assert_says(out, "--train.steps 30 is past --optimizer.decay-steps 20", "would train steps 21 to 30 in")
    assert contents(straight.folder) == before and not list(temporary.iterdir())


def test_mistakes_are_those_of_training(commands: Commands, straight: Run, tmp_path: Path, temporary: Path) -> None:
    large = ("--model.hidden-size", 1_000_000, "--model.num-layers", 10_000)
    for flags in (("--mesh.data", 3), ("--data.path", tmp_path / "no-such"), large):
        assert_says(train_mistake(commands, tmp_path / "run", *flags, "--dry-run"), str(flags[0]))
    assert_says(train_mistake(commands, straight.folder, "--seed", 3, "--dry-run"), "holds a run with seed 0, not 3")
    assert not list(temporary.iterdir())


@pytest.mark.full
def test_a_task_with_several_seeds(tuning: Finetuning, tmp_path: Path, temporary: Path) -> None:
    out = tuning.train("mnli", tmp_path / "run", "--seeds", 2, "--dry-run").out
    assert_says(out, "mnli train: ", rf"in {tmp_path / 'run' / 'seed-0'}")
    assert not list(tmp_path.iterdir()) and not list(temporary.iterdir())

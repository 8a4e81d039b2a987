"""`--dry-run`: what a run would end with before its first step, and nothing that stays."""

import tempfile
from pathlib import Path

import pytest
from finetuning import Finetuning
from mistakes import assert_says, train_mistake
from processes import Commands, Run
from results import contents, training

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


def without_decay(commands: Commands, folder: Path) -> Path:
    """The tests' preset, which says nothing of the decay's end."""
    preset = folder / "mine.toml"
    text = commands.preset.read_text().replace("decay_steps = 20\n", "").replace("warmup_steps = 5", "warmup_steps = 1")
    preset.write_text(text)
    return preset


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


@pytest.mark.full
def test_a_run_that_goes_on_with_another_learning_rate(commands: Commands, straight: Run, tmp_path: Path) -> None:
    """With the end of the decay that it began with, where no other is given."""
    flags = ("--train.steps", 30, "--optimizer.learning-rate", 1e-3)
    out = tried(commands, without_decay(commands, tmp_path), "--run-dir", straight.folder, *flags)
    assert_says(out, "--train.steps 30 is past --optimizer.decay-steps 20", "would train steps 21 to 30 in")
    assert "\nlearning rate changed: learning_rate 0.003 -> 0.001, warmup 5 -> 1\n" in out


@pytest.mark.full
def test_a_decay_that_nobody_gives_is_that_of_the_run_s_beginning(commands: Commands, tmp_path: Path) -> None:
    """A run of 4 steps that goes on to 6 keeps its learning rates; it says so once."""
    preset, run = without_decay(commands, tmp_path), tmp_path / "run"
    flags = ("--train.eval-batches", 1, "--train.eval-every", 10)
    first = commands.train(run, "--train.steps", 4, *flags, preset=preset).out
    horizon = "\n[run_horizon]\nwarmup_steps = 1\ndecay_steps = 4\n"
    assert "is past" not in first and (run / "config.toml").read_text().endswith(horizon)
    second = commands.train(run, "--train.steps", 6, *flags, preset=preset).out
    assert second.count("--train.steps 6 is past --optimizer.decay-steps 4: ") == 1
    rates = [line["learning_rate"] for line in training(run)]
    assert rates[:2] == [0, pytest.approx(3e-3)] and rates[3] < rates[2] and rates[4:] == [0, 0]
    assert (run / "config.toml").read_text().endswith(horizon)

"""What megajax did not write is never removed, replaced or written to, and what is read is never written."""

import shutil
from pathlib import Path

import pytest
from mistakes import assert_says, mistake, train_mistake
from processes import Commands, Run
from results import contents


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder and a file of somebody else's, to which links lead."""
    folder = tmp_path / "elsewhere"
    (folder / "empty").mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    return folder


@pytest.mark.parametrize("kind", ["link", "other"])
@pytest.mark.parametrize("part", ["config.toml", "metrics.jsonl", "loss.png", "data", "checkpoints", "tensorboard"])
def test_parts_of_a_run_that_it_did_not_write(
    commands: Commands, half: Run, elsewhere: Path, part: str, kind: str, tmp_path: Path
) -> None:
    """A link, to just what the run had there, and a folder in the place of a file or the other way round."""
    run = shutil.copytree(half.folder, tmp_path / "run")
    is_folder = (run / part).is_dir()
    moved = (run / part).rename(elsewhere / part)
    if kind == "link":
        (run / part).symlink_to(moved)
    elif is_folder:
        (run / part).write_text("mine")
    else:
        (run / part).mkdir()
    before = contents(elsewhere)
    line = train_mistake(commands, run)
    if kind == "link" or part not in ("config.toml", "metrics.jsonl"):  # of which the reader speaks first
        assert_says(line, f"--run-dir {run}: {run / part} is a (link|folder|file); valid: a (folder|file)")
    assert contents(elsewhere) == before


@pytest.mark.parametrize("kind", ["link", "link to nothing", "link to an empty folder", "file", "full"])
@pytest.mark.parametrize("action", ["import-hf", "export-hf"])
def test_targets_of_convert(
    commands: Commands, half: Run, elsewhere: Path, action: str, kind: str, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    if kind == "file":
        target.write_text("mine")
    elif kind == "full":
        target = elsewhere
    else:
        target.symlink_to({"link": elsewhere, "link to nothing": tmp_path / "new"}.get(kind, elsewhere / "empty"))
    before = contents(tmp_path)
    line = mistake(commands, "-m", "megajax", "convert", action, half.folder, target)
    assert_says(line, f"{target} is (a link|a file|not empty); valid: an empty folder, or a path that does not exist")
    assert contents(tmp_path) == before and target.is_symlink() == kind.startswith("link")


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture_replaces_only_another_timeline(commands: Commands, elsewhere: Path, suffix: str) -> None:
    draw = ("-m", "megajax", "schedule", "--mesh.pipe", 2, "--microbatches", 2, "--plot")
    picture, link, folder = (elsewhere / f"{name}.{suffix}" for name in ("drawn", "link", "folder"))
    commands.run(*draw, picture).ok()
    first = picture.read_bytes()
    commands.run(*draw[:-2], 3, "--plot", picture).ok()
    assert picture.read_bytes() != first
    link.symlink_to(picture)
    folder.mkdir()
    other = elsewhere / f"other.{suffix}"
    other.write_bytes(first.replace(b"megajax schedule", b"another programm"))
    before = contents(elsewhere)
    for there in (other, link, folder):
        assert f"--plot {there} already exists and is not a timeline" in mistake(commands, *draw, there)
    assert contents(elsewhere) == before and link.is_symlink()


def test_a_copied_configuration_begins_a_run_of_its_own(commands: Commands, half: Run, tmp_path: Path) -> None:
    """It names the directory of the run that it was copied from, which only `--run-dir` would go on with."""
    before = contents(half.folder)
    shutil.copy(half.folder / "config.toml", tmp_path / "theirs.toml")
    done = commands.run("train.py", tmp_path / "theirs.toml", "--resume", "must")
    assert done.code == 2 and "--run-dir runs/theirs has no checkpoint" in done.err
    assert f"the configuration of another run: runs/theirs is used instead of its run_dir {half.folder}" in done.out
    assert contents(half.folder) == before
    moved = shutil.copytree(half.folder, tmp_path / "moved")
    done = commands.run("train.py", moved / "config.toml", "--resume", "never")
    assert f"--run-dir {moved} already holds a run" in done.err and not done.out

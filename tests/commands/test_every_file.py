"""Every file of a run, damaged in every way: the same command goes on to the state that it would have had, or says in
one line what is wrong."""

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from damages import DAMAGES
from processes import Commands, Finished, Run
from results import assert_same_checkpoint, contents, curve

from megajax.runs.failures import forget_abandoned
from megajax.runs.metrics import read_metrics

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]

PATIENCE = 120  # seconds that no case takes


@pytest.fixture
def in_time() -> Iterator[None]:
    def hangs(*_: object) -> None:
        raise AssertionError("hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def others(commands: Commands, shared_folder: Path) -> Path:
    """The first half of a run of another seed, as long and of the same sizes."""
    folder = shared_folder / "of another seed"
    commands.train(folder, "--train.steps", 10, "--seed", 7)
    return folder


def damaged_and_started(commands: Commands, begun: Path, straight: Run, change: Callable[[], object]) -> str:
    """What is wrong after one start; nothing if it went on right, or was refused in one line."""
    change()
    before = contents(begun / "checkpoints")
    signal.alarm(PATIENCE)
    done: Finished = commands.run("train.py", commands.preset, "--run-dir", begun)
    signal.alarm(0)
    forget_abandoned()
    if done.code:
        lines = done.err.splitlines()
        if done.code not in (1, 2) or len(lines) != 1 or "Traceback" in done.err or "the traceback is in" in done.err:
            return f"exit code {done.code}: {done.err[-500:]}"
        if contents(begun / "checkpoints") != before:
            return f"checkpoints have changed: {lines[0]}"
        return ""
    if "Traceback" in done.out + done.err:
        return done.out + done.err
    try:
        assert_same_checkpoint(begun, straight.folder, 20)
    except AssertionError as error:
        return f"another state: {str(error)[:200]}"
    there = [each for each in read_metrics(begun) if "loss" in each]  # damaged lines stay
    steps = [(each["step"], each["loss"], each["grad_norm"]) for each in there]
    return "" if steps[-10:] == curve(straight.folder)[-10:] else "another curve"


def files_of(run: Path) -> list[str]:
    return sorted(str(file.relative_to(run)) for file in run.rglob("*") if file.is_file())


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("way", DAMAGES)
def test_damage(commands: Commands, half: Run, straight: Run, way: str, tmp_path: Path) -> None:
    wrong = {}
    names = files_of(half.folder)
    assert len(names) > 20
    for number, name in enumerate(names):
        run = shutil.copytree(half.folder, tmp_path / str(number))
        said = damaged_and_started(commands, run, straight, lambda file=run / name: DAMAGES[way](file))
        if said:
            wrong[name] = said
        else:
            shutil.rmtree(run)
    assert not wrong, (len(names), wrong)


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("source", ["another seed", "another checkpoint"])
def test_the_file_of_another(
    commands: Commands, half: Run, straight: Run, others: Path, source: str, tmp_path: Path
) -> None:
    """Which is valid by itself."""
    wrong, tried = {}, 0
    for number, name in enumerate(files_of(half.folder)):
        if source == "another seed":
            other = others / name
        else:
            other = half.folder / name.replace("checkpoints/10/", "checkpoints/5/")
        if not other.is_file() or other == half.folder / name:
            continue
        tried += 1
        run = shutil.copytree(half.folder, tmp_path / str(number))
        said = damaged_and_started(commands, run, straight, lambda new=other, old=run / name: shutil.copy(new, old))
        if said:
            wrong[name] = said
        else:
            shutil.rmtree(run)
    assert tried > 5 and not wrong, (tried, wrong)

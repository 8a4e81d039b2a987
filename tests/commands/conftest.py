"""Runs that several tests look at, each made once per session."""

import random
import shutil
from pathlib import Path

import pytest
from finetuning import Finetuning
from processes import PRESET, Commands, Run, made_once


@pytest.fixture(scope="session")
def shared_folder(workers_folder: Path) -> Path:
    """A folder of the commands' tests that all of pytest's workers share."""
    folder = workers_folder / "commands"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def corpus(shared_folder: Path) -> Path:
    """A text of 20 kB: sentences of words that follow each other with some regularity, in paragraphs."""
    file = shared_folder / "corpus.txt"

    def write() -> None:
        rng = random.Random(0)
        words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 7))) for _ in range(60)]
        paragraphs, place = [], 0
        for _ in range(60):
            text = []
            for _ in range(50):
                place = (place * 7 + rng.choice([1, 1, 1, 2])) % len(words)
                text.append(words[place])
            paragraphs.append(" ".join(text).capitalize() + ".")
        file.write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")

    made_once(file, write)
    return file


@pytest.fixture(scope="session")
def commands(shared_folder: Path, corpus: Path) -> Commands:
    """Runs commands, train.py with a tiny model by default."""
    preset = shared_folder / "tiny.toml"
    made_once(preset, lambda: preset.write_text(PRESET.format(corpus=corpus)) and None)
    return Commands(preset)


@pytest.fixture(scope="session")
def straight(commands: Commands, shared_folder: Path) -> Run:
    """20 steps in one go on one device, with a sample at the end."""
    folder = shared_folder / "straight"
    sample = ("--sample.tokens", 8, "--sample.prompt", "the end")
    finished = made_once(folder, lambda: commands.train(folder, *sample))
    return Run(folder, finished)


@pytest.fixture(scope="session")
def half(commands: Commands, shared_folder: Path) -> Run:
    """The first 10 of the 20 steps."""
    folder = shared_folder / "half"
    return Run(folder, made_once(folder, lambda: commands.train(folder, "--train.steps", 10)))


@pytest.fixture
def begun(half: Run, tmp_path: Path) -> Path:
    """A copy of `half` to go on with."""
    return shutil.copytree(half.folder, tmp_path / "run")


@pytest.fixture(scope="session")
def tuning(commands: Commands, shared_folder: Path) -> Finetuning:
    folder = shared_folder / "finetuning"
    folder.mkdir(exist_ok=True)
    return Finetuning(commands, folder)

"""A small run that is disturbed; `MEGAJAX_ROUNDS` says how often (once)."""

import os
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "commands"))
from disturbed import Disturbed, make_whole


@pytest.fixture
def rounds() -> int:
    """How often what happens at random moments is tried."""
    return int(os.environ.get("MEGAJAX_ROUNDS", "1"))


@pytest.fixture
def rng() -> random.Random:
    return random.Random(0)


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Disturbed:
    """All commands have worked, undisturbed."""
    found = make_whole(tmp_path_factory.mktemp("whole"))
    for name in found.lines:
        found.again(name)
    return found


@pytest.fixture
def here(whole: Disturbed, tmp_path: Path) -> Disturbed:
    """The same commands in a new folder."""
    (tmp_path / "here").mkdir()
    return replace(whole, folder=tmp_path / "here")

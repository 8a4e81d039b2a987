"""Every fault planted in the parallel code is refused by the types or found by `verify`: ten of them by default, all
with the long grids (docs/mutants.md is their table)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from apart import ALIKE, EQUIVALENT, OUTSIDE
from catalogue import MUTANTS
from mutant import Mutant
from naming import named_rightly
from planting import file_of, found, texts
from trial import Outcome

TEN = [
    "f does not sum the gradient",
    "g does not sum",
    "the norm is that of a device's gradients",
    "nothing is declared varying",
    "every device of a tensor group has masks of its own",
    "there is a slot too few for factors",
    "gradients of shared heads of keys are summed in every layer",
    "what is between split tokens is summed in every layer",
    "attention's dropout knows the head's number on the device only",
    "ids are not made local",
]
LEAST_NAMED = 0.8


def tried(*arguments: str, folder: Path) -> list[Outcome]:
    """Outcomes of `try_mutants.py`, which forks: a process of its own, since this one has used JAX."""
    file = folder / "outcomes.json"
    command = [sys.executable, str(Path(__file__).parent / "try_mutants.py"), "--json", str(file), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run(command, check=True, env=environment, capture_output=True)
    return [Outcome(**each) for each in json.loads(file.read_text())]


def test_every_mutant_can_be_planted() -> None:
    """Its text stands exactly once in `megajax`."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert all(mutant.old != mutant.new and file_of(mutant) for mutant in MUTANTS)
    for apart in [*ALIKE, *OUTSIDE, *EQUIVALENT]:
        assert len(found(apart.old)) == 1, f"aim it anew: {apart.name}"


@pytest.mark.full
def test_every_mutant_is_python() -> None:
    for mutant in MUTANTS:
        compile(texts()[file_of(mutant)].replace(mutant.old, mutant.new), mutant.name, "exec")


def test_ten_are_caught(tmp_path: Path, workers_folder: Path) -> None:
    cache = str(workers_folder / "compiled")
    outcomes = tried("--exactly", *TEN, "--quick", "--bare", "--cache", cache, folder=tmp_path)
    expected = {mutant.name: mutant.way for mutant in MUTANTS if mutant.name in TEN}
    assert {outcome.name: outcome.way for outcome in outcomes} == expected, outcomes


@pytest.mark.full
def test_all_are_caught_and_most_named(tmp_path: Path) -> None:
    """After their configurations without a mutant, in which nothing is found."""
    outcomes = {outcome.name: outcome for outcome in tried("--places", folder=tmp_path)}
    sound = [outcome for name, outcome in outcomes.items() if name.startswith("none: ")]
    assert sound and all(outcome.way == "nothing" for outcome in sound), sound
    missed = [mutant.name for mutant in MUTANTS if outcomes[mutant.name].way in ("nothing", "death")]
    assert not missed
    wrongly = [mutant.name for mutant in MUTANTS if not _named(mutant, outcomes)]
    assert len(wrongly) <= (1 - LEAST_NAMED) * len(MUTANTS), wrongly


def _named(mutant: Mutant, outcomes: dict[str, Outcome]) -> bool:
    return named_rightly(mutant, outcomes[mutant.name])

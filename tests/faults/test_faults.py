"""Every fault is planted where it is aimed, and caught as it says: by default every third one that a trace tells, and
one of every tenth class that the exact comparison finds; all with the long grids."""

from collections import Counter
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from catalogue import CLASSES, FAULTS
from fault import ROOT, Caught, Fault, planted
from tiny import full
from trial import failed_test, first_difference, said_of, small_config, unequal

from megajax.verify.check import verify

WAYS = get_args(get_type_hints(Caught)["by"])
REFUSED = [fault for fault in FAULTS if fault.caught.by == "types"]
EXACT = [fault for fault in FAULTS if fault.caught.by == "exact"]
VERIFIED = [fault for fault in FAULTS if fault.caught.by == "verify"]
FIRST = [next((each for each in faults if each in EXACT), None) for faults in CLASSES.values()]  # of each class
SEEN = [fault for fault in FIRST if fault]
TESTED = [fault for fault in FAULTS if fault.caught.by == "tests"]


def name(fault: Fault) -> str:
    return fault.name


def test_every_fault_can_be_planted() -> None:
    """Its function has its expression once; a refactoring that moves it aims the fault anew."""
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        compile(fault.planted_text(), fault.name, "exec")
        selected = [Path(ROOT, each) for each in fault.caught.text.split() if each.startswith("tests/")]
        assert all(path.exists() for path in selected), fault.name


def test_every_class_is_documented() -> None:
    documented = (ROOT / "docs" / "faults.md").read_text()
    for title, faults in CLASSES.items():
        counts = Counter(fault.caught.by for fault in faults)
        row = f"| {title} | {', '.join(f'{by} {counts[by]}' for by in WAYS if counts[by])} |"
        assert row in documented.splitlines(), row


@pytest.mark.parametrize(
    "fault", [*REFUSED[::3], *(full(fault) for fault in REFUSED if fault not in REFUSED[::3])], ids=name
)
def test_tracing_tells(fault: Fault) -> None:
    assert fault.caught.text in said_of(fault)


@pytest.mark.parametrize(
    "fault", [*SEEN[1::10], *(full(fault) for fault in SEEN if fault not in SEEN[1::10])], ids=name
)
def test_a_step_with_a_fault_is_unequal(fault: Fault) -> None:
    with planted(fault):
        assert unequal(small_config(fault.caught.on))


@pytest.mark.full  # by default: tests/commands/test_verify_command.py
@pytest.mark.parametrize("fault", [*EXACT, *VERIFIED], ids=name)
def test_verify_names_the_place(fault: Fault) -> None:
    said = said_of(fault)
    assert all(part in said for part in fault.caught.text.split(" … ")), said


@pytest.mark.parametrize("fault", [REFUSED[0], *(full(each) for each in REFUSED[1:])], ids=name)
def test_an_error_while_tracing_is_a_verdict(fault: Fault) -> None:
    with planted(fault):
        found = verify(small_config(fault.caught.on))
    assert fault.caught.text in found.first and found.axes, found.first
    assert [finding.name for finding in found.verdict.failed] == ["exact tracing of the step"]


@pytest.mark.full
@pytest.mark.parametrize(
    "on", [*{str(fault.caught.on): fault.caught.on for fault in [*REFUSED, *EXACT, *VERIFIED]}.values()], ids=str
)
def test_nothing_differs_without_a_fault(on: dict) -> None:
    assert first_difference(small_config(on)) == ""


@pytest.mark.full
@pytest.mark.parametrize("fault", TESTED, ids=name)
def test_default_tests_fail(fault: Fault) -> None:
    assert failed_test(fault)

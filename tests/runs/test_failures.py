"""What a failed read or write of Orbax leaves behind."""

import sys
from collections.abc import Iterator

import pytest

from megajax.runs.failures import forget_abandoned


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The exceptions that nobody could be told of."""
    found: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: found.append(str(unraisable.exc_value)))
    yield found
    monkeypatch.undo()


class Pause:
    def __await__(self) -> Iterator[None]:
        yield


async def read(problem: str) -> None:
    """Fails in the way of Orbax's reads: whatever ends it becomes another exception."""
    try:
        await Pause()
    except BaseException as error:
        raise Exception(problem) from error


@pytest.mark.parametrize(("given_up", "told"), [(True, []), (False, ["while reading array index"])])
def test_a_read_that_ends_later(given_up: bool, told: list[str], heard: list[str]) -> None:
    under_way = read("while reading array index")
    under_way.send(None)
    if given_up:
        forget_abandoned()
    del under_way
    assert heard == told


def test_what_fails_elsewhere_is_heard_of(heard: list[str]) -> None:
    class Faulty:
        def __del__(self) -> None:
            raise ValueError("of somebody else")

    forget_abandoned()
    Faulty()
    assert heard == ["of somebody else"]

"""What a program does at the moment, said where it is done, and shown by whoever watches."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

Show = Callable[[str], AbstractContextManager[object]]

_shows: list[Show] = []  # the last one watches
_names: list[str] = []  # of the phases under way


@contextlib.contextmanager
def watched(show: Show) -> Iterator[None]:
    """In the block every `phase` of this process is a block of `show(name)`."""
    _shows.append(show)
    try:
        yield
    finally:
        _shows.pop()


@contextlib.contextmanager
def phase(name: str) -> Iterator[object]:
    """A block that may take long; `name` says what is done in it, as in "tokenizing corpus.txt"."""
    with _shows[-1](name) if _shows else contextlib.nullcontext() as shown:
        _names.append(name)
        try:
            yield shown
        finally:
            _names.pop()


def current() -> str:
    """The innermost phase; empty without one."""
    return _names[-1] if _names else ""

"""What a program does at the moment, said where it is done, and shown by whoever watches."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

Show = Callable[[str], AbstractContextManager[object]]

_shows: list[Show] = []  # the last one watches


@contextlib.contextmanager
def watched(show: Show) -> Iterator[None]:
    """In the block every `phase` of this process is a block of `show(name)`."""
    _shows.append(show)
    try:
        yield
    finally:
        _shows.pop()


def phase(name: str) -> AbstractContextManager[object]:
    """A block that may take long; `name` says what is done in it, as in "tokenizing corpus.txt"."""
    return _shows[-1](name) if _shows else contextlib.nullcontext()

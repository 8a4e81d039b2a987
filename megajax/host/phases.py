"""What the program is doing at the moment: announced by the code that does it, shown by whoever watches."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

Show = Callable[[str], AbstractContextManager[object]]

_shows: list[Show] = []  # only the last one shows phases
_names: list[str] = []  # of the current phases


@contextlib.contextmanager
def watched(show: Show) -> Iterator[None]:
    """In the block, every `phase` of this process is shown by `show(name)`."""
    _shows.append(show)
    try:
        yield
    finally:
        _shows.pop()


@contextlib.contextmanager
def phase(name: str) -> Iterator[object]:
    """A block that may take long; `name` says what it does, for example "tokenizing corpus.txt"."""
    with _shows[-1](name) if _shows else contextlib.nullcontext() as shown:
        _names.append(name)
        try:
            yield shown
        finally:
            _names.pop()


def current() -> str:
    """The innermost phase; empty if there is none."""
    return _names[-1] if _names else ""

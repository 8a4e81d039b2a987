"""What a program does at the moment, said where it is done, and shown by whoever watches."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import ClassVar

Show = Callable[[str], AbstractContextManager[object]]


class _Watcher:
    show: ClassVar[Show | None] = None


@contextlib.contextmanager
def watched(show: Show) -> Iterator[None]:
    """In the block every `phase` of this process is a block of `show(name)`."""
    before, _Watcher.show = _Watcher.show, show
    try:
        yield
    finally:
        _Watcher.show = before


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """A block that may take long; `name` says what is done in it, as in "tokenizing corpus.txt"."""
    with _Watcher.show(name) if _Watcher.show else contextlib.nullcontext():
        yield

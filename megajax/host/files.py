"""Files and folders that appear complete or not at all.

Unfinished work lies in a folder with a mark in it. Only marked folders are ever removed, including those left by a
killed process; everything else is left alone.
"""

import contextlib
import itertools
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from megajax.core.errors import UserError

_MARK = ".temporary-of-megajax"
_EARLIER = ".earlier"  # in a marked folder: what is being replaced


def mark(folder: Path) -> None:
    """Mark an existing folder as temporary: everything in it may be removed."""
    (folder / _MARK).write_text("Made by megajax, which removes this folder with all that is in it.\n")


def is_marked(folder: Path) -> bool:
    """Whether `mark` was called for a folder."""
    return (folder / _MARK).is_file() and not folder.is_symlink()


def empty(folder: Path, keep: Collection[str] = ()) -> None:
    """Remove everything in a marked folder except the mark and the names in `keep`."""
    assert is_marked(folder), folder
    for entry in folder.iterdir():
        if entry.name == _MARK or entry.name in keep:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def remove(folder: Path) -> None:
    """Remove a marked folder, the mark last, so that an interrupted removal can be finished later."""
    empty(folder)
    (folder / _MARK).unlink()
    folder.rmdir()


def free_name(path: Path) -> Path:
    """`path`, with a number appended if needed: the first name that is free or belongs to a marked folder."""
    names = itertools.chain([path], (path.with_name(f"{path.name}-{number}") for number in itertools.count(1)))
    return next(name for name in names if is_marked(name) or not os.path.lexists(name))


@contextlib.contextmanager
def scratch(path: Path) -> Iterator[Path]:
    """A marked folder beside `path` in which its new content is made; removed at the end. An `OSError` if it cannot be
    made."""
    temporary = free_name(path.with_name(f"{path.name}.partial"))
    if is_marked(temporary):
        put_back(path)
        empty(temporary)
    else:
        temporary.mkdir()
    try:
        mark(temporary)
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            remove(temporary) if is_marked(temporary) else temporary.rmdir()  # no mark, because the disk is full


def put_back(path: Path) -> None:
    """Restore the folder `path` if a process was killed while it replaced it."""
    place = free_name(path.with_name(f"{path.name}.partial"))
    if is_marked(place) and (place / _EARLIER).exists() and not path.exists():
        (place / _EARLIER).rename(path)


@contextlib.contextmanager
def file_atomically(path: Path) -> Iterator[Path]:
    """A temporary path to write a file at, which replaces `path` at the end; an `OSError` if that fails."""
    with scratch(path) as place:
        yield place / path.name
        (place / path.name).replace(path)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write or replace a file; a text is encoded as UTF-8."""
    with writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with file_atomically(path) as new, new.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())


@contextlib.contextmanager
def folder_atomically(folder: Path, ours: Callable[[Path], bool] = lambda there: False) -> Iterator[Path]:
    """A temporary folder to fill, which becomes `folder` at the end; an empty folder, or one that is `ours`, is
    replaced. On an exception neither it nor the parents that were made for it stay."""
    made = [parent for parent in folder.parents if not parent.exists()]
    try:
        with contextlib.ExitStack() as stack:
            with writable(folder):
                folder.parent.mkdir(parents=True, exist_ok=True)
                temporary = stack.enter_context(scratch(folder))
                _check_replaceable(folder, ours)
                new = temporary / folder.name
                new.mkdir()
            yield new
            with writable(folder):  # fails for an empty folder of somebody else's, which may not be moved
                if _check_replaceable(folder, ours):
                    folder.rename(temporary / _EARLIER)
                new.rename(folder)
    except BaseException:
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


@contextlib.contextmanager
def writable(path: Path | str) -> Iterator[None]:
    """Turn an `OSError` in the `with` block, in which `path` is written, into a `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written: {error.strerror}; valid: a writable place with free space"
        ) from None


def _check_replaceable(folder: Path, ours: Callable[[Path], bool]) -> bool:
    """Whether there is something to replace."""
    if not os.path.lexists(folder):
        return False
    if folder.is_dir() and not folder.is_symlink() and (ours(folder) or not any(folder.iterdir())):
        return True
    raise UserError(f"{folder} already exists and was not made by megajax; valid: move it elsewhere")

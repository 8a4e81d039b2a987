"""Files that appear whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from megajax.errors import UserError


def write_atomically(path: Path, text: str) -> None:
    """Writes a UTF-8 file under a temporary name, then renames it.

    Raises:
        UserError: the file cannot be written (no permission, no space).
    """
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


@contextlib.contextmanager
def folder_atomically(folder: Path) -> Iterator[Path]:
    """A folder to fill under a temporary name; renamed at the end, replacing an older one.

    On an exception nothing stays: neither it nor the parents that were made for it.

    Raises:
        UserError: the folder cannot be made (no permission, no space).
    """
    made = [parent for parent in folder.parents if not parent.exists()]
    partial = folder.with_name(folder.name + ".partial")
    try:
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        except OSError as error:
            raise UserError(f"{folder}: cannot be written: {error.strerror}") from None
        yield partial
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise

"""Files that appear whole or not at all."""

import contextlib
import os
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

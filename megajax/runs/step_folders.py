"""The folders in `checkpoints/`, one per step; partially written or removed ones have other names.

All names matched here are made by this program or by Orbax; everything else is left alone. Functions raise `OSError`
if something cannot be removed or renamed.
"""

import contextlib
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megajax.core.errors import UserError

_STEP = re.compile(r"0|[1-9][0-9]{0,9}")
_TEMPORARY = re.compile(rf"({_STEP.pattern})\.orbax-checkpoint-tmp(-[A-Za-z0-9_.-]+)?")
_LARGEST = 2**31 - 1


def named(folder: Path) -> list[int]:
    """Steps, ascending, whose names belong to folders, whatever these contain."""
    names = [entry.name for entry in _readable(folder) if entry.is_dir() and _STEP.fullmatch(entry.name)]
    return sorted(step for step in map(int, names) if step <= _LARGEST)


def candidates(folder: Path) -> list[int]:
    """Steps, ascending, whose folders are not empty."""
    return [step for step in named(folder) if _readable(folder / str(step))]


def complete(folder: Path) -> list[int]:
    """Steps, ascending, of the complete checkpoints in a folder."""
    return [step for step in candidates(folder) if (folder / str(step) / "state").is_dir()]


def temporary(folder: Path, step: int) -> Path:
    """Where a step's checkpoint is written before it gets its final name."""
    return folder / f"{step}.orbax-checkpoint-tmp"


def is_temporary(name: str) -> bool:
    """Whether a name is that of a partially written or partially removed checkpoint."""
    return _TEMPORARY.fullmatch(name) is not None


def clear(folder: Path, step: int | None = None) -> None:
    """Remove partially written or partially removed checkpoints, of one step or of all."""
    for entry in _entries(folder):
        found = _TEMPORARY.fullmatch(entry.name)
        if found and step in (None, int(found[1])):
            remove(entry)


def discard(folder: Path, step: int) -> None:
    """Remove a checkpoint. It is renamed first, so that a partially removed folder never has its name."""
    discarded = folder / f"{step}.orbax-checkpoint-tmp-discarded"
    remove(discarded)
    (folder / str(step)).rename(discarded)
    remove(discarded)


def set_aside(folder: Path, step: int) -> None:
    """Rename the folder of a step to `damaged-STEP-N`."""
    names = (folder / f"damaged-{step}-{number}" for number in range(1000))
    (folder / str(step)).rename(next(name for name in names if not name.exists()))


def remove(path: Path) -> None:
    """Remove a folder with its contents, or a link to one, if it exists."""
    if path.is_symlink():
        path.unlink()
    else:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)


def _readable(folder: Path) -> list[Path]:
    try:
        return _entries(folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be read: {error.strerror}; valid: a readable folder") from None


def _entries(folder: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return list(folder.iterdir())
    return []


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept: all that any of these rules keeps, and always step 0 (imported weights)."""

    newest: int  # keep this many of the latest steps
    best: int = 0  # keep this many with the lowest validation losses; steps without a loss do not count
    every: int = 0  # keep steps that are multiples of this forever; 0: none

    def removed(self, steps: Sequence[int], losses: Mapping[int, float]) -> list[int]:
        """Those of `steps` whose checkpoints are removed; `losses` are validation losses by step."""
        ascending = sorted(steps)
        measured = sorted((step for step in ascending if step in losses), key=lambda step: (losses[step], -step))
        keep = {0, *ascending[-self.newest :], *measured[: self.best]}
        return [step for step in ascending if step not in keep and not (self.every and step % self.every == 0)]

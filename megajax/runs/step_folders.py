"""The folders in `checkpoints/`, one a step; one that is half written or being removed has another name.

Every name here is made by this program or by Orbax; everything else is left alone. What cannot be removed or renamed
raises `OSError`.
"""

import contextlib
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megajax.errors import UserError

_STEP = re.compile(r"0|[1-9][0-9]{0,9}")
_TEMPORARY = re.compile(rf"({_STEP.pattern})\.orbax-checkpoint-tmp(-[A-Za-z0-9_.-]+)?")
_LARGEST = 2**31 - 1


def named(folder: Path) -> list[int]:
    """Steps, ascending, that name a folder, whatever it holds."""
    names = [entry.name for entry in _readable(folder) if entry.is_dir() and _STEP.fullmatch(entry.name)]
    return sorted(step for step in map(int, names) if step <= _LARGEST)


def candidates(folder: Path) -> list[int]:
    """Steps, ascending, whose folder is not empty."""
    return [step for step in named(folder) if _readable(folder / str(step))]


def complete(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder, ascending."""
    return [step for step in candidates(folder) if (folder / str(step) / "state").is_dir()]


def temporary(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is written before it gets its name."""
    return folder / f"{step}.orbax-checkpoint-tmp"


def clear(folder: Path, step: int | None = None) -> None:
    """Remove what was left half written or half removed, of one step or of all."""
    for entry in _entries(folder):
        found = _TEMPORARY.fullmatch(entry.name)
        if found and step in (None, int(found[1])):
            remove(entry)


def discard(folder: Path, step: int) -> None:
    """Remove a checkpoint. It loses its name first, so that no half-removed folder has it."""
    place = folder / f"{step}.orbax-checkpoint-tmp-discarded"
    remove(place)
    (folder / str(step)).rename(place)
    remove(place)


def set_aside(folder: Path, step: int) -> None:
    """Rename the folder of a step to `damaged-STEP-N`."""
    names = (folder / f"damaged-{step}-{number}" for number in range(1000))
    (folder / str(step)).rename(next(name for name in names if not name.exists()))


def remove(path: Path) -> None:
    """Remove a folder with its content, or a link to one, if it exists."""
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
    """How many checkpoints stay; one that any of these rules keeps, stays. That of step 0, imported weights, always
    does."""

    newest: int  # so many of the latest steps
    best: int = 0  # so many with the lowest validation losses; those without one do not count
    every: int = 0  # those whose step is a multiple of this, for good; 0: none

    def removed(self, steps: Sequence[int], losses: Mapping[int, float]) -> list[int]:
        """The `steps` whose checkpoints go; `losses` are validation losses by step."""
        ascending = sorted(steps)
        measured = sorted((step for step in ascending if step in losses), key=lambda step: (losses[step], -step))
        kept = {0, *ascending[-self.newest :], *measured[: self.best]}
        return [step for step in ascending if step not in kept and not (self.every and step % self.every == 0)]

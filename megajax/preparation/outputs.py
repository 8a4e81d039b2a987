"""A preparation's outputs PREFIX.bin, PREFIX.idx, PREFIX.tokenizer and PREFIX.report.json, and meanwhile PREFIX.work.

Other files with one of these names are never removed, nor is the input.
"""

import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megajax.core.errors import UserError
from megajax.data.text.indexed import dataset_files, tokenizer_folder
from megajax.data.text.tokenizers import has_only_tokenizer_files
from megajax.host import files as temporary
from megajax.host import reading
from megajax.preparation.shards import ResumableError, WorkFolder

WRITING = "writing"  # a file in the work folder: existing outputs were checked and may be replaced
_LARGEST = 1 << 28  # most bytes in a plan or report, which list the input


def report_file(output: str) -> Path:
    """The path of the report, PREFIX.report.json."""
    return Path(f"{output}.report.json")


def work_folder(output: str, shared: bool = False) -> WorkFolder:
    """The work folder, PREFIX.work. `shared`: several machines use it."""
    return WorkFolder(Path(f"{output}.work"), output, shared)


def read_json(file: Path) -> Any:
    """The content of one of a preparation's JSON files; None if it cannot be read."""
    try:
        return reading.parse_json(reading.read_bytes(file, _LARGEST).decode())
    except (OSError, ValueError):
        return None


def check_apart(output: str, inputs: Iterable[tuple[str, Path]], folders: Iterable[Path]) -> None:
    """Check that inputs and outputs are disjoint, also through links."""
    resolved = functools.cache(Path.resolve)
    outputs = [*_results(output), work_folder(output).folder]
    for folder in folders:
        for path in outputs:
            if resolved(folder) in _location(path).parents:
                problem = f"{path} is in the folder {folder} that is read"
                raise UserError(f"--output {output}: {problem}; valid: a place outside")
    written: dict[object, Path] = {_location(path): path for path in outputs}
    written |= {_identity(path): path for path in outputs if path.exists()}

    @functools.cache
    def around(folder: Path) -> tuple[Path | None, Path | None]:
        """The temporary folder and the output that a folder is, or lies in."""
        above = (folder, *folder.parents)
        inside = next((written[location] for location in above if location in written), None)
        return next(filter(temporary.is_marked, above), None), inside

    for name, file in inputs:
        folder = resolved(file.parent)
        for location in [folder / file.name, *([file.resolve()] if file.is_symlink() else [])]:
            if inside := around(location if file.is_dir() else location.parent)[0]:
                raise UserError(f"{name} {file} lies in {inside}, which megajax deletes; valid: a copy of it elsewhere")
            if clash := written.get(location) or written.get(_identity(file)) or around(location.parent)[1]:
                problem = f"{clash} is {name} {file} itself, or holds it"
                raise UserError(f"--output {output}: {problem}; valid: another PREFIX")


def finished(work: WorkFolder, plan: dict[str, Any]) -> dict[str, Any] | None:
    """The report, if a preparation with this plan has finished; otherwise None."""
    existing, report = _existing(work.output), _report(work.output)
    if not existing or _may_replace(work):
        return None
    if report and report["plan"] == plan and all(file.exists() for file in dataset_files(work.output)):
        return report
    _refuse(work, _foreign(work.output))
    problem = f"{existing[0]} exists and was made from other input or with other options"
    raise UserError(f"--output {work.output}: {problem}; valid: another PREFIX, or --overwrite")


def check_own(work: WorkFolder, overwrite: bool) -> None:
    """Check that the work folder is ours and, with `overwrite`, that existing outputs may be replaced."""
    folder, lock = work.folder, work / "lock"
    problem = "is a link" if folder.is_symlink() else ""
    if not problem and not temporary.is_marked(folder) and folder.is_dir():
        is_lock = not lock.is_symlink() and lock.is_file() and lock.stat().st_size == 0  # it is created before the mark
        others = sorted(entry.name for entry in folder.iterdir() if entry != lock or not is_lock)
        problem = f"holds {others[0]} and no interrupted preparation" if others else ""
    if problem:
        raise UserError(f"--output {work.output}: {folder} {problem}; valid: another PREFIX")
    if overwrite and not _may_replace(work):
        _refuse(work, _foreign(work.output))


def begin_writing(work: WorkFolder) -> None:
    """Prepare to write the outputs: remove an older report and allow existing outputs to be replaced."""
    foreign = [path for path in _existing(work.output) if not _may_replace(work) or not _is_possible(path)]
    _refuse(work, foreign, ResumableError)
    work.touch(WRITING)
    report_file(work.output).unlink(missing_ok=True)


def _refuse(work: WorkFolder, foreign: list[Path], error: type[UserError] = UserError) -> None:
    if foreign:
        raise error(
            f"--output {work.output}: {foreign[0]} exists and was not made by a preparation; valid: another PREFIX"
        )


def _may_replace(work: WorkFolder) -> bool:
    return temporary.is_marked(work.folder) and (work / WRITING).exists()


def _results(output: str) -> list[Path]:
    return [*dataset_files(output), tokenizer_folder(output), report_file(output)]


def _existing(output: str) -> list[Path]:
    """The outputs that exist."""
    return [path for path in _results(output) if os.path.lexists(path)]


def _foreign(output: str) -> list[Path]:
    """The existing outputs that do not match the report beside them; without a report, all of them."""
    report = _report(output)
    index, tokens = dataset_files(output)

    def is_own(path: Path) -> bool:
        if report is None or not _is_possible(path):
            return False
        if path == tokens:
            count = report.get("tokens")
            return type(count) is int and path.stat().st_size in (2 * count, 4 * count)
        if path == index:
            with path.open("rb") as file:
                return file.read(7) == b"MMIDIDX"
        return True

    return [path for path in _existing(output) if not is_own(path)]


def _is_possible(path: Path) -> bool:
    """Whether a path has the type of file or folder that a preparation writes, and is not a link."""
    if path.is_symlink():
        return False
    return has_only_tokenizer_files(path) if path.suffix == ".tokenizer" else path.is_file()


def _report(output: str) -> dict[str, Any] | None:
    """The report, which a preparation writes last; None if there is none."""
    found = read_json(report_file(output))
    return found if isinstance(found, dict) and isinstance(found.get("plan"), dict) else None


def _location(path: Path) -> Path:
    """The resolved location of the path itself, even if it is a link."""
    return path.parent.resolve() / path.name


def _identity(path: Path) -> tuple[int, int]:
    """Device and inode, which all names of a file share."""
    there = path.stat()
    return there.st_dev, there.st_ino

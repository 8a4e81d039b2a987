"""What a preparation does, and which preparation a work folder belongs to."""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megajax.data import files as temporary
from megajax.data.corpus import tokenizer_folder
from megajax.data.indexed import dataset_files
from megajax.data.records import TextFiles
from megajax.data.tokenizers import load_tokenizer
from megajax.errors import UserError
from megajax.preparation.options import PrepareOptions
from megajax.preparation.shards import WorkFolder

# Raw text of a shard, at least and at most; between them 1/64 of the input, so that all cores have work.
SHARD_BYTES = 1 << 20, 4 << 20
TRAINED = ("bpe", "wordpiece")  # values of `--tokenizer` that train one

_FORMAT = 1  # of the work folder; a later version of this code may write another


@dataclass(frozen=True)
class Task:
    """What to prepare, and where to.

    Attributes:
        inputs: files, folders, or the word python-stdlib.
        output: PREFIX of the dataset.
        options: how.
        test_sets: files or folders of test sets that must not be in the corpus.
    """

    inputs: Sequence[str]
    output: str
    options: PrepareOptions
    test_sets: Sequence[str] = ()


def make_plan(task: Task, files: TextFiles) -> dict[str, Any]:
    """What the result depends on, as JSON; an interrupted preparation goes on only with the same plan.

    Raises:
        UserError: the tokenizer or a test set cannot be read.
    """

    def described(paths: Sequence[Path]) -> list[list[Any]]:
        return [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in paths]

    given = task.options.tokenizer
    tokenizer = given
    if given not in TRAINED:
        content = load_tokenizer(given, flag="--tokenizer").to_json()  # its errors come before any work
        tokenizer = hashlib.sha256(content.encode()).hexdigest()
    return {
        "format": [_FORMAT, *SHARD_BYTES],
        "inputs": described(files.files),
        "test_sets": described(TextFiles(task.test_sets, "--decontaminate").files),
        "options": asdict(task.options) | {"tokenizer": tokenizer, "max_broken": None},  # which changes no document
    }


def finished(work: WorkFolder, plan: dict[str, Any]) -> dict[str, Any] | None:
    """The report of a preparation that is done.

    Raises:
        UserError: what lies there is of another one, or of none.
    """
    there, found = _outputs(work.output), _report(work.output)
    if not there or _is_writing(work):
        return None
    if found and found["plan"] == plan and all(file.exists() for file in dataset_files(work.output)):
        return found
    problem = "was made from other input or with other options" if found else "was not made by a preparation"
    raise UserError(
        f"--output {work.output}: {there[0]} exists and {problem}; "
        f"valid: another PREFIX{', or --overwrite' if found else ''}"
    )


@contextlib.contextmanager
def claimed(work: WorkFolder, plan: dict[str, Any], overwrite: bool) -> Iterator[bool]:
    """Lock the work folder for this process in a `with` block, made if missing.

    Args:
        work: the folder.
        plan: of this preparation.
        overwrite: begin anew; an older dataset stays until it is replaced.

    Yields:
        Whether an interrupted preparation goes on.

    Raises:
        UserError: another process has it, it holds another preparation or something else, or it cannot be written;
            `overwrite`, and what PREFIX names is not of a preparation.
    """
    output = f"--output {work.output}"
    _check_own(work)
    if overwrite and _report(work.output) is None:
        _check_outputs(work)
    try:
        work.folder.mkdir(parents=True, exist_ok=True)
        lock = (work / "lock").open("a")
    except OSError as error:
        raise UserError(f"{output}: {work.folder} cannot be written: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{output}: another process is preparing it; valid: wait, or another PREFIX") from None
        temporary.mark(work.folder)
        if overwrite:
            (work / "plan.json").unlink(missing_ok=True)  # first: without it nothing else counts
            with work.writing(work / _WRITING):
                pass
        resumed = (work / "plan.json").exists()
        if not resumed:
            temporary.empty(work.folder, keep=("lock", _WRITING))
            with work.writing(work / "plan.json") as file:
                file.write(json.dumps(plan).encode())
        elif json.loads((work / "plan.json").read_bytes()) != plan:
            raise UserError(
                f"{output}: {work.folder} holds an interrupted preparation of other input or with other options; "
                "valid: the same again, or --overwrite"
            )
        yield resumed


def begin_writing(work: WorkFolder) -> None:
    """Make way for the results: an older report goes, and what PREFIX names may from now on be replaced.

    Raises:
        UserError: something is there that is not of a preparation.
    """
    _check_outputs(work)
    with work.writing(work / _WRITING):
        pass
    report_file(work.output).unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Remove a work folder; if this is interrupted, no part of the folder is used later."""
    discarded = temporary.free_name(folder.with_name(f"{folder.name}.discarded"))
    with contextlib.suppress(OSError):
        if discarded.exists():
            temporary.remove(discarded)
    folder.rename(discarded)
    with contextlib.suppress(OSError):
        temporary.remove(discarded)


_WRITING = "writing"  # a file in the work folder: what PREFIX names was made by a preparation, and may be replaced


def _is_writing(work: WorkFolder) -> bool:
    return temporary.is_marked(work.folder) and (work / _WRITING).exists()


def _outputs(output: str) -> list[Path]:
    """What PREFIX names, as far as it is there."""
    named = (*dataset_files(output), tokenizer_folder(output), report_file(output))
    return [path for path in named if os.path.lexists(path)]


def _report(output: str) -> dict[str, Any] | None:
    """What a preparation wrote last, None where there is none."""
    try:
        found = json.loads(report_file(output).read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("plan"), dict) else None


def _check_outputs(work: WorkFolder) -> None:
    there = _outputs(work.output)
    if there and not _is_writing(work):
        raise UserError(
            f"--output {work.output}: {there[0]} exists and was not made by a preparation; valid: another PREFIX"
        )


def _check_own(work: WorkFolder) -> None:
    """Raises `UserError` where the work folder is something else."""
    if temporary.is_marked(work.folder) or not work.folder.is_dir():
        return
    try:  # without a mark: of an earlier version
        of_plan = {"format", "inputs", "test_sets", "options"} <= json.loads((work / "plan.json").read_bytes()).keys()
    except (OSError, ValueError, AttributeError):
        of_plan = False
    others = sorted(entry.name for entry in work.folder.iterdir() if entry.name != "lock")
    if others and not of_plan:
        raise UserError(
            f"--output {work.output}: {work.folder} holds {others[0]} and no interrupted preparation; "
            "valid: another PREFIX"
        )


def report_file(output: str) -> Path:
    """The report's file, PREFIX.report.json."""
    return Path(f"{output}.report.json")

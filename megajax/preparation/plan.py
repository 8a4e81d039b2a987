"""What a preparation does, and which preparation a work folder belongs to."""

import contextlib
import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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


def finished(output: str, plan: dict[str, Any]) -> dict[str, Any] | None:
    """The report of a preparation that is done; None if it is not.

    Raises:
        UserError: the files are there, but from another plan.
    """
    there = [file for file in (*dataset_files(output), report_file(output)) if file.exists()]
    if not there:
        return None
    try:
        found = json.loads(report_file(output).read_bytes())
        if found["plan"] == plan and len(there) == 3:
            return found
    except (OSError, ValueError, KeyError, TypeError):
        pass
    if Path(f"{output}.work").exists():
        return None
    raise UserError(
        f"--output {output}: {there[0]} exists and was made from other input or with other options; "
        "valid: another PREFIX, or --overwrite"
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
        UserError: another process has it, it holds another preparation, or it cannot be written.
    """
    output = f"--output {work.output}"
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
        if overwrite:
            (work / "plan.json").unlink(missing_ok=True)  # first: without it nothing else counts
            report_file(work.output).unlink(missing_ok=True)
        resumed = (work / "plan.json").exists()
        if not resumed:
            for entry in work.folder.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry)
                elif entry.name != "lock":
                    entry.unlink()
        if not resumed:
            with work.writing(work / "plan.json") as file:
                file.write(json.dumps(plan).encode())
        elif json.loads((work / "plan.json").read_bytes()) != plan:
            raise UserError(
                f"{output}: {work.folder} holds an interrupted preparation of other input or with other options; "
                "valid: the same again, or --overwrite"
            )
        yield resumed


def remove(folder: Path) -> None:
    """Remove a work folder; if this is interrupted, no part of the folder is used later."""
    discarded = folder.with_name(folder.name + ".discarded")
    shutil.rmtree(discarded, ignore_errors=True)
    folder.rename(discarded)
    shutil.rmtree(discarded, ignore_errors=True)


def report_file(output: str) -> Path:
    """The report's file, PREFIX.report.json."""
    return Path(f"{output}.report.json")

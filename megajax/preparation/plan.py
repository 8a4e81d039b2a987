"""A preparation's plan, and the work folder that belongs to it."""

import contextlib
import fcntl
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megajax.core.errors import UserError
from megajax.data.samples.masking import WordPieces
from megajax.data.text.inputs import DOCSTRINGS, identity, read_folders
from megajax.data.text.records import TextFiles
from megajax.data.text.tokenizers import named_tokenizer
from megajax.host import files as temporary
from megajax.preparation.division import SHARD_BYTES
from megajax.preparation.outputs import WRITING, check_apart, check_own, read_json
from megajax.preparation.prepare_options import PrepareOptions
from megajax.preparation.shards import ResumableError, WorkFolder

TRAINED = ("bpe", "wordpiece")  # values of `--tokenizer` for which a tokenizer is trained

_ENDED = "ended"  # a file in the work folder: the command ended with an error
_FORMAT = 4  # version of the work folder's format


@dataclass(frozen=True)
class PreparationTask:
    """What to prepare, and where to write it."""

    inputs: Sequence[str]  # files, folders, URLs, python-stdlib or python-docstrings
    output: str  # PREFIX of the dataset
    options: PrepareOptions
    test_sets: Sequence[str] = ()  # files or folders of test sets that must not be in the corpus


def make_plan(task: PreparationTask, files: TextFiles) -> dict[str, Any]:
    """Everything the result depends on, as JSON. An interrupted preparation resumes only with the same plan."""
    choice = task.options.tokenizer
    tests = TextFiles(task.test_sets, "--decontaminate").files
    tokenizer = choice
    if choice not in TRAINED:
        loaded = named_tokenizer(choice, flag="--tokenizer")  # so that its errors come before any work
        tokenizer = hashlib.sha256(json.dumps(loaded.files).encode()).hexdigest()
        if task.options.split_sentences:
            WordPieces.of(loaded, f"--tokenizer {choice}")
    elif task.options.split_sentences and choice == "bpe":
        raise UserError(
            "--split-sentences with --tokenizer bpe: BERT needs WordPiece; valid: --tokenizer "
            "wordpiece, or a folder with vocab.txt"
        )
    inputs = [("INPUT", file) for file in files.files if isinstance(file, Path)]
    inputs += [("--decontaminate", file) for file in tests if isinstance(file, Path)]
    inputs += [] if choice in TRAINED else [("--tokenizer", Path(choice))]
    folders = [folder for path in task.inputs for folder in read_folders(path, "INPUT")]
    folders += [folder for path in task.test_sets for folder in read_folders(path, "--decontaminate")]
    check_apart(task.output, inputs, folders)
    options = asdict(task.options) | {"tokenizer": tokenizer, "max_broken": None}  # does not change any document
    plan = {
        "format": [_FORMAT, *SHARD_BYTES],
        "inputs": [identity(file) for file in files.files],
        "test_sets": [identity(file) for file in tests],
        "options": options,
    }
    return plan | ({DOCSTRINGS: True} if DOCSTRINGS in map(str, task.inputs) else {})  # has python-stdlib's files


@contextlib.contextmanager
def claimed(work: WorkFolder, plan: dict[str, Any], overwrite: bool) -> Iterator[tuple[bool, WorkFolder]]:
    """Create the work folder if needed and lock it for a `with` block. Gives whether an interrupted preparation is
    resumed, and the subfolder for this plan; a worker left over from another plan writes to another subfolder. With
    `overwrite` the work starts over, but an older dataset stays until it is replaced.

    A `UserError` in the block removes the folder, because correcting the error changes the input or options. The folder
    stays after `ResumableError`, or if outputs are being written: the same command resumes, and a different one starts
    over.
    """
    output = f"--output {work.output}"
    check_own(work, overwrite)
    with work.writable(work.folder):
        work.folder.mkdir(parents=True, exist_ok=True)
        lock = (work / "lock").open("a")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"{output}: another process is preparing it; valid: wait for it, or another PREFIX"
            ) from None
        with work.writable(work.folder):
            temporary.mark(work.folder)
        if overwrite:
            (work / "plan.json").unlink(missing_ok=True)  # first, because without it nothing else is used
            work.touch(WRITING)
        if (work / _ENDED).exists() and read_json(work / "plan.json") != plan:
            (work / "plan.json").unlink(missing_ok=True)
        (work / _ENDED).unlink(missing_ok=True)
        resumed = (work / "plan.json").exists()
        if not resumed:
            temporary.empty(work.folder, keep=("lock", WRITING))
            with work.writing(work / "plan.json") as file:
                file.write(json.dumps(plan).encode())
        elif read_json(work / "plan.json") != plan:
            raise UserError(
                f"{output}: {work.folder} holds an interrupted preparation of other input or with other "
                "options; valid: the same command, or --overwrite"
            )
        digest = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()
        data = replace(work, folder=(work / f"data-{digest[:12]}").absolute())
        with work.writable(data.folder):
            data.folder.mkdir(exist_ok=True)
        try:
            yield resumed, data
        except UserError as error:
            if isinstance(error, ResumableError) or (work / WRITING).exists():
                with contextlib.suppress(UserError):  # a full disk
                    work.touch(_ENDED)
            else:
                remove(work.folder)
            raise


def remove(folder: Path) -> None:
    """Remove a work folder. After an interruption, nothing in it is used."""
    discarded = temporary.free_name(folder.with_name(f"{folder.name}.discarded"))
    with contextlib.suppress(OSError):
        if discarded.exists():
            temporary.remove(discarded)
    folder.rename(discarded)
    with contextlib.suppress(OSError):
        temporary.remove(discarded)

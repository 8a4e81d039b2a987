"""From raw text to a tokenized dataset: the stages one after the other, each going on where it was interrupted."""

import contextlib
import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megajax.data.corpus import TRAINING_BYTES, evenly, tokenizer_folder
from megajax.data.files import folder_atomically, write_atomically
from megajax.data.indexed import IndexedWriter, dataset_files
from megajax.data.records import VALID_PATHS, Record, TextFiles
from megajax.data.text import TextDocuments
from megajax.data.tokenizer import Tokenizer
from megajax.errors import UserError
from megajax.preparation import duplicates
from megajax.preparation.contamination import TestSets
from megajax.preparation.duplicates import Copies, Corpus
from megajax.preparation.options import PrepareOptions, check
from megajax.preparation.progress import Clock, Show
from megajax.preparation.report import report, throughput
from megajax.preparation.shards import KEPT, WorkFolder
from megajax.preparation.stages import analyse_shard, clean_shard
from megajax.preparation.workers import Workers

SHARD_BYTES = 1 << 20, 16 << 20
"""Raw text of a shard, at least and at most; between them 1/64 of the input, so that all cores have work."""

TRAINED = ("bpe", "wordpiece")
"""Values of `--tokenizer` that train one."""

_SHARD_RECORDS = 1 << 16
_FORMAT = 1  # of the work folder; a later version of this code may write another


@dataclass(frozen=True)
class Task:
    """What to prepare, and where to.

    Attributes:
        inputs: files, folders, or the word python-stdlib.
        output: PREFIX of the dataset.
        test_sets: files or folders of test sets that must not be in the corpus.
    """

    inputs: Sequence[str]
    output: str
    options: PrepareOptions
    test_sets: Sequence[str] = ()


def prepare(task: Task, *, workers: int, overwrite: bool, show: Show) -> dict[str, Any]:
    """Make PREFIX.bin, PREFIX.idx, PREFIX.tokenizer and PREFIX.report.json, in this order and each whole.

    PREFIX.work holds what is done so far. The same call goes on from there after an interruption; it returns the report
    at once where all is done. The result does not depend on the number of workers.

    Args:
        task: what to do.
        workers: processes.
        overwrite: begin anew, whatever is there.
        show: told how far it is.

    Returns:
        The report.

    Raises:
        UserError: input, options or output cannot be used; the disk is full.
        RunError: a worker process ended.
    """
    check(task.options)
    files = TextFiles(task.inputs, "INPUT")
    plan = _plan(task, files)
    work = WorkFolder(Path(f"{task.output}.work"), task.output)
    if overwrite:
        _discard(task.output, work)
    elif found := _finished(task.output, plan):
        return found
    with _claimed(work, plan) as resumed:
        found = _run(task, files, work, workers, resumed, show) | {"plan": plan}
        write_atomically(_report_file(task.output), json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        shutil.rmtree(work.folder, ignore_errors=True)
    return found


def _run(task: Task, files: TextFiles, work: WorkFolder, workers: int, resumed: bool, show: Show) -> dict[str, Any]:
    """All stages; returns the report."""
    options, clock = task.options, Clock()
    with Workers(workers) as pool:
        with clock.measuring("cleaning"):
            num_shards = _clean(task, files, work, pool, show)
        with clock.measuring("tokenizer"):
            tokenizer = _tokenizer(task, work, num_shards, show)
            test_sets = _test_sets(task, work)
        with clock.measuring("analysis"):
            _analyse(task, work, num_shards, pool, show)
        corpus = Corpus(work, num_shards)
        exact = near = Copies.none()
        with clock.measuring("duplicates"):
            show.stage("looking for duplicates")
            if options.duplicates != "keep":
                exact = duplicates.drop_exact(corpus)
            if options.duplicates == "near":
                near = duplicates.drop_near(corpus, options.jaccard, pool)
    with clock.measuring("writing"):
        show.stage("writing")
        found = report(task, corpus, files, tokenizer, test_sets, exact, near) | {"resumed": resumed}
        if not (corpus.rule == KEPT).any():
            dropped = ", ".join(f"{rule['count']} {name}" for name, rule in found["dropped"].items() if rule["count"])
            raise UserError(f"INPUT: none of the {len(corpus)} documents is left: {dropped}")
        _write(task.output, corpus, tokenizer)
    return found | {"seconds": clock.seconds, "throughput": throughput(corpus, found, clock)}


def _clean(task: Task, files: TextFiles, work: WorkFolder, pool: Workers, show: Show) -> int:
    """Read and clean the input; returns the number of shards."""
    if (work / "clean.json").exists():
        return int(json.loads((work / "clean.json").read_text()))
    show.stage("cleaning", sum(files.sizes))
    before = np.cumsum([0, *files.sizes])
    num_shards = 0
    broken = _Broken(task, files, work)

    def pieces() -> Iterator[tuple[Any, ...]]:
        nonlocal num_shards
        for records, position in _shards(files, task.options.text_key):
            show.done(int(before[records[-1].file]) + position)
            if not work.has("clean", num_shards):
                yield work, num_shards, records, task.options
            num_shards += 1

    for _ in pool.map(clean_shard, pieces()):
        broken.check()
    broken.check()
    documents = sum(len(work.load("clean", shard, "rule")[0]) for shard in range(num_shards))
    if not documents:
        raise UserError(f"INPUT: no text in {', '.join(task.inputs)}{broken.first()}; {VALID_PATHS}")
    with work.writing(work / "clean.json") as file:
        file.write(str(num_shards).encode())
    return num_shards


def _shards(files: TextFiles, key: str) -> Iterator[tuple[list[Record], int]]:
    """The records of each shard, and how many bytes of the last one's file were read."""
    least, most = SHARD_BYTES
    wanted = min(max(sum(files.sizes) // 64, least), most)
    records: list[Record] = []
    size, position = 0, 0
    for record, position in files.records(key=key):
        records.append(record)
        size += len(record.content)
        if size >= wanted or len(records) == _SHARD_RECORDS:
            yield records, position
            records, size = [], 0
    if records:
        yield records, position


class _Broken:
    """Counts the broken lines of the shards in their order, so that the first one is named whoever found it."""

    def __init__(self, task: Task, files: TextFiles, work: WorkFolder) -> None:
        self._task, self._files, self._work = task, files, work
        self._next, self._count, self._first = 0, 0, ""

    def check(self) -> None:
        """Raises `UserError` where there are more than are passed over."""
        while self._work.has("clean", self._next):
            lines, problem = self._work.load("clean", self._next, "broken", "problem")
            if len(lines) and not self._first:
                self._first = f"{self._files.files[lines[0, 0]]}:{lines[0, 1]}: {problem}"
            self._count += len(lines)
            self._next += 1
            if self._count > self._task.options.max_broken:
                raise UserError(
                    f"{self._first}; more than --max-broken {self._task.options.max_broken} lines are broken; "
                    'valid: {"KEY": "text"} in UTF-8 on each, KEY as in --text-key'
                )

    def first(self) -> str:
        """The first broken line in brackets, if there is one."""
        return f" ({self._first})" if self._first else ""


def _tokenizer(task: Task, work: WorkFolder, num_shards: int, show: Show) -> Tokenizer:
    folder = work / "tokenizer"
    if not folder.exists():
        given = task.options.tokenizer
        if given in TRAINED:
            show.stage(f"training the tokenizer ({given})")
            size = sum(int(work.load("clean", shard, "starts")[0][-1]) for shard in range(num_shards))
            texts = (text for shard in range(num_shards) for text in work.texts(shard) if text)
            sample = evenly(texts, TRAINING_BYTES / max(size, 1))
            tokenizer = Tokenizer.train(sample, task.options.vocab_size, given, flag="--vocab-size")  # type: ignore[arg-type]
        else:
            tokenizer = Tokenizer.load(given, flag="--tokenizer")
        with folder_atomically(folder) as new:
            tokenizer.save(new)
    return Tokenizer.load(folder)


def _test_sets(task: Task, work: WorkFolder) -> TestSets:
    file = work / "test-sets.npz"
    if not file.exists():
        texts = [TextDocuments(path, cut=False, flag="--decontaminate") for path in task.test_sets]
        with work.writing(file) as handle:
            TestSets.collect(texts).save(handle)
    return TestSets.load(file)


def _analyse(task: Task, work: WorkFolder, num_shards: int, pool: Workers, show: Show) -> None:
    show.stage("tokenizing", num_shards)
    missing = [shard for shard in range(num_shards) if not work.has("tokens", shard)]
    pieces = ((work, shard, task.options) for shard in missing)
    for done, _ in enumerate(pool.map(analyse_shard, pieces), start=1):
        show.done(num_shards - len(missing) + done)


def _write(output: str, corpus: Corpus, tokenizer: Tokenizer) -> None:
    with folder_atomically(tokenizer_folder(output)) as folder:
        tokenizer.save(folder)
    with IndexedWriter(output, tokenizer.size) as writer:
        for shard in range(corpus.num_shards):
            tokens, ends = corpus.work.load("tokens", shard, "tokens", "ends")
            for document in np.flatnonzero(corpus.kept(shard)).tolist():
                begin = ends[document - 1] if document else 0
                writer.add_document(np.append(tokens[begin : ends[document]], tokenizer.end_of_text))


def _plan(task: Task, files: TextFiles) -> dict[str, Any]:
    """What the result depends on; an interrupted preparation goes on only with the same."""

    def described(paths: Sequence[Path]) -> list[list[Any]]:
        return [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in paths]

    given = task.options.tokenizer
    tokenizer = given
    if given not in TRAINED:
        Tokenizer.load(given, flag="--tokenizer")  # its errors come before any work
        content = b"".join(file.read_bytes() for file in sorted(Path(given).iterdir()) if file.is_file())
        tokenizer = hashlib.sha256(content).hexdigest()
    return {
        "format": [_FORMAT, *SHARD_BYTES],
        "inputs": described(files.files),
        "test_sets": described(TextFiles(task.test_sets, "--decontaminate").files),
        "options": asdict(task.options) | {"tokenizer": tokenizer},
    }


def _discard(output: str, work: WorkFolder) -> None:
    """Forget what is done. An older dataset stays until the new one takes its place."""
    shutil.rmtree(work.folder, ignore_errors=True)
    _report_file(output).unlink(missing_ok=True)


def _finished(output: str, plan: dict[str, Any]) -> dict[str, Any] | None:
    """The report of a preparation that is done."""
    there = [file for file in (*dataset_files(output), _report_file(output)) if file.exists()]
    if not there or Path(f"{output}.work").exists():
        return None
    try:
        found = json.loads(_report_file(output).read_bytes())
        if found["plan"] == plan and len(there) == 3:
            return found
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise UserError(
        f"--output {output}: {there[0]} exists and was made from other input or with other options; "
        "valid: another PREFIX, or --overwrite"
    )


@contextlib.contextmanager
def _claimed(work: WorkFolder, plan: dict[str, Any]) -> Iterator[bool]:
    """The work folder for this process alone, made if missing; whether it goes on with an interrupted preparation.

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
        resumed = (work / "plan.json").exists()
        if not resumed:
            with work.writing(work / "plan.json") as file:
                file.write(json.dumps(plan).encode())
        elif json.loads((work / "plan.json").read_bytes()) != plan:
            raise UserError(
                f"{output}: {work.folder} holds an interrupted preparation of other input or with other options; "
                "valid: the same again, or --overwrite"
            )
        yield resumed


def _report_file(output: str) -> Path:
    return Path(f"{output}.report.json")

"""From raw text to a tokenized dataset in stages; an interrupted stage resumes."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from megajax.data.digests import digests_of
from megajax.data.encoding import as_document
from megajax.data.files import folder_atomically, write_atomically
from megajax.data.indexed import IndexedWriter, dataset_files
from megajax.data.inputs import valid_paths
from megajax.data.prepared import tokenizer_folder
from megajax.data.records import Record, TextDocuments, TextFiles
from megajax.data.tokenizer import Tokenizer
from megajax.data.tokenizers import (
    has_only_tokenizer_files,
    load_tokenizer,
    named_tokenizer,
    train_tokenizer,
    training_part,
)
from megajax.errors import UserError
from megajax.host import reading
from megajax.options import check
from megajax.preparation import duplicates
from megajax.preparation.cleaning import clean
from megajax.preparation.contamination import TestSets
from megajax.preparation.duplicates import Copies, Shards
from megajax.preparation.outputs import begin_writing, finished, report_file, work_folder
from megajax.preparation.plan import SHARD_BYTES, TRAINED, Task, claimed, make_plan, remove
from megajax.preparation.progress import Show, measuring
from megajax.preparation.report import printable, report, throughput
from megajax.preparation.shards import KEPT, WorkFolder, opened
from megajax.preparation.stages import analyse_shard, clean_shard
from megajax.preparation.workers import Workers

_SHARD_RECORDS = 1 << 16


def prepare_dataset(task: Task, *, workers: int, overwrite: bool, show: Show) -> dict[str, Any]:
    """Make PREFIX.bin, PREFIX.idx, PREFIX.tokenizer and PREFIX.report.json, each atomically.

    PREFIX.work holds what is done so far, from which the same call goes on after an interruption. A call for a dataset
    that is complete only returns its report. The result does not depend on the number of workers.

    With `overwrite` it begins anew, and replaces what another preparation made. Returns the report.


    Raises:
        UserError: input, options or output cannot be used; the disk is full.
        RunError: a worker process ended.
    """
    check(task.options)
    files = TextFiles(task.inputs, "INPUT")
    plan = make_plan(task, files)
    work = work_folder(task.output)
    if not overwrite and (found := finished(work, plan)):
        return found
    with claimed(work, plan, overwrite) as resumed:
        found = _run(task, files, work, workers, resumed, show) | {"plan": plan}
        write_atomically(report_file(task.output), printable(json.dumps(found, indent=1, ensure_ascii=False)) + "\n")
        remove(work.folder)
    return found


def _run(task: Task, files: TextFiles, work: WorkFolder, workers: int, resumed: bool, show: Show) -> dict[str, Any]:
    """Run all stages; returns the report without its plan."""
    options, seconds = task.options, dict[str, float]()
    with Workers(workers) as pool:
        with measuring(seconds, "cleaning"):
            num_shards = _clean(task, files, work, pool, show)
        with measuring(seconds, "tokenizer"):
            tokenizer = _tokenizer(task, work, num_shards, show)
            test_sets = _test_sets(task, work)
        with measuring(seconds, "analysis"):
            _analyse(task, work, num_shards, pool, show)
        corpus = Shards(work, num_shards)
        exact = near = Copies.none()
        with measuring(seconds, "duplicates"):
            show.begin("looking for duplicates")
            if options.duplicates != "keep":
                exact = duplicates.drop_exact(corpus)
            if options.duplicates == "near":
                near = duplicates.drop_near(corpus, options.jaccard, pool)
    with measuring(seconds, "writing"):
        show.begin("writing")
        found = report(task, corpus, files, tokenizer, test_sets, exact, near) | {"resumed": resumed}
        if not (corpus.rule == KEPT).any():
            dropped = ", ".join(f"{rule['count']} {name}" for name, rule in found["dropped"].items() if rule["count"])
            raise UserError(
                f"INPUT: none of the {len(corpus)} documents is left: {dropped}; --min-tokens {options.min_tokens} "
                "drops shorter ones; valid: less, longer text, or --duplicates and --contaminated that drop less"
            )
        begin_writing(work)
        digests = _write(task.output, corpus, tokenizer, options.split_sentences)
    return found | {"digests": digests} | {"seconds": seconds, "throughput": throughput(corpus, found, seconds)}


def _clean(task: Task, files: TextFiles, work: WorkFolder, pool: Workers, show: Show) -> int:
    """Read and clean the input; returns the number of shards."""
    if (work / "clean.json").exists():
        with opened(work / "clean.json") as file:
            return int(reading.parse_json(file.read(reading.SMALL_BYTES).decode()))
    show.begin("cleaning", sum(files.sizes))
    before = np.cumsum([0, *files.sizes])
    num_shards = 0
    broken = _Broken(task, files, work)

    def pieces() -> Iterator[tuple[Any, ...]]:
        nonlocal num_shards
        for records, num_read in _shards(files, task.options.text_key, work):
            show.advance(int(before[records[-1].file]) + num_read)
            if not work.has("clean", num_shards):
                yield work, num_shards, records, task.options
            num_shards += 1

    for _ in pool.map(clean_shard, pieces()):
        broken.check()
    broken.check()
    documents = sum(len(work.load("clean", shard, "rule")[0]) for shard in range(num_shards))
    if not documents:
        valid = "valid: another --text-key" if broken.first() else valid_paths("INPUT")
        remove(work.folder)
        raise UserError(f"INPUT: no text in {', '.join(task.inputs)}{broken.first()}; {valid}")
    with work.writing(work / "clean.json") as file:
        file.write(str(num_shards).encode())
    return num_shards


def _shards(files: TextFiles, key: str, work: WorkFolder) -> Iterator[tuple[list[Record], int]]:
    """The records of each shard, and the bytes read so far of the file of its last record.

    Input that cannot be read ends the preparation and its work folder: once mended, it is another input.
    """
    least, most = SHARD_BYTES
    wanted = min(max(sum(files.sizes) // 64, least), most)
    records: list[Record] = []
    size, num_read = 0, 0
    try:
        for record, num_read in files.records(key=key):
            records.append(record)
            size += len(record.content)
            if size >= wanted or len(records) == _SHARD_RECORDS:
                yield records, num_read
                records, size = [], 0
    except UserError:
        remove(work.folder)
        raise
    if records:
        yield records, num_read


class _Broken:
    """Counts the broken lines of the shards in order, so that the first is the same for any number of workers."""

    def __init__(self, task: Task, files: TextFiles, work: WorkFolder) -> None:
        self._task, self._files, self._work = task, files, work
        self._next, self._count, self._first = 0, 0, ""

    def check(self) -> None:
        """Count the broken lines of the shards that were finished since the last call."""
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
            show.begin(f"training the tokenizer ({given})")
            size = sum(int(work.load("clean", shard, "starts")[0][-1]) for shard in range(num_shards))
            texts: Iterator[str] = (text for shard in range(num_shards) for text in work.texts(shard) if text)
            texts = training_part(texts, size)
            tokenizer = train_tokenizer(texts, task.options.vocab_size, given, flag="--vocab-size")  # type: ignore[arg-type]
        else:
            tokenizer = named_tokenizer(given, flag="--tokenizer")
        with folder_atomically(folder) as new:
            tokenizer.save(new)
    return load_tokenizer(folder)


def _test_sets(task: Task, work: WorkFolder) -> TestSets:
    file = work / "test-sets.npz"
    if not file.exists():
        options = task.options

        def cleaned(path: str) -> Iterator[str]:  # like the corpus, else a repaired text is not found
            for text in TextDocuments(path, cut=False, flag="--decontaminate", key=options.test_key):
                yield clean(text, fix_unicode=options.fix_unicode, clean_newlines=options.clean_newlines)

        with work.writing(file) as handle:
            TestSets.collect(map(cleaned, task.test_sets)).save(handle)
    return TestSets.load(file)


def _analyse(task: Task, work: WorkFolder, num_shards: int, pool: Workers, show: Show) -> None:
    show.begin("tokenizing", num_shards)
    missing = [shard for shard in range(num_shards) if not work.has("tokens", shard)]
    pieces = ((work, shard, task.options) for shard in missing)
    for done, _ in enumerate(pool.map(analyse_shard, pieces), start=1):
        show.advance(num_shards - len(missing) + done)


def _write(output: str, corpus: Shards, tokenizer: Tokenizer, split_sentences: bool) -> dict[str, str]:
    """Write the dataset and its tokenizer; returns their digests."""
    with folder_atomically(tokenizer_folder(output), ours=has_only_tokenizer_files) as folder:
        tokenizer.save(folder)
    with IndexedWriter(output, tokenizer.size) as writer:
        for shard in range(corpus.num_shards):
            tokens, ends = corpus.work.load("tokens", shard, "tokens", "ends")
            borders = np.cumsum(corpus.work.load("tokens", shard, "lengths")[0]) if split_sentences else None
            for document in np.flatnonzero(corpus.kept(shard)).tolist():
                begin, end = ends[document - 1] if document else 0, ends[document]
                if borders is None:
                    writer.add_document(as_document(tokens[begin:end], tokenizer))
                else:
                    first, last = np.searchsorted(borders, [begin + 1, end])
                    writer.add_document(*np.split(tokens[begin:end], borders[first:last] - begin))
    return digests_of(dataset_files(output)[0], writer.digests, tokenizer_folder(output))

"""From raw text to a tokenized dataset in stages; an interrupted stage resumes."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from megajax.data.digests import digests_of
from megajax.data.encoding import as_document
from megajax.data.files import folder_atomically, write_atomically
from megajax.data.indexed import IndexedWriter, dataset_files, tokenizer_folder
from megajax.data.inputs import valid_paths
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
from megajax.host.transcript import printable
from megajax.options import check
from megajax.preparation import duplicates
from megajax.preparation.cleaning import clean
from megajax.preparation.contamination import TestSets
from megajax.preparation.duplicates import Copies, Shards
from megajax.preparation.options import PrepareOptions
from megajax.preparation.outputs import begin_writing, finished, report_file, work_folder
from megajax.preparation.plan import SHARD_BYTES, TRAINED, Task, claimed, make_plan, remove
from megajax.preparation.report import report, throughput
from megajax.preparation.running import Map, Show, measuring, worker_map
from megajax.preparation.shards import EXACT, KEPT, NEAR, RULES, GoesOn, WorkFolder, opened
from megajax.preparation.stages import analyse_shard, clean_shard

_SHARD_RECORDS = 1 << 16


def prepare_dataset(task: Task, *, workers: int, overwrite: bool, show: Show) -> dict[str, Any]:
    """Make PREFIX.bin, PREFIX.idx, PREFIX.tokenizer and PREFIX.report.json, each atomically; returns the report.

    PREFIX.work holds what is done so far, from which the same call goes on after an interruption. A call for a dataset
    that is complete only returns its report. With `overwrite` it begins anew, and replaces what another preparation
    made. The result does not depend on the number of workers. Raises `RunError` if one of them ended.
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
    options, seconds, copies = task.options, dict[str, float](), dict[int, Copies]()
    with worker_map(workers) as run:
        with measuring(seconds, "cleaning"):
            test_sets = _test_sets(task, work)
            num_shards = _clean(task, files, work, run, show)
        with measuring(seconds, "tokenizer"):
            tokenizer = _tokenizer(task, work, num_shards, show)
        with measuring(seconds, "analysis"):
            left = [shard for shard in range(num_shards) if not work.has("tokens", shard)]
            show.begin("tokenizing", len(left))
            for done, _ in enumerate(run(analyse_shard, ((work, shard, options) for shard in left)), start=1):
                show.advance(done)
        corpus = Shards(work, num_shards)
        with measuring(seconds, "duplicates"):
            show.begin("looking for duplicates")
            if options.duplicates != "keep":
                copies[EXACT] = duplicates.drop_exact(corpus)
            if options.duplicates == "near":
                copies[NEAR] = duplicates.drop_near(corpus, options.jaccard, run)
    with measuring(seconds, "writing"):
        show.begin("writing")
        if not (corpus.rule == KEPT).any():
            counts = np.bincount(corpus.rule, minlength=len(RULES) + 1)
            dropped = ", ".join(f"{counts[rule]} {name}" for rule, name in RULES.items() if counts[rule])
            raise UserError(
                f"INPUT: none of the {len(corpus)} documents is left: {dropped}; valid: a lower "
                f"--min-tokens than {options.min_tokens}, longer documents, or a milder --duplicates or "
                "--decontaminate-how"
            )
        begin_writing(work)
        digests = _write(task.output, corpus, tokenizer, options.split_sentences)
    with measuring(seconds, "report"):
        found = report(task, corpus, files, tokenizer, test_sets, copies) | {"resumed": resumed, "digests": digests}
    return found | {"seconds": seconds, "throughput": throughput(corpus, found, seconds)}


def _clean(task: Task, files: TextFiles, work: WorkFolder, run: Map, show: Show) -> int:
    """Read and clean the input; returns the number of shards."""
    if (work / "clean.json").exists():
        with opened(work / "clean.json") as file:
            return int(reading.parse_json(file.read(reading.SMALL_BYTES).decode()))
    show.begin("cleaning", sum(files.sizes))
    before = np.cumsum([0, *files.sizes])
    num_shards = documents = num_broken = 0
    first, limit = "", task.options.max_broken

    def count(shard: int) -> None:
        nonlocal documents, num_broken, first
        found, broken, problem = work.load("clean", shard, "documents", "broken", "problem")
        if len(broken) and not first:
            first = f"{files.files[broken[0, 0]]}:{broken[0, 1]}: {problem}"
        documents, num_broken = documents + int(found), num_broken + len(broken)
        if num_broken > limit:
            raise GoesOn(
                f"{first}; more than --max-broken {limit} lines are broken; "
                'valid: {"KEY": "text"} in UTF-8 on each, KEY as in --text-key, of at most --max-document'
            )

    def not_cleaned() -> Iterator[tuple[Any, ...]]:
        nonlocal num_shards
        for shard, (records, num_read) in enumerate(_shards(files, task.options)):
            num_shards = shard + 1
            show.advance(int(before[records[-1].file]) + num_read)
            if work.has("clean", shard):
                count(shard)
            else:
                yield work, shard, records, task.options

    for shard in run(clean_shard, not_cleaned()):
        count(shard)
    if not documents:
        example, valid = (f" ({first})", "valid: another --text-key") if first else ("", valid_paths("INPUT"))
        raise UserError(f"INPUT: no text in {', '.join(task.inputs)}{example}; {valid}")
    with work.writing(work / "clean.json") as file:
        file.write(str(num_shards).encode())
    return num_shards


def _shards(files: TextFiles, options: PrepareOptions) -> Iterator[tuple[list[Record], int]]:
    """The records of each shard, and the bytes read so far of the file of its last record."""
    least, most = SHARD_BYTES
    wanted = min(max(sum(files.sizes) // 64, least), most)
    records: list[Record] = []
    size, num_read = 0, 0
    for record, num_read in files.records(key=options.text_key, most=options.max_document << 20):
        records.append(record)
        size += len(record.content)
        if size >= wanted or len(records) == _SHARD_RECORDS:
            yield records, num_read
            records, size = [], 0
    if records:
        yield records, num_read


def _tokenizer(task: Task, work: WorkFolder, num_shards: int, show: Show) -> Tokenizer:
    folder = work / "tokenizer"
    if not folder.exists():
        given = task.options.tokenizer
        if given in TRAINED:
            show.begin(f"training the tokenizer ({given})")
            size = sum(int(work.load("clean", shard, "starts")[0][-1]) for shard in range(num_shards))
            texts = (text for shard in range(num_shards) for text in work.texts(shard) if text)
            part = training_part(texts, size)
            tokenizer = train_tokenizer(part, task.options.vocab_size, given, flag="--vocab-size")  # type: ignore[arg-type]
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

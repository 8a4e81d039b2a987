"""The two stages that workers run on each shard: cleaning its documents, then analysing them (paper §4.1). Between the
two stages a tokenizer is trained, unless one is given.
"""

import functools
import hashlib
import itertools
import os
import tempfile
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megajax.core.errors import UserError
from megajax.data.text.encoding import as_document, encode_texts, in_parts
from megajax.data.text.records import END, NoText, NotUtf8, TextDocuments, text_of
from megajax.data.text.tokenizer import Tokenizer
from megajax.data.text.tokenizers import TRAINING_BYTES, is_chosen, load_tokenizer, train_tokenizer
from megajax.preparation.cleaning import clean
from megajax.preparation.contamination import TestSets, decontaminated
from megajax.preparation.corpus import CleanedShards
from megajax.preparation.division import forget, records_of
from megajax.preparation.duplicates import band_hashes
from megajax.preparation.prepare_options import PrepareOptions
from megajax.preparation.running import measuring
from megajax.preparation.shards import CONTAMINATED, EMPTY, KEPT, RULES, SHORT, ResumableError, WorkFolder
from megajax.preparation.similarity import SKETCH, normalised, sketches

CLEANING = ("cleaning", "test_sets")  # parts of `clean_shard` that are timed
ANALYSIS = ("tokenizing", "minhash")  # parts of `analyse_shard` that are timed
_PARALLELISM = "TOKENIZERS_PARALLELISM"
_CHARACTERS = 1 << 20  # analysed together; limits a worker's memory

# Texts are encoded in a thread that does nothing else. glibc gives a thread its own heap, and this one has none of the
# holes that imports and the loading of a tokenizer leave: small pieces lie close together. Four workers on two cores
# were a fifth faster (docs/benchmarks/data.md).
_ENCODER = ThreadPoolExecutor(1)


def clean_shard(work: WorkFolder, shard: int, options: PrepareOptions) -> dict[str, Any]:
    """Read a shard's documents, clean them and cut test sets out of them. Write the texts and these arrays:

    - `source` and `number` [D]: each document's file, and its number in that file; numbers in the shard's first file
      count from the beginning of the shard.
    - `rule` [D]: `EMPTY`, `CONTAMINATED` or `KEPT`.
    - `starts` [D + 1]: the byte offsets of the texts.
    - `hits` [hits, 2]: a document and a test set's gram that it contains; the document is -1 if the gram was cut out.

    The summary has `pieces` (D) and `texts` (those that are not empty); the number of `documents`, `skipped_files`,
    `text_bytes` read and `bytes` written; `cuts`: how many documents were cut, how many documents that added, and how
    many characters were cut out or dropped; the number of `broken` lines, the file and number of the first and its
    `problem`; `rules`: the number of documents by rule; `files`: the first file, the last file, and the number of the
    shard's records in the last; `seconds` for each of `CLEANING`.
    """
    if done := work.summary("clean", shard):
        return done
    loaded = work.wait_for("test-sets.npz")
    test_sets = _loaded(TestSets.load, loaded, loaded.stat().st_mtime_ns)
    seconds = dict.fromkeys(CLEANING, 0.0)
    sources, numbers, rules, hits = array("q"), array("q"), array("B"), [np.empty((0, 2), np.int64)]
    counts = dict.fromkeys(("documents", "skipped_files", "text_bytes", "texts", "broken"), 0)
    first_broken, problem, files, cuts = [-1, -1], "", [-1, -1, 0], [0, 0, 0]

    def cleaned() -> Iterator[str]:
        nonlocal first_broken, problem
        for record in records_of(work, shard, options):
            files[:] = [record.file if files[0] < 0 else files[0], record.file, record.number]
            if record.kind == END:
                continue
            with measuring(seconds, "cleaning"):
                try:
                    raw = text_of(record, options.text_key)
                except NotUtf8:
                    counts["skipped_files"] += 1
                    continue
                except NoText as error:
                    if not counts["broken"]:
                        first_broken, problem = [record.file, record.number], str(error)
                    counts["broken"] += 1
                    continue
                counts["documents"] += 1
                counts["text_bytes"] += len(raw.encode())
                text = clean(raw, fix_unicode=options.fix_unicode, clean_newlines=options.clean_newlines)
            with measuring(seconds, "test_sets"):
                pieces, grams = decontaminated(text, test_sets, options.decontaminate_how)
                document = len(rules)
                if is_cut := pieces not in ([], [text]):
                    cuts[:] = [cuts[0] + 1, cuts[1] + len(pieces) - 1, cuts[2] + len(text) - sum(map(len, pieces))]
                    hits.extend(_hits(document + n, test_sets.found_in(piece)) for n, piece in enumerate(pieces))
                cuts[2] += 0 if pieces else len(text)
                hits.append(_hits(-1 if is_cut else document, grams))
            for piece in pieces or [text]:
                rules.append(CONTAMINATED if not pieces else KEPT if text else EMPTY)
                sources.append(record.file)
                numbers.append(record.number)
                counts["texts"] += bool(piece)
                yield piece

    starts = work.save_texts(shard, cleaned())
    arrays: dict[str, npt.NDArray[Any]] = {
        "source": np.array(sources, np.int64),
        "number": np.array(numbers, np.int64),
        "rule": np.array(rules, np.uint8),
        "starts": starts,
        "hits": np.concatenate(hits),
    }
    summary = {
        "pieces": len(rules),
        "bytes": int(starts[-1]),
        "rules": np.bincount(arrays["rule"], minlength=len(RULES) + 1).tolist(),
        "cuts": cuts,
        "first_broken": first_broken,
        "problem": problem,
        "files": files,
        "seconds": list(seconds.values()),
    }
    return work.save("clean", shard, arrays, counts | summary)


def analyse_shard(work: WorkFolder, shard: int, options: PrepareOptions) -> dict[str, Any]:
    """Tokenize and hash a shard's documents. Write the band hashes and these arrays:

    - `rule` [D]: `KEPT`, or the rule that has dropped the document so far.
    - `tokens` of all documents as in the dataset, and where each document `ends` [D]; dropped documents have no tokens.
    - `lengths` of all sentences in tokens; only with `--split-sentences`.
    - `digest`, uint64 [D, 2]: digests of the texts.
    - `sketched` and `sketches`: the numbers of the long documents that have a sketch, and their sketches.

    The summary has `rules`, the number of documents by rule, and `seconds` for each of `ANALYSIS`.
    """
    if done := work.summary("tokens", shard):
        return done
    (rule,) = work.load("clean", shard, "rule")
    folder = work.wait_for("tokenizer")
    tokenizer = _loaded(load_tokenizer, folder, folder.stat().st_mtime_ns)
    seconds = dict.fromkeys(ANALYSIS, 0.0)
    dtype = np.uint16 if tokenizer.size <= 2**16 else np.uint32
    tokens, digests, bands = [], [], []
    sketched, sketches_of = [np.empty(0, np.int64)], [np.empty((0, SKETCH), np.uint64)]
    lengths: list[int] = []
    of_sentences: list[int] = []
    document = 0
    for texts in in_parts(work.texts(shard), _CHARACTERS):
        verdict = rule[document : document + len(texts)]  # a view of `rule` for these texts
        with measuring(seconds, "tokenizing"):
            left = [text if rule == KEPT else "" for text, rule in zip(texts, verdict.tolist(), strict=True)]
            encoding = _ENCODER.submit(encode_texts, left, tokenizer, sentences=options.split_sentences)
            for index, sequences in enumerate(encoding.result()):
                ids = list(itertools.chain(*sequences))
                if verdict[index] == KEPT and (len(ids) < options.min_tokens or not sequences):
                    verdict[index] = SHORT
                if verdict[index] == KEPT:
                    found: npt.NDArray[np.integer] = np.array(ids, dtype)
                    tokens.append(found if options.split_sentences else as_document(found, tokenizer).astype(dtype))
                    of_sentences += map(len, sequences)
                lengths.append(len(tokens[-1]) if verdict[index] == KEPT else 0)
        with measuring(seconds, "minhash"):
            kept = np.flatnonzero(verdict == KEPT)
            if options.duplicates != "keep":
                digests.append(np.zeros((len(texts), 2), np.uint64))
                for index in kept.tolist():
                    digests[-1][index] = _digest(texts[index])
            if options.duplicates == "near":
                compared = [normalised(texts[index]) for index in kept]
                hashes = band_hashes(compared, options.jaccard)
                bands.append(np.zeros((len(hashes), len(texts)), np.uint64))
                bands[-1][:, kept] = hashes
                long, sketches_found = sketches(compared)
                sketched.append(document + kept[long])
                sketches_of.append(sketches_found)
        document += len(texts)
    if options.duplicates == "near":
        work.save_bands(shard, np.concatenate(bands, axis=1) if bands else np.empty((0, 0), np.uint64))
    arrays: dict[str, npt.NDArray[Any]] = {
        "rule": rule,
        "tokens": np.concatenate([np.empty(0, dtype), *tokens]),
        "ends": np.cumsum(lengths, dtype=np.int64),
        "digest": np.concatenate([np.empty((0, 2), np.uint64), *digests]),
        "sketched": np.concatenate(sketched),
        "sketches": np.concatenate(sketches_of),
    }
    if options.split_sentences:
        arrays["lengths"] = np.array(of_sentences, np.int64)
    rules = np.bincount(rule, minlength=len(RULES) + 1).tolist()
    forget(work, shard)
    return work.save("tokens", shard, arrays, {"rules": rules, "seconds": list(seconds.values())})


def collect_test_sets(work: WorkFolder, paths: list[str], options: PrepareOptions) -> None:
    """Write the grams of the test sets."""
    if (work / "test-sets.npz").exists():
        return

    def cleaned(path: str) -> Iterator[str]:  # as the corpus is, otherwise repaired texts would not match
        for text in TextDocuments(path, cut=False, flag="--decontaminate", key=options.test_key):
            yield clean(text, fix_unicode=options.fix_unicode, clean_newlines=options.clean_newlines)

    with work.writing(work / "test-sets.npz") as handle:
        TestSets.collect(map(cleaned, paths)).save(handle)


def sample_texts(work: WorkFolder, group: int) -> None:
    """Write the texts of a group that a tokenizer is trained on: evenly spaced ones among all texts of the corpus."""
    if work.has("sample", group):
        return
    corpus = CleanedShards.load(work)
    share = TRAINING_BYTES / max(1, corpus.text_bytes)
    chosen = list[bytes]()
    for shard in corpus.shards_of(group):
        index = int(corpus.texts[shard])
        for text in filter(None, work.texts(shard)):
            if is_chosen(index, share):
                chosen.append(text.encode())
            index += 1
    sizes = np.array([*map(len, chosen)], np.int64)
    work.save("sample", group, {"sizes": sizes, "content": np.frombuffer(b"".join(chosen), np.uint8)})


def train(work: WorkFolder, options: PrepareOptions) -> None:
    """Train the tokenizer on the samples of all groups, on all cores."""
    if (work / "tokenizer").exists():
        return

    def texts() -> Iterator[str]:
        for group in range(CleanedShards.load(work).num_groups):
            sizes, content = work.load("sample", group, "sizes", "content")
            for end, size in zip(np.cumsum(sizes).tolist(), sizes.tolist(), strict=True):
                yield content[end - size : end].tobytes().decode()

    before = os.environ.pop(_PARALLELISM, None)
    try:
        tokenizer = train_tokenizer(texts(), options.vocab_size, options.tokenizer, flag="--vocab-size")  # type: ignore[arg-type]
    finally:
        if before is not None:
            os.environ[_PARALLELISM] = before
    save_tokenizer(work, tokenizer)


def save_tokenizer(work: WorkFolder, tokenizer: Tokenizer) -> None:
    """Write the tokenizer of the dataset."""
    with work.writable(work / "tokenizer"):
        new = Path(tempfile.mkdtemp(prefix="tokenizer.", suffix=".partial", dir=work.folder))
        try:
            tokenizer.save(new)
        except UserError as error:
            raise ResumableError(f"{error}; rerun the command to resume") from None
        try:
            new.rename(work / "tokenizer")
        except OSError:
            if not (work / "tokenizer").is_dir():  # otherwise another worker was faster and wrote the same
                raise


def _hits(document: int, grams: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.stack([np.full_like(grams, document), grams], axis=1)


def _digest(text: str) -> npt.NDArray[np.uint64]:
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), "<u8")


@functools.lru_cache(maxsize=2)
def _loaded(load: Callable[[Path], Any], path: Path, changed: int) -> Any:
    """`load(path)`, cached; `changed` is the time of the last modification."""
    return load(path)

"""The two stages of a preparation that workers run on one shard: cleaning its documents, and analysing them (paper
§5.2).
"""

import functools
import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megajax.data.encoding import encode_texts, in_parts
from megajax.data.records import NoText, NotUtf8, Record, text_of
from megajax.data.tokenizers import load_tokenizer
from megajax.preparation.cleaning import clean
from megajax.preparation.contamination import TestSets, decontaminated
from megajax.preparation.duplicates import band_hashes
from megajax.preparation.options import PrepareOptions
from megajax.preparation.running import measuring
from megajax.preparation.shards import CONTAMINATED, EMPTY, KEPT, SHORT, WorkFolder
from megajax.preparation.similarity import SKETCH, normalised, sketches

CLEANING = ("cleaning", "test_sets")  # what `clean_shard` does, as its times are named
ANALYSIS = ("tokenizing", "minhash")  # what `analyse_shard` does
_CHARACTERS = 1 << 20  # analysed at a time: bounds the memory of a worker


def clean_shard(work: WorkFolder, shard: int, records: list[Record], options: PrepareOptions) -> int:
    """Clean the documents of a shard, cut test sets out of them, and write them and these arrays; returns the shard.

    - `source` and `number` [D]: the file that a document comes from, and its number there.
    - `rule` [D]: `EMPTY`, `CONTAMINATED` or `KEPT`.
    - `starts` [D + 1]: the bytes at which the texts begin.
    - `hits` [hits, 2]: document, -1 where it was cut out, and gram of a test set that is in it.
    - `cuts` [cut, 3]: documents that were cut, how many more they became, and characters that were cut out.
    - `broken` [lines, 2]: file and number of the broken lines; `problem`: what is wrong with the first.
    - `documents`, `skipped_files`, `text_bytes`: counts.
    - `seconds` [2]: of `CLEANING`.
    """
    test_sets = _loaded(TestSets.load, work / "test-sets.npz", (work / "test-sets.npz").stat().st_mtime_ns)
    seconds = dict.fromkeys(CLEANING, 0.0)
    texts, rules, places, hits, cuts = list[str](), list[int](), list[tuple[int, int]](), [], []
    broken, problem, documents, skipped_files, text_bytes = [], "", 0, 0, 0
    for record in records:
        with measuring(seconds, "cleaning"):
            try:
                raw = text_of(record, options.text_key)
            except NotUtf8:
                skipped_files += 1
                continue
            except NoText as error:
                problem = problem or str(error)
                broken.append((record.file, record.number))
                continue
            documents += 1
            text_bytes += len(raw.encode())
            text = clean(raw, fix_unicode=options.fix_unicode, clean_newlines=options.clean_newlines)
        with measuring(seconds, "test_sets"):
            found, grams = decontaminated(text, test_sets, options.decontaminate_how)
            if is_cut := found not in ([], [text]):
                cuts.append((len(texts), len(found) - 1, len(text) - sum(map(len, found))))
                hits += [_hits(len(texts) + place, test_sets.found_in(piece)) for place, piece in enumerate(found)]
            hits.append(_hits(-1 if is_cut else len(texts), grams))
        texts += found or [text]
        rules += [CONTAMINATED if not found else KEPT if text else EMPTY] * (len(found) or 1)
        places += [(record.file, record.number)] * (len(found) or 1)
    places_2D = np.array(places, np.int64).reshape(-1, 2)
    arrays: dict[str, npt.NDArray[Any]] = {
        "source": places_2D[:, 0],
        "number": places_2D[:, 1],
        "rule": np.array(rules, np.uint8),
        "starts": work.save_texts(shard, texts),
        "hits": np.concatenate([np.empty((0, 2), np.int64), *hits]),
        "cuts": np.array(cuts, np.int64).reshape(-1, 3),
        "broken": np.array(broken, np.int64).reshape(-1, 2),
        "problem": np.array(problem),
        "documents": np.array(documents),
        "skipped_files": np.array(skipped_files),
        "text_bytes": np.array(text_bytes),
        "seconds": np.array(list(seconds.values())),
    }
    work.save("clean", shard, arrays)
    return shard


def analyse_shard(work: WorkFolder, shard: int, options: PrepareOptions) -> None:
    """Tokenize the documents of a shard, and hash them. Write the band hashes and these arrays:

    - `rule` [D]: what became of a document so far.
    - `tokens` of all documents, `ends` [D] of each; dropped documents have none.
    - `lengths` of all sentences, in tokens. Only with `--split-sentences`.
    - `digest`, uint64 [D, 2]: of the texts.
    - `sketched` and `sketches`: the numbers of long documents that have a sketch, and these.
    - `seconds` [2]: of `ANALYSIS`.
    """
    (rule,) = work.load("clean", shard, "rule")
    tokenizer = _loaded(load_tokenizer, work / "tokenizer", (work / "tokenizer").stat().st_mtime_ns)
    seconds = dict.fromkeys(ANALYSIS, 0.0)
    dtype = np.uint16 if tokenizer.size <= 2**16 else np.uint32
    tokens, digests, bands = [], [], []
    sketched, sketches_of = [np.empty(0, np.int64)], [np.empty((0, SKETCH), np.uint64)]
    lengths: list[int] = []
    of_sentences: list[int] = []
    document = 0
    for texts in in_parts(work.texts(shard), _CHARACTERS):
        own = rule[document : document + len(texts)]  # of these texts; what is set here is set in `rule`
        with measuring(seconds, "tokenizing"):
            left = [text if rule == KEPT else "" for text, rule in zip(texts, own.tolist(), strict=True)]
            for number, sequences in enumerate(encode_texts(left, tokenizer, sentences=options.split_sentences)):
                ids = list(itertools.chain(*sequences))
                if own[number] == KEPT and (len(ids) < options.min_tokens or not sequences):
                    own[number] = SHORT
                if own[number] == KEPT:
                    tokens.append(np.array(ids, dtype))
                    of_sentences += map(len, sequences)
                lengths.append(len(ids) if own[number] == KEPT else 0)
        with measuring(seconds, "minhash"):
            kept = np.flatnonzero(own == KEPT)
            if options.duplicates != "keep":
                digests.append(np.zeros((len(texts), 2), np.uint64))
                for number in kept.tolist():
                    digests[-1][number] = _digest(texts[number])
            if options.duplicates == "near":
                compared = [normalised(texts[number]) for number in kept]
                hashes = band_hashes(compared, options.jaccard)
                bands.append(np.zeros((len(hashes), len(texts)), np.uint64))
                bands[-1][:, kept] = hashes
                long, found = sketches(compared)
                sketched.append(document + kept[long])
                sketches_of.append(found)
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
        "seconds": np.array(list(seconds.values())),
    }
    if options.split_sentences:
        arrays["lengths"] = np.array(of_sentences, np.int64)
    work.save("tokens", shard, arrays)


def _hits(document: int, grams: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.stack([np.full_like(grams, document), grams], axis=1)


def _digest(text: str) -> npt.NDArray[np.uint64]:
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), "<u8")


@functools.lru_cache(maxsize=2)
def _loaded(load: Callable[[Path], Any], path: Path, changed: int) -> Any:
    """What a function reads, once as long as `path` has not `changed`."""
    return load(path)

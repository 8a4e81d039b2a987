"""The two stages of a preparation that workers run on one shard: cleaning its documents, and analysing them."""

import functools
import hashlib
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megajax.data.encoding import encode_texts, in_parts
from megajax.data.records import NoText, NotUtf8, Record, text_of
from megajax.data.tokenizer import Tokenizer
from megajax.data.tokenizers import load_tokenizer
from megajax.preparation.cleaning import clean, normalised
from megajax.preparation.contamination import TestSets
from megajax.preparation.minhash import band_hashes
from megajax.preparation.options import PrepareOptions
from megajax.preparation.shards import CONTAMINATED, EMPTY, KEPT, SHORT, Arrays, WorkFolder

_CHARACTERS = 1 << 20  # analysed at a time: bounds the memory of a worker


def clean_shard(work: WorkFolder, shard: int, records: list[Record], options: PrepareOptions) -> None:
    """Clean the documents of a shard, and write them and these arrays:

    - `source` and `number` [D]: the file that a document comes from, and its number there.
    - `rule` [D]: `EMPTY` or `KEPT`.
    - `starts` [D + 1]: the bytes at which the texts begin.
    - `broken` [lines, 2]: file and number of the broken lines; `problem`: what is wrong with the first.
    - `skipped_files`, `text_bytes`, `seconds`: counts.
    """
    began = time.perf_counter()
    texts, places, broken, problem, skipped_files, text_bytes = [], [], [], "", 0, 0
    for record in records:
        try:
            text = text_of(record, options.text_key)
        except NotUtf8:
            skipped_files += 1
        except NoText as error:
            problem = problem or str(error)
            broken.append((record.file, record.number))
        else:
            text_bytes += len(text.encode())
            texts.append(clean(text, fix_unicode=options.fix_unicode, clean_newlines=options.clean_newlines))
            places.append((record.file, record.number))
    places_2D = np.array(places, np.int64).reshape(-1, 2)
    arrays: Arrays = {
        "source": places_2D[:, 0],
        "number": places_2D[:, 1],
        "rule": np.array([KEPT if text else EMPTY for text in texts], np.uint8),
        "starts": work.save_texts(shard, texts),
        "broken": np.array(broken, np.int64).reshape(-1, 2),
        "problem": np.array(problem),
        "skipped_files": np.array(skipped_files),
        "text_bytes": np.array(text_bytes),
        "seconds": np.array(time.perf_counter() - began),
    }
    work.save("clean", shard, arrays)


def analyse_shard(work: WorkFolder, shard: int, options: PrepareOptions) -> None:
    """Tokenize the documents of a shard, look for test sets, and hash them. Write the band hashes and these arrays:

    - `rule` [D]: what became of a document so far.
    - `tokens` of all documents, `ends` [D] of each; dropped documents have none.
    - `sentences` [D]: how many a document has; `lengths` of all of them, in tokens. Only with `--split-sentences`.
    - `digest`, uint64 [D, 2]: of the texts.
    - `hits` [hits, 2]: document and gram of a test set that is in it.
    - `seconds` [3]: of tokenizing, test sets and hashing.
    """
    (rule,) = work.load("clean", shard, "rule")
    tokenizer = _tokenizer(work / "tokenizer", (work / "tokenizer").stat().st_mtime_ns)
    test_sets = _test_sets(work / "test-sets.npz", (work / "test-sets.npz").stat().st_mtime_ns)
    seconds = np.zeros(3)
    dtype = np.uint16 if tokenizer.size <= 2**16 else np.uint32
    tokens, lengths, digests, hits, bands = [], [], [], [], []
    sentences: list[list[int]] = []  # lengths of those of each document
    document = 0
    for texts in in_parts(work.texts(shard), _CHARACTERS):
        began = time.perf_counter()
        for offset, sequences in enumerate(encode_texts(texts, tokenizer, sentences=options.split_sentences)):
            number = document + offset
            ids = [token for sequence in sequences for token in sequence]
            if rule[number] == KEPT and (len(ids) < options.min_tokens or not sequences):
                rule[number] = SHORT
            tokens.append(np.array(ids if rule[number] == KEPT else [], dtype))
            lengths.append(len(tokens[-1]))
            sentences.append([len(sequence) for sequence in sequences] if rule[number] == KEPT else [])
        seconds[0] += time.perf_counter() - began
        began = time.perf_counter()
        for offset, text in enumerate(texts):
            number = document + offset
            if rule[number] == KEPT and len(found := test_sets.found_in(text)):
                hits.append(np.stack([np.full_like(found, number), found], axis=1))
                if options.contaminated == "remove":
                    rule[number] = CONTAMINATED
        seconds[1] += time.perf_counter() - began
        began = time.perf_counter()
        kept = np.flatnonzero(rule[document : document + len(texts)] == KEPT)
        if options.duplicates != "keep":
            digest = np.zeros((len(texts), 2), np.uint64)
            digest[kept] = [_digest(texts[offset]) for offset in kept] if len(kept) else 0
            digests.append(digest)
        if options.duplicates == "near":
            hashes = band_hashes([normalised(texts[offset]) for offset in kept], options.jaccard)
            bands.append(np.zeros((len(hashes), len(texts)), np.uint64))
            bands[-1][:, kept] = hashes
        seconds[2] += time.perf_counter() - began
        document += len(texts)
    if options.duplicates == "near":
        work.save_bands(shard, np.concatenate(bands, axis=1) if bands else np.empty((0, 0), np.uint64))
    arrays: Arrays = {
        "rule": rule,
        "tokens": np.concatenate([np.empty(0, dtype), *tokens]),
        "ends": np.cumsum(lengths, dtype=np.int64),
        "digest": np.concatenate([np.empty((0, 2), np.uint64), *digests]),
        "hits": np.concatenate([np.empty((0, 2), np.int64), *hits]),
        "seconds": seconds,
    }
    if options.split_sentences:
        flat = np.array([length for document in sentences for length in document], np.int64)
        arrays = {**arrays, "sentences": np.array(list(map(len, sentences)), np.int64), "lengths": flat}
    work.save("tokens", shard, arrays)


def _digest(text: str) -> npt.NDArray[np.uint64]:
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), "<u8")


@functools.lru_cache(maxsize=1)
def _tokenizer(folder: Path, changed: int) -> Tokenizer:  # `changed` tells the cache of a new one in the same folder
    return load_tokenizer(folder)


@functools.lru_cache(maxsize=1)
def _test_sets(file: Path, changed: int) -> TestSets:
    return TestSets.load(file)

"""The two stages of a preparation that workers run on one shard: cleaning its documents, and analysing them (paper
§5.2).
"""

import functools
import hashlib
import itertools
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megajax.data.encoding import encode_texts, in_parts
from megajax.data.records import NoText, NotUtf8, Record, text_of
from megajax.data.tokenizers import load_tokenizer
from megajax.preparation.contamination import TestSets
from megajax.preparation.duplicates import band_hashes, normalised
from megajax.preparation.options import PrepareOptions
from megajax.preparation.running import measuring
from megajax.preparation.shards import CONTAMINATED, EMPTY, KEPT, SHORT, WorkFolder

ANALYSIS = ("tokenizing", "test_sets", "minhash")  # what `analyse_shard` does, as its times are named
_CHARACTERS = 1 << 20  # analysed at a time: bounds the memory of a worker
_MAY_NEED_REPAIR = re.compile(r"[^\n\t\x20-\x25\x27-\x7e]")  # ftfy changes no other text; & begins an entity
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_END_OF_LINE = re.compile(r"[ \t]*(?:\r\n?|\n)")
_BLANK_LINES = re.compile(r"\n{3,}")


def clean(text: str, *, fix_unicode: bool, clean_newlines: bool) -> str:
    """The text of a document as it goes into the corpus; empty if only white space is left.

    `fix_unicode` repairs wrongly decoded characters, HTML entities, ligatures, curly quotes, line ends (`ftfy`). With
    `clean_newlines` lines end with LF and no white space, and there are no blank lines at the ends or two in a row.
    """
    if fix_unicode:
        text = _repaired(text)
    if clean_newlines:
        text = _BLANK_LINES.sub("\n\n", _END_OF_LINE.sub("\n", text)).strip("\n")
    return "" if text.isspace() else text


def _repaired(text: str) -> str:
    """`ftfy.fix_text(text)`, called only for the lines that it may change; it works line by line."""
    if not _MAY_NEED_REPAIR.search(text):
        return text
    import ftfy

    as_html: bool | str = "auto"
    lines = []
    for line in _LINE.findall(text):
        if "<" in line:
            as_html = False  # markup from here on: entities are left as they are
        lines.append(ftfy.fix_text(line, unescape_html=as_html) if _MAY_NEED_REPAIR.search(line) else line)
    return "".join(lines)


def clean_shard(work: WorkFolder, shard: int, records: list[Record], options: PrepareOptions) -> None:
    """Clean the documents of a shard, and write them and these arrays:

    - `source` and `number` [D]: the file that a document comes from, and its number there.
    - `rule` [D]: `EMPTY` or `KEPT`.
    - `starts` [D + 1]: the bytes at which the texts begin.
    - `broken` [lines, 2]: file and number of the broken lines; `problem`: what is wrong with the first.
    - `skipped_files`, `text_bytes`, `seconds`: counts.
    """
    if work.has("clean", shard):
        return
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
    arrays: dict[str, npt.NDArray[Any]] = {
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
    - `lengths` of all sentences, in tokens. Only with `--split-sentences`.
    - `digest`, uint64 [D, 2]: of the texts.
    - `hits` [hits, 2]: document and gram of a test set that is in it.
    - `seconds` [3]: of `ANALYSIS`.
    """
    if work.has("tokens", shard):
        return
    (rule,) = work.load("clean", shard, "rule")
    tokenizer = _loaded(load_tokenizer, work / "tokenizer", (work / "tokenizer").stat().st_mtime_ns)
    test_sets = _loaded(TestSets.load, work / "test-sets.npz", (work / "test-sets.npz").stat().st_mtime_ns)
    seconds = dict.fromkeys(ANALYSIS, 0.0)
    dtype = np.uint16 if tokenizer.size <= 2**16 else np.uint32
    tokens, digests, hits, bands = [], [], [], []
    lengths: list[int] = []
    of_sentences: list[int] = []
    document = 0
    for texts in in_parts(work.texts(shard), _CHARACTERS):
        own = rule[document : document + len(texts)]  # of these texts; what is set here is set in `rule`
        with measuring(seconds, "tokenizing"):
            for number, sequences in enumerate(encode_texts(texts, tokenizer, sentences=options.split_sentences)):
                ids = list(itertools.chain(*sequences))
                if own[number] == KEPT and (len(ids) < options.min_tokens or not sequences):
                    own[number] = SHORT
                if own[number] == KEPT:
                    tokens.append(np.array(ids, dtype))
                    of_sentences += map(len, sequences)
                lengths.append(len(ids) if own[number] == KEPT else 0)
        with measuring(seconds, "test_sets"):
            for number in np.flatnonzero(own == KEPT).tolist():
                if len(found := test_sets.found_in(texts[number])):
                    hits.append(np.stack([np.full_like(found, document + number), found], axis=1))
                    if options.contaminated == "remove":
                        own[number] = CONTAMINATED
        with measuring(seconds, "minhash"):
            kept = np.flatnonzero(own == KEPT)
            if options.duplicates != "keep":
                digests.append(np.zeros((len(texts), 2), np.uint64))
                for number in kept.tolist():
                    digests[-1][number] = _digest(texts[number])
            if options.duplicates == "near":
                hashes = band_hashes([normalised(texts[number]) for number in kept], options.jaccard)
                bands.append(np.zeros((len(hashes), len(texts)), np.uint64))
                bands[-1][:, kept] = hashes
        document += len(texts)
    if options.duplicates == "near":
        work.save_bands(shard, np.concatenate(bands, axis=1) if bands else np.empty((0, 0), np.uint64))
    arrays: dict[str, npt.NDArray[Any]] = {
        "rule": rule,
        "tokens": np.concatenate([np.empty(0, dtype), *tokens]),
        "ends": np.cumsum(lengths, dtype=np.int64),
        "digest": np.concatenate([np.empty((0, 2), np.uint64), *digests]),
        "hits": np.concatenate([np.empty((0, 2), np.int64), *hits]),
        "seconds": np.array(list(seconds.values())),
    }
    if options.split_sentences:
        arrays["lengths"] = np.array(of_sentences, np.int64)
    work.save("tokens", shard, arrays)


def _digest(text: str) -> npt.NDArray[np.uint64]:
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), "<u8")


@functools.lru_cache(maxsize=2)
def _loaded(load: Callable[[Path], Any], path: Path, changed: int) -> Any:
    """What a function reads, once as long as `path` has not `changed`."""
    return load(path)

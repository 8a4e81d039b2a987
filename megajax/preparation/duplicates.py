"""Which documents are copies of earlier ones, over all shards, in bounded memory (paper §5.2).

N documents over all shards, numbered in the order of the input. First identical texts are dropped, then similar ones. A
document is dropped only if the document that it is similar to is kept, so every dropped one is similar to a kept one.

Similar ones are found by banded MinHash signatures of their sets of character 5-grams. Two documents are candidates if
all hashes of at least one band agree: with r hashes in each of b bands, and a Jaccard similarity of J, that happens
with probability 1 - (1 - J^r)^b.

The index is on disk: 16 bytes of digest and 8 bytes a band (36 bands at a Jaccard similarity of 0.7) for each document,
304 in all. One band at a time is sorted, at most `_ENTRIES` documents of it in memory (some 60 bytes each). The pairs
to compare are on disk, too, 8 bytes each: few where documents differ, at most 33 for each document and band. Long
documents have many, as they share the grams of their language; most of their pairs are told by sketches
(`similarity.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megajax.preparation.options import PrepareOptions
from megajax.preparation.running import Map
from megajax.preparation.shards import EXACT, KEPT, NEAR, WorkFolder
from megajax.preparation.similarity import Grams, compare, gram_hashes, mixed

HASHES = 256  # of a signature
_RECALL = 0.95  # of pairs right at the threshold; more above it
_SEED = 1
_ENTRIES = 1 << 25  # documents sorted at a time
_NEIGHBOURS = 32  # documents of a bucket that each is compared with: those before it, and the first
_PART = 1 << 18  # documents whose candidates lie in one file
_PAIRS_BYTES = 1 << 27  # of a file of candidates, after which repeated pairs are dropped from it
_PAIRS = 4096  # candidates that a worker compares at a time


@dataclass
class Copies:
    """The documents that were dropped as copies, in order."""

    originals: npt.NDArray[np.int64]  # for each the number of the document that it is a copy of
    similarity: npt.NDArray[np.float64]  # of each to its original, 0 to 1
    candidates: int = 0  # pairs that were compared


class Shards:
    """All shards as one sequence of N documents."""

    def __init__(self, work: WorkFolder, num_shards: int) -> None:
        self.work, self.num_shards = work, num_shards
        rules = list(self.loaded("tokens", "rule"))
        self.rule = np.concatenate([np.empty(0, np.uint8), *rules])  # what became of every document so far, [N]
        self.starts = np.cumsum([0, *map(len, rules)])  # the first document of every shard, and N

    def __len__(self) -> int:
        return int(self.starts[-1])

    def loaded(self, stage: str, name: str) -> Iterator[npt.NDArray[Any]]:
        """One of a stage's results for every shard."""
        return (self.work.load(stage, shard, name)[0] for shard in range(self.num_shards))

    def kept(self, shard: int) -> npt.NDArray[np.bool_]:
        """Which documents of a shard are kept, [D]."""
        return self.rule[self.starts[shard] : self.starts[shard + 1]] == KEPT


def index_bytes(options: PrepareOptions) -> int:
    """Bytes of the index on disk for each document."""
    bands = bands_for(options.jaccard)[0] if options.duplicates == "near" else 0
    return 8 * bands + (16 if options.duplicates != "keep" else 0)


def drop_exact(corpus: Shards) -> Copies:
    """Drop documents whose text equals that of an earlier one; returns them."""
    documents, originals = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for keys, numbers in _sorted_entries(corpus, lambda shard: corpus.work.load("tokens", shard, "digest")[0]):
        first = _first_equal(keys)
        is_copy = first < np.arange(len(keys))
        documents.append(numbers[is_copy])
        originals.append(numbers[first[is_copy]])
    order = np.argsort(np.concatenate(documents))
    copies = np.concatenate(documents)[order]
    corpus.rule[copies] = EXACT
    return Copies(np.concatenate(originals)[order], np.ones(len(copies)))


def drop_near(corpus: Shards, threshold: float, run: Map) -> Copies:
    """Drop documents whose 5-grams have a Jaccard similarity above `threshold` to those of an earlier document that
    stays; returns them."""
    work, total, grams = corpus.work, len(corpus), Grams(corpus.work, corpus.starts)
    if not (work / "pairs.done").exists():
        _write_candidates(corpus, bands_for(threshold)[0])
    copies = [np.empty((0, 3))]
    candidates = 0
    for part in range(-(-total // _PART)):
        if not work.has("similar", part):
            pairs = np.stack(np.divmod(_candidates(_candidates_file(work, part)), total), axis=1)
            some = (pairs[start : start + _PAIRS] for start in range(0, len(pairs), _PAIRS))
            pieces = ((work, corpus.starts, each, threshold) for each in some)
            similarity, exact = np.concatenate([np.empty((0, 2)), *run(compare, pieces)]).T
            similar = similarity > threshold
            arrays = {"pairs": pairs, "similarity": similarity, "exact": exact}
            arrays = {name: array[similar] for name, array in arrays.items()} | {"candidates": np.array(len(pairs))}
            work.save("similar", part, arrays)
        pairs, similarity, exact, compared = work.load("similar", part, "pairs", "similarity", "exact", "candidates")
        candidates += int(compared)
        dropped = []
        for number, (document, original) in enumerate(pairs.tolist()):
            if corpus.rule[document] == KEPT and corpus.rule[original] == KEPT:
                if not exact[number]:
                    similarity[number] = grams.similarity(document, original)
                if similarity[number] > threshold:
                    corpus.rule[document] = NEAR
                    dropped.append(number)
        copies.append(np.column_stack([pairs[dropped], similarity[dropped]]))
    _, originals, values = np.concatenate(copies).T
    return Copies(originals.astype(np.int64), values, candidates)


def _write_candidates(corpus: Shards, num_bands: int) -> None:
    """Write the pairs that share a bucket as document * N + earlier document, one file for every `_PART` documents."""
    work, total = corpus.work, len(corpus)
    for part in range(-(-total // _PART)):
        _candidates_file(work, part).unlink(missing_ok=True)
    limits: dict[int, int] = {}
    for band in range(num_bands):

        def hashes(shard: int, band: int = band) -> npt.NDArray[np.uint64]:
            return work.band(shard, band, int(corpus.starts[shard + 1] - corpus.starts[shard]))[:, None]

        for keys, documents in _sorted_entries(corpus, hashes):
            pairs = _pairs(keys, documents, total)
            for part in np.unique(pairs // total // _PART).tolist():
                file = _candidates_file(work, part)
                with work.writable(file), file.open("ab") as content:
                    content.write(pairs[pairs // total // _PART == part].tobytes())
                    full = content.tell() > limits.get(part, _PAIRS_BYTES)
                if full:
                    different = _candidates(file)
                    with work.writing(file) as new:
                        new.write(different.tobytes())
                    limits[part] = max(2 * different.nbytes, _PAIRS_BYTES)
    work.touch("pairs.done")


def _candidates(file: Path) -> npt.NDArray[np.int64]:
    """The pairs in a file of candidates, ascending, each once."""
    return np.unique(np.fromfile(file, np.int64)) if file.exists() else np.empty(0, np.int64)


def _candidates_file(work: WorkFolder, part: int) -> Path:
    return work / f"pairs-{part:06}.bin"


def _pairs(keys: npt.NDArray[np.uint64], documents: npt.NDArray[np.int64], total: int) -> npt.NDArray[np.int64]:
    """Pairs of each document and earlier ones in its bucket, as document * N + earlier document, from sorted keys."""
    first = _first_equal(keys)
    rank = np.arange(len(keys)) - first  # in the bucket
    pairs = []
    for distance in range(1, min(_NEIGHBOURS, int(rank.max(initial=0))) + 1):
        later = np.flatnonzero(rank >= distance)
        pairs.append(documents[later] * total + documents[later - distance])
    far = np.flatnonzero(rank > _NEIGHBOURS)
    return np.concatenate([np.empty(0, np.int64), *pairs, documents[far] * total + documents[first[far]]])


def _first_equal(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """The place of the first key that equals each of some sorted keys [n, k], int64 [n]."""
    begins = np.concatenate([[True], (keys[1:] != keys[:-1]).any(axis=1)])
    return np.maximum.accumulate(np.where(begins, np.arange(len(keys)), 0))


def _sorted_entries(
    corpus: Shards, keys: Callable[[int], npt.NDArray[np.uint64]]
) -> Iterator[tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]]:
    """The keys of the kept documents, sorted, [n, k], and the document of each, [n]; a range of hashes at a time."""
    parts = -(-int((corpus.rule == KEPT).sum()) // _ENTRIES)
    for part in range(parts):
        found, documents = [], []
        for shard in range(corpus.num_shards):
            hashes = keys(shard)
            inside = corpus.kept(shard)
            if parts > 1:
                inside = inside & (hashes[:, 0] % np.uint64(parts) == part)
            found.append(hashes[inside])
            documents.append(np.flatnonzero(inside) + corpus.starts[shard])
        hashes, numbers = np.concatenate(found), np.concatenate(documents)
        order = np.lexsort((numbers, *hashes.T[::-1]))
        yield hashes[order], numbers[order]


def bands_for(threshold: float) -> tuple[int, int]:
    """Numbers of bands and of hashes in each: the most selective that find 95% of the pairs at `threshold`."""
    rows = max(
        rows for rows in range(1, HASHES + 1) if rows == 1 or 1 - (1 - threshold**rows) ** (HASHES // rows) >= _RECALL
    )
    return HASHES // rows, rows


def band_hashes(texts: Sequence[str], threshold: float) -> npt.NDArray[np.uint64]:
    """One hash per band of each normalised text, uint64 [bands, N]; the same on every machine."""
    from rensa import RMinHash

    num_bands, rows = bands_for(threshold)
    if not texts:
        return np.empty((num_bands, 0), np.uint64)
    grams, starts = gram_hashes(texts)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(grams, starts.tolist(), HASHES, _SEED)
    signatures = np.array(matrix.to_rows(), np.uint64)
    banded = signatures[:, : num_bands * rows].reshape(len(texts), num_bands, rows)
    result = np.zeros((len(texts), num_bands), np.uint64)
    for row in range(rows):
        result = mixed(result, banded[:, :, row])
    return np.ascontiguousarray(result.T)

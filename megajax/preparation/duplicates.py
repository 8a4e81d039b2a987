"""Find candidates for copies of earlier documents, over all shards, in bounded memory (paper §4.1).

N documents over all shards, numbered in input order. First identical texts are dropped, then similar ones. A document
is dropped only if the document it is similar to is kept, so every dropped document is similar to a kept one.

Similar documents are found with banded MinHash signatures of their sets of character 5-grams. Two documents are
candidates if all hashes of at least one band agree. With r hashes in each of b bands, and Jaccard similarity J, this
happens with probability 1 - (1 - J^r)^b.

Hashes are partitioned by value into P parts per band. Groups of documents send hashes to parts, and parts send back
what they find:

    spread_digests  sends a group's digests to the parts
    same_digests    finds equal digests in a part, and sends copies to their groups
    spread_bands    removes exact copies from a group, and sends the other documents' band hashes to the parts
    same_bands      finds pairs with equal hashes in a part, and sends them to the group of the later document
    candidates      removes repeated pairs in a group; then `deciding.py` compares the pairs

Each is a task that writes one file, and reads slices of the files of earlier tasks. The largest things in memory are a
part, or a group's pairs: at most 33 per document and band, and few if the documents differ. On disk a document takes
16 bytes for its digest and 8 bytes per band (36 bands at a Jaccard similarity of 0.7), and three times as much until
its part is done.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megajax.preparation.corpus import CleanedShards
from megajax.preparation.prepare_options import PrepareOptions
from megajax.preparation.shards import KEPT, WorkFolder
from megajax.preparation.similarity import gram_hashes, mixed

HASHES = 256  # hashes in a signature
_RECALL = 0.95  # for pairs exactly at the threshold; higher above it
_SEED = 1
_ENTRIES = 1 << 23  # documents per part
_NEIGHBOURS = 32  # a document is compared with so many preceding ones of its bucket, and with the first
_PAIRS = 1 << 24  # pairs of a group in memory before repeated ones are removed
_CHUNK = 4096  # candidates compared by one task


def index_bytes(options: PrepareOptions) -> int:
    """Bytes on disk per document, for the hashes and their partitioned copies."""
    bands = bands_for(options.jaccard)[0] if options.duplicates == "near" else 0
    return (8 + 16) * bands + (16 + 24 if options.duplicates != "keep" else 0)


def num_parts(corpus: CleanedShards) -> int:
    """P, the number of parts into which the digests, or a band's hashes, are partitioned."""
    return max(1, -(-len(corpus) // _ENTRIES))


def spread_digests(work: WorkFolder, group: int) -> None:
    """Write the digests of a group's documents, partitioned."""
    if (work / _file("digests", group)).exists():
        return
    corpus, rows = CleanedShards.load(work), [np.empty((0, 3), np.uint64)]
    for shard in corpus.shards_of(group):
        digests, rule = work.load("tokens", shard, "digest", "rule")
        documents = np.flatnonzero(rule == KEPT)
        rows.append(np.column_stack([digests[documents], _numbers(documents + corpus.starts[shard])]))
    table, parts = np.concatenate(rows), num_parts(corpus)
    work.save_slices(_file("digests", group), [(table, table[:, 0] % np.uint64(parts), parts)])


def same_digests(work: WorkFolder, index: int) -> None:
    """Write a part's documents that have the digest of an earlier one, with the first such one, by group."""
    if (work / _file("copies", index)).exists():
        return
    corpus = CleanedShards.load(work)
    slices = (work.slice(_file("digests", group), index, num_parts(corpus), 3) for group in range(corpus.num_groups))
    keys, documents = _sorted(np.concatenate([np.empty((0, 3), np.uint64), *slices]))
    first = _first_equal(keys)
    is_copy = first < np.arange(len(keys))
    copies = np.column_stack([documents[is_copy], documents[first[is_copy]]])
    work.save_slices(_file("copies", index), [(copies, corpus.groups_of(copies[:, 0]), corpus.num_groups)])


def spread_bands(work: WorkFolder, group: int, options: PrepareOptions) -> dict[str, Any]:
    """Write the exact copies in a group (`documents`) and their `originals`; and the band hashes of the remaining
    documents, partitioned. The summary has how many were `dropped`."""
    if done := work.summary("exact", group):
        return done
    corpus = CleanedShards.load(work)
    parts = num_parts(corpus)
    slices = (work.slice(_file("copies", part), group, corpus.num_groups, 2) for part in range(parts))
    copies = np.concatenate([np.empty((0, 2), np.uint64), *slices]).astype(np.int64)
    copies = copies[np.argsort(copies[:, 0])]
    left = {}  # remaining documents by shard
    for shard in corpus.shards_of(group):
        rule, (begin, end) = work.load("tokens", shard, "rule")[0], corpus.starts[shard : shard + 2]
        rule[copies[np.searchsorted(copies[:, 0], begin) : np.searchsorted(copies[:, 0], end), 0] - begin] = 0xFF
        left[shard] = np.flatnonzero(rule == KEPT), len(rule)

    def tables() -> Iterator[tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], int]]:
        for band in range(bands_for(options.jaccard)[0]):
            rows = [np.empty((0, 2), np.uint64)]
            for shard, (documents, size) in left.items():
                hashes = work.band(shard, band, size)[documents]
                rows.append(np.column_stack([hashes, _numbers(documents + corpus.starts[shard])]))
            table = np.concatenate(rows)
            yield table, table[:, 0] % np.uint64(parts), parts

    if options.duplicates == "near":
        work.save_slices(_file("bands", group), tables())
    return work.save("exact", group, {"documents": copies[:, 0], "originals": copies[:, 1]}, {"dropped": len(copies)})


def same_bands(work: WorkFolder, index: int, options: PrepareOptions) -> None:
    """Write the pairs of documents with equal hashes in a part of a band, by the group of the later document. `index`
    is the part's number, counted over all bands."""
    if (work / _file("pairs", index)).exists():
        return
    corpus = CleanedShards.load(work)
    count = num_parts(corpus) * bands_for(options.jaccard)[0]
    slices = (work.slice(_file("bands", group), index, count, 2) for group in range(corpus.num_groups))
    pairs = _pairs(*_sorted(np.concatenate([np.empty((0, 2), np.uint64), *slices])), len(corpus))
    groups = corpus.groups_of(pairs // np.uint64(len(corpus)))
    work.save_slices(_file("pairs", index), [(pairs[:, None], groups, corpus.num_groups)])


def candidates(work: WorkFolder, group: int, options: PrepareOptions) -> dict[str, int]:
    """Write the pairs whose later document is in a group, ascending, each once, in chunks. The summary has the numbers
    of `pairs` and `chunks`."""
    if done := work.summary("candidates", group):
        return done
    corpus = CleanedShards.load(work)
    merged, size = [np.empty(0, np.uint64)], 0
    for index in range(num_parts(corpus) * bands_for(options.jaccard)[0]):
        merged.append(work.slice(_file("pairs", index), group, corpus.num_groups, 1)[:, 0])
        size += len(merged[-1])
        if size > 2 * max(len(merged[0]), _PAIRS // 2):
            merged = [np.unique(np.concatenate(merged))]
            size = len(merged[0])
    pairs = np.unique(np.concatenate(merged))
    chunks = -(-len(pairs) // _CHUNK)
    work.save_slices(_file("candidates", group), [(pairs[:, None], np.arange(len(pairs)) // _CHUNK, chunks)])
    return work.save("candidates", group, {}, {"pairs": len(pairs), "chunks": chunks})


def chunk_of_candidates(work: WorkFolder, group: int, chunk: int, chunks: int) -> npt.NDArray[np.int64]:
    """A chunk of pairs, the later document first, int64 [pairs, 2]."""
    pairs = work.slice(_file("candidates", group), chunk, chunks, 1)[:, 0]
    return np.stack(np.divmod(pairs, np.uint64(len(CleanedShards.load(work)))), axis=1).astype(np.int64)


def _file(kind: str, number: int) -> str:
    return f"{kind}-{number:06}.bin"


def _numbers(documents: npt.NDArray[np.integer]) -> npt.NDArray[np.uint64]:
    return documents.astype(np.uint64)


def _sorted(rows: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Sort rows; returns their keys [n, k] and their documents, the last column, [n]."""
    rows = rows[np.lexsort(rows.T[::-1])]
    return rows[:, :-1], rows[:, -1]


def _pairs(keys: npt.NDArray[np.uint64], documents: npt.NDArray[np.uint64], total: int) -> npt.NDArray[np.uint64]:
    """Pair each document with earlier ones in its bucket, as document * N + earlier document. The keys are sorted."""
    first = _first_equal(keys)
    rank = np.arange(len(keys)) - first  # position in the bucket
    size, pairs = np.uint64(total), [np.empty(0, np.uint64)]
    for distance in range(1, min(_NEIGHBOURS, int(rank.max(initial=0))) + 1):
        later = np.flatnonzero(rank >= distance)
        pairs.append(documents[later] * size + documents[later - distance])
    far = np.flatnonzero(rank > _NEIGHBOURS)
    return np.concatenate([*pairs, documents[far] * size + documents[first[far]]])


def _first_equal(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """For each of the sorted keys [n, k] the index of the first equal key, int64 [n]."""
    begins = np.concatenate([[True], (keys[1:] != keys[:-1]).any(axis=1)])
    return np.maximum.accumulate(np.where(begins, np.arange(len(keys)), 0))


def bands_for(threshold: float) -> tuple[int, int]:
    """The number of bands and of hashes per band: the most selective that find 95% of the pairs at `threshold`."""
    rows = max(
        rows for rows in range(1, HASHES + 1) if rows == 1 or 1 - (1 - threshold**rows) ** (HASHES // rows) >= _RECALL
    )
    return HASHES // rows, rows


def band_hashes(texts: Sequence[str], threshold: float) -> npt.NDArray[np.uint64]:
    """One hash per band of each normalised text, uint64 [bands, N], the same on every machine."""
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

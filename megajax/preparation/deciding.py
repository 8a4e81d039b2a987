"""Decide which candidates are similar and which documents are dropped.

Workers compare the pairs in chunks. Then one pass over the similar pairs decides in document order; it reads no text
and needs one bit of memory per document. Workers recheck exactly whatever the pass decided by an estimated similarity.
If an estimate was wrong, the pass is repeated with the exact similarity. So the outcome is the same as if all pairs had
been compared exactly.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from megajax.preparation.corpus import CleanedShards
from megajax.preparation.duplicates import (
    bands_for,
    candidates,
    chunk_of_candidates,
    num_parts,
    same_bands,
    same_digests,
    spread_bands,
    spread_digests,
)
from megajax.preparation.prepare_options import PrepareOptions
from megajax.preparation.shards import WorkFolder
from megajax.preparation.similarity import Grams, compare
from megajax.preparation.workers import Workers


def drop_copies(work: WorkFolder, options: PrepareOptions, workers: Workers) -> Iterator[tuple[str, int]]:
    """Find the copies of earlier documents in all groups. Yields the name of each step and its number of pieces, and
    last `pairs` and the number of compared pairs. Writes `exact` (`spread_bands`) and `near` (`check`) per group."""
    corpus = CleanedShards.load(work)
    groups = [(work, group) for group in range(corpus.num_groups)]
    parts = num_parts(corpus)

    def run(function: Any, pieces: list[tuple[Any, ...]]) -> list[Any]:
        return list(workers.run("duplicates", function, pieces))

    yield "digests", 2 * len(groups) + parts
    run(spread_digests, groups)
    run(same_digests, [(work, index) for index in range(parts)])
    run(spread_bands, [(*args, options) for args in groups])
    if options.duplicates != "near":
        return
    parts *= bands_for(options.jaccard)[0]
    yield "bands", parts + len(groups)
    run(same_bands, [(work, index, options) for index in range(parts)])
    summaries = run(candidates, [(*args, options) for args in groups])
    chunks, num_pairs = [summary["chunks"] for summary in summaries], sum(summary["pairs"] for summary in summaries)
    yield "comparing", sum(chunks)
    pieces = [
        (*args, chunk, count, options) for args, count in zip(groups, chunks, strict=True) for chunk in range(count)
    ]
    run(compare_chunk, pieces)
    wrong: list[tuple[int, int]] = []
    for attempt in range(len(corpus) + 1):
        yield "deciding", 1 + len(groups)
        run(decide, [(work, attempt, chunks, wrong, options)])
        summaries = run(check, [(*args, attempt, options) for args in groups])
        failed = [(attempt, group) for group, summary in enumerate(summaries) if summary["wrong"]]
        if not failed:
            break
        wrong += failed
    work.save("decided", 0, {}, {"attempt": attempt})
    yield "pairs", num_pairs


def compare_chunk(work: WorkFolder, group: int, chunk: int, chunks: int, options: PrepareOptions) -> None:
    """Write the similar pairs of a chunk of candidates: `pairs`, `similarity`, and whether that is `exact`."""
    if work.has(f"similar-{group:06}", chunk):
        return
    pairs = chunk_of_candidates(work, group, chunk, chunks)
    similarity, exact = compare(work, pairs, options.jaccard).T
    similar = similarity > options.jaccard
    arrays = {"pairs": pairs[similar], "similarity": similarity[similar], "exact": exact[similar] > 0}
    work.save(f"similar-{group:06}", chunk, arrays)


def decide(
    work: WorkFolder, attempt: int, chunks: list[int], wrong: list[tuple[int, int]], options: PrepareOptions
) -> None:
    """Write for each group which documents are dropped because they are similar to a kept earlier one, with that one
    and the similarity. `wrong` lists attempts and groups in which estimates were wrong."""
    if work.has("attempt", attempt):
        return
    corpus = CleanedShards.load(work)
    dropped = bytearray(len(corpus) // 8 + 1)  # one bit per document
    for group, count in enumerate(chunks):
        not_similar = set[tuple[int, int]]()
        for earlier, where in wrong:
            if where == group:
                documents, originals, values = work.load(
                    f"near-{earlier}", group, "documents", "originals", "similarity"
                )
                known = zip(documents.tolist(), originals.tolist(), values.tolist(), strict=True)
                not_similar |= {(one, other) for one, other, value in known if value <= options.jaccard}
        chosen: tuple[list[Any], ...] = [np.empty((0, 2), np.int64)], [np.empty(0)], [np.empty(0, bool)]
        for chunk in range(count):
            pairs, similarity, exact = work.load(f"similar-{group:06}", chunk, "pairs", "similarity", "exact")
            used = []
            for row, (document, original) in enumerate(pairs.tolist()):
                is_decided = (
                    dropped[document >> 3] >> (document & 7) & 1 or dropped[original >> 3] >> (original & 7) & 1
                )
                if not is_decided and (document, original) not in not_similar:
                    dropped[document >> 3] |= 1 << (document & 7)
                    used.append(row)
            for those, array in zip(chosen, (pairs, similarity, exact), strict=True):
                those.append(array[used])
        pairs, similarity, exact = map(np.concatenate, chosen)
        guess = {"documents": pairs[:, 0], "originals": pairs[:, 1], "similarity": similarity, "exact": exact}
        work.save(f"guess-{attempt}", group, guess)
    work.save("attempt", attempt, {})


def check(work: WorkFolder, group: int, attempt: int, options: PrepareOptions) -> dict[str, int]:
    """Compare exactly the pairs decided by estimates. Write the dropped `documents`, their `originals` and their
    `similarity`. The summary has how many were `dropped`, and how many of these are `wrong`."""
    if done := work.summary(f"near-{attempt}", group):
        return done
    names = "documents", "originals", "similarity", "exact"
    documents, originals, similarity, exact = work.load(f"guess-{attempt}", group, *names)
    grams = Grams(work)
    for number in np.flatnonzero(~exact).tolist():
        similarity[number] = grams.similarity(int(documents[number]), int(originals[number]))
    arrays = {"documents": documents, "originals": originals, "similarity": similarity}
    wrong = int((similarity <= options.jaccard).sum())
    return work.save(f"near-{attempt}", group, arrays, {"dropped": len(documents), "wrong": wrong})


def dropped_in(work: WorkFolder, rule: str, group: int) -> tuple[Any, Any, Any]:
    """The documents of a group that were dropped as copies (`rule`: `exact` or `near`), ascending; their originals; and
    their similarities."""
    if rule == "exact":
        documents, originals = work.load("exact", group, "documents", "originals")
        return documents, originals, np.ones(len(documents))
    attempt = work.read_summary("decided", 0)["attempt"]
    documents, originals, similarity = work.load(f"near-{attempt}", group, "documents", "originals", "similarity")
    return documents, originals, similarity

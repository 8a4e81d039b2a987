"""The Jaccard similarity of two documents' sets of character 5-grams, and an estimate of it for long documents, which
needs no text."""

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megajax.preparation.corpus import CleanedShards
from megajax.preparation.shards import WorkFolder

GRAM = 5  # characters in a gram
SKETCH = 1 << 10  # hashes in a sketch
_LONG = 1 << 14  # characters from which a normalised text has a sketch
_DEVIATIONS = 5  # an estimate decides if it differs from the threshold by so many standard deviations
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_CACHED_GRAMS = 1 << 20


def normalised(text: str) -> str:
    """The text as duplicates are compared: in lower case, with white space replaced by single spaces."""
    return " ".join(text.lower().split())


def gram_set(text: str) -> set[str]:
    """A normalised text's 5-grams; a shorter text is one gram."""
    return {text[start : start + GRAM] for start in range(max(1, len(text) - GRAM + 1))}


def jaccard(one: set[str], other: set[str]) -> float:
    """The Jaccard similarity of two sets, 0 to 1."""
    common = len(one & other)
    return common / (len(one) + len(other) - common)


def sketches(texts: Sequence[str]) -> tuple[list[int], npt.NDArray[np.uint64]]:
    """The indices of the long texts among normalised ones, and the smallest hashes of each one's grams, uint64
    [texts, SKETCH]. A text with fewer different grams has no sketch."""
    indices, hashes = [], [np.empty((0, SKETCH), np.uint64)]
    for index, text in enumerate(texts):
        smallest = np.unique(gram_hashes([text])[0])[:SKETCH] if len(text) >= _LONG else np.empty(0, np.uint64)
        if len(smallest) == SKETCH:
            indices.append(index)
            hashes.append(smallest[None])
    return indices, np.concatenate(hashes)


def estimate(one: npt.NDArray[np.uint64], other: npt.NDArray[np.uint64]) -> float:
    """The Jaccard similarity estimated from two sketches: the share of their union's smallest hashes that both have."""
    hashes = np.sort(np.concatenate([one, other]))
    again = hashes[1:] == hashes[:-1]
    largest = hashes[np.concatenate([[True], ~again])][SKETCH - 1]
    return float((hashes[1:][again] <= largest).sum() / SKETCH)


class Grams:
    """The grams of a corpus's documents; the most recently used stay in memory."""

    def __init__(self, work: WorkFolder) -> None:
        self._work, self._corpus = work, CleanedShards.load(work)
        self._sets: dict[int, set[str]] = {}  # in order of use
        self._size = 0

    def similarity(self, one: int, other: int) -> float:
        """Two documents' exact similarity."""
        return jaccard(self._grams(one), self._grams(other))

    def estimate(self, one: int, other: int) -> float | None:
        """Two long documents' estimated similarity; None if one has no sketch."""
        first, second = (_sketch(self._work, *self._corpus.locate(document)) for document in (one, other))
        return None if first is None or second is None else estimate(first, second)

    def _grams(self, document: int) -> set[str]:
        if document in self._sets:
            grams = self._sets.pop(document)
        else:
            grams = gram_set(normalised(self._work.text(*self._corpus.locate(document))))
            self._size += len(grams)
        self._sets[document] = grams
        while self._size > _CACHED_GRAMS and len(self._sets) > 2:
            self._size -= len(self._sets.pop(next(iter(self._sets))))
        return grams


def compare(work: WorkFolder, pairs: npt.NDArray[np.int64], threshold: float) -> npt.NDArray[np.float64]:
    """The similarity of pairs of documents, and whether it is exact, float64 [pairs, 2]. An estimate below `threshold`
    is far below it, but one above may be wrong, and must be checked before a document is dropped."""
    grams, margin = Grams(work), _DEVIATIONS * (threshold * (1 - threshold) / SKETCH) ** 0.5
    results = []
    for one, other in pairs.tolist():
        about = grams.estimate(one, other)
        decided = about is not None and not threshold - margin <= about <= threshold
        results.append((about, 0) if decided else (grams.similarity(one, other), 1))
    return np.array(results, np.float64).reshape(-1, 2)


def _sketch(work: WorkFolder, shard: int, document: int) -> npt.NDArray[np.uint64] | None:
    return _sketches(work, shard).get(document)


@functools.lru_cache(maxsize=512)
def _sketches(work: WorkFolder, shard: int) -> dict[int, npt.NDArray[np.uint64]]:
    """A shard's sketches by the numbers of its documents."""
    documents, found = work.load("tokens", shard, "sketched", "sketches")
    return dict(zip(documents.tolist(), found, strict=True))


def gram_hashes(texts: Sequence[str]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """The hashes of all grams in order, including repeated ones, uint64; and where each text's begin, int64 [N + 1]."""
    padding = "\0" * GRAM  # so that even the shortest text has a gram
    characters = np.frombuffer((padding.join(texts) + padding).encode("utf-32-le"), np.uint32).astype(np.uint64)
    lengths = np.array([len(text) for text in texts], np.int64)
    counts = np.maximum(lengths - GRAM + 1, 1)
    begins = np.cumsum(lengths + GRAM) - (lengths + GRAM)
    starts = np.concatenate([[0], np.cumsum(counts)])
    first_characters = np.arange(starts[-1]) + np.repeat(begins - starts[:-1], counts)  # of each gram
    hashes = np.zeros(len(characters) - GRAM + 1, np.uint64)
    for offset in range(GRAM):
        hashes = mixed(hashes, characters[offset : offset + len(hashes)])
    return hashes[first_characters], starts


def mixed(hashes: npt.NDArray[np.uint64], values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Combine hashes with values."""
    hashes = (hashes ^ values) * _MULTIPLIER
    return hashes ^ (hashes >> np.uint64(29))

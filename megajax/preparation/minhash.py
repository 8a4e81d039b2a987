"""Locality-sensitive hashing of near-duplicates: banded MinHash signatures of sets of character 5-grams.

N documents, C characters in all of them. Two documents are candidates if all hashes of at least one band agree: with r
hashes in each of b bands, and a Jaccard similarity of J, that happens with probability 1 - (1 - J^r)^b.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

GRAM = 5  # characters of a gram
HASHES = 256  # of a signature
_RECALL = 0.95  # of pairs right at the threshold; more above it
_SEED = 1
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def normalised(text: str) -> str:
    """The text by which duplicates are compared: in lower case, with one space for any white space."""
    return " ".join(text.lower().split())


def gram_set(text: str) -> set[str]:
    """The 5-grams of a normalised text; a shorter text is one gram."""
    return {text[start : start + GRAM] for start in range(max(1, len(text) - GRAM + 1))}


def jaccard(one: set[str], other: set[str]) -> float:
    """The Jaccard similarity of two sets, 0 to 1."""
    common = len(one & other)
    return common / (len(one) + len(other) - common)


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
    grams, starts = _gram_hashes(texts)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(grams, starts.tolist(), HASHES, _SEED)
    signatures = np.array(matrix.to_rows(), np.uint64)
    banded = signatures[:, : num_bands * rows].reshape(len(texts), num_bands, rows)
    result = np.zeros((len(texts), num_bands), np.uint64)
    for row in range(rows):
        result = _mixed(result, banded[:, :, row])
    return np.ascontiguousarray(result.T)


def _gram_hashes(texts: Sequence[str]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Hashes of all grams in order, repeated ones too, uint64; and where those of each text begin, int64 [N + 1]."""
    padding = "\0" * GRAM  # so that the shortest text has a gram
    characters = np.frombuffer((padding.join(texts) + padding).encode("utf-32-le"), np.uint32).astype(np.uint64)
    lengths = np.array([len(text) for text in texts], np.int64)
    counts = np.maximum(lengths - GRAM + 1, 1)
    begins = np.cumsum(lengths + GRAM) - (lengths + GRAM)
    starts = np.concatenate([[0], np.cumsum(counts)])
    first_characters = np.arange(starts[-1]) + np.repeat(begins - starts[:-1], counts)  # of the grams
    hashes = np.zeros(len(characters) - GRAM + 1, np.uint64)
    for offset in range(GRAM):
        hashes = _mixed(hashes, characters[offset : offset + len(hashes)])
    return hashes[first_characters], starts


def _mixed(hashes: npt.NDArray[np.uint64], values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    hashes = (hashes ^ values) * _MULTIPLIER
    return hashes ^ (hashes >> np.uint64(29))

"""Interfaces of endless samples for training and finite samples for evaluation, and their source of randomness.

Random bits are a function of a key, computed with integers only, so that no NumPy release can change them: those of
splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
"""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megajax.core.batch import BatchSpec

Sample = dict[str, npt.NDArray[np.int32]]


class EndlessSamples(Protocol):
    """A sequence of samples for training."""

    def __getitem__(self, index: int) -> Sample: ...


class Samples(Protocol):
    """A finite sequence of samples for evaluation."""

    sequence_length: int  # T
    form: BatchSpec  # what a batch of these samples holds

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


class CorpusSamples(Samples, Protocol):
    """A finite sequence of samples from a corpus."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens."""

    def documents(self) -> Iterator[npt.NDArray[np.integer]]:
        """The tokens, document by document."""


class EpochSamples(EndlessSamples, Protocol):
    """An endless sequence of samples from one corpus."""

    sequence_length: int  # T
    epoch_size: int  # samples per epoch


def shuffled(size: int, *key: int) -> Any:
    """The numbers below `size`, endlessly, in a new random order every epoch (Grain's index shuffle)."""
    from grain import MapDataset

    seed = int(np.random.SeedSequence(key).generate_state(1)[0])
    return MapDataset.range(size).shuffle(seed=seed).repeat()


def held_out(sizes: npt.NDArray[np.int64], order: npt.NDArray[np.int64], fraction: float) -> npt.NDArray[np.int64]:
    """The first groups (documents, or the records of a context) in `order` that have about the given fraction of the
    total size; at least one, but not all. Groups larger than that are skipped; if all are, it is the smallest."""
    budget = fraction * int(sizes.sum())
    candidates = order[sizes[order] <= budget]
    if not len(candidates):
        return order[[np.argmin(sizes[order])]]
    totals = np.cumsum(sizes[candidates])[: len(order) - 1]
    return candidates[: np.argmin(np.abs(totals - budget)) + 1]


_STEP = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


def key_of(*numbers: int) -> np.uint64:
    """A 64-bit key from any number of non-negative integers."""
    return np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]


def hashed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Random bits for every number."""
    bits = numbers * _STEP
    bits = (bits ^ (bits >> _SHIFTS[0])) * _FACTORS[0]
    bits = (bits ^ (bits >> _SHIFTS[1])) * _FACTORS[1]
    return bits ^ (bits >> _SHIFTS[2])


class Bits:
    """An endless stream of random bits."""

    def __init__(self, key: np.uint64, number: int = 0) -> None:
        self._state = hashed(hashed(np.array([number], np.uint64)) + key)
        self._numbers: list[int] = []

    def uint64(self) -> int:
        """A random 64-bit number."""
        if not self._numbers:
            self._numbers = self.raw(64).tolist()
        return self._numbers.pop()

    def below(self, limit: int) -> int:
        """A random integer from 0 to `limit` - 1; `limit` is at most 2^32."""
        return ((self.uint64() >> 32) * limit) >> 32

    def happens(self, probability: float) -> bool:
        """True with this probability."""
        return self.uint64() < probability * 2.0**64

    def raw(self, count: int) -> npt.NDArray[np.uint64]:
        """This many random 64-bit numbers."""
        places = np.arange(1, count + 1, dtype=np.uint64) + self._state
        self._state = self._state + np.uint64(count)
        return hashed(places)

"""Interfaces of samples to train on, without end, and to evaluate on; the order of training; what is held out."""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megajax.batch import BatchSpec

Sample = dict[str, npt.NDArray[np.int32]]


class EndlessSamples(Protocol):
    """A sequence of samples to train on."""

    def __getitem__(self, number: int) -> Sample: ...


class Samples(Protocol):
    """A finite sequence of samples to evaluate on."""

    sequence_length: int  # T
    form: BatchSpec  # what a batch of them holds

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Sample: ...


class CorpusSamples(Samples, Protocol):
    """A finite sequence of samples of a corpus."""

    def documents(self) -> Iterator[npt.NDArray[np.integer]]:
        """The tokens, document by document."""


class EpochSamples(EndlessSamples, Protocol):
    """An endless sequence of samples of one corpus."""

    sequence_length: int  # T
    epoch_size: int  # samples per epoch


def shuffled(size: int, *key: int) -> Any:
    """The numbers below `size` without end, in a new random order every epoch (Grain's index shuffle)."""
    from grain import MapDataset

    seed = int(np.random.SeedSequence(key).generate_state(1)[0])
    return MapDataset.range(size).shuffle(seed=seed).repeat()


def held_out(sizes: npt.NDArray[np.int64], order: npt.NDArray[np.int64], fraction: float) -> npt.NDArray[np.int64]:
    """The first groups (documents, or the records of a context) in an order that have about a share of the total size;
    at least one group, and not all.

    A group larger than that share is not held out; if all are, it is the smallest.
    """
    budget = fraction * int(sizes.sum())
    candidates = order[sizes[order] <= budget]
    if not len(candidates):
        return order[[np.argmin(sizes[order])]]
    totals = np.cumsum(sizes[candidates])[: len(order) - 1]
    return candidates[: np.argmin(np.abs(totals - budget)) + 1]

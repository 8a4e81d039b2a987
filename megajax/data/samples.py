"""Interfaces of samples to train on, without end, and to evaluate on; and the random order of training."""

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
        ...


class EpochSamples(EndlessSamples, Protocol):
    """An endless sequence of samples of one corpus."""

    sequence_length: int  # T
    epoch_size: int  # samples per epoch


def shuffled(size: int, *key: int) -> Any:
    """The numbers below `size` without end, in a new random order every epoch (Grain's index shuffle)."""
    from grain import MapDataset

    seed = int(np.random.SeedSequence(key).generate_state(1)[0])
    return MapDataset.range(size).shuffle(seed=seed).repeat()

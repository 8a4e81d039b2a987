"""Samples that score the ends of texts. T is the sequence length; samples are those of `megajax.data.gpt`."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megajax.batch import text_form
from megajax.data.gpt import padded_sample
from megajax.data.samples import Sample


class ContinuationSamples:
    """Samples that predict the ends of token sequences, each from the tokens before it.

    A sequence gives one sample, its last T tokens and their targets; a sequence whose end has more than T tokens gives
    several samples, which predict each of these tokens once.

    A sequence is its ids and the index of the first one to predict, at least 1.

    `owners` has the sequence of every sample. T is the least power of two that is enough, or what the model takes.
    """

    def __init__(self, sequences: Sequence[tuple[Sequence[int], int]], *, sequence_length: int) -> None:
        self.owners: list[int] = []
        self._windows: list[tuple[npt.NDArray[np.int32], int]] = []  # up to T + 1 tokens, how many are predicted
        for owner, (ids, first) in enumerate(sequences):
            assert first >= 1, "nothing to predict the first token from"
            for start in range(first, len(ids), sequence_length):
                stop = min(start + sequence_length, len(ids))
                self.owners.append(owner)
                window = np.array(ids[max(0, stop - 1 - sequence_length) : stop], np.int32)
                self._windows.append((window, stop - start))
        longest = max((len(window) for window, _ in self._windows), default=2) - 1
        self.sequence_length, self.form = min(sequence_length, 1 << (longest - 1).bit_length()), text_form()

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, number: int) -> Sample:
        window, num_predicted = self._windows[number]
        return padded_sample(window, self.sequence_length, len(window) - 1 - num_predicted)

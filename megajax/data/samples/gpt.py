"""GPT samples: documents are concatenated and cut into sequences; the target of a token is the next one.

T is the sequence length. A sample is `{"tokens": int32 [T], "targets": int32 [T]}`; a target of -1 is not counted. With
positions it also has `"positions": int32 [T]`, each token's position in its document (`document_positions`), for models
whose attention restarts with every document.
"""

import functools
import itertools
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megajax.core.batch import IGNORED, document_positions, text_form
from megajax.core.errors import UserError
from megajax.data.samples.base import Sample, held_out, shuffled
from megajax.data.text.tokens import TokenDocuments

MOST_HELD_OUT = 1.5  # times the share that is asked for
_SPLIT, _DOCUMENT_ORDER, _SAMPLE_ORDER = 1, 2, 3  # independent random streams of one seed


def train_and_validation(
    documents: TokenDocuments,
    *,
    sequence_length: int,
    validation_fraction: float,
    seed: int,
    overlap: int = 0,
    with_positions: bool = False,
) -> tuple["TrainSamples", "EvaluationSamples | None"]:
    """Samples of the training and validation splits, which share no document; None if nothing is held out."""
    documents, train, validation = split_documents(documents, validation_fraction=validation_fraction, seed=seed)
    lengths = np.diff(documents.document_offsets)
    num_train, num_validation = int(lengths[train].sum()), int(lengths[validation].sum())
    if num_train < sequence_length + 1 or (validation_fraction and num_validation < 2):
        raise UserError(
            f"{documents.name} is too short: it has {num_train} training tokens and {num_validation} for "
            f"validation; valid: at least {sequence_length + 1} (one sequence and its last target) "
            "and 2; add text, or shorten --model.sequence-length"
        )
    return (
        TrainSamples(documents, train, sequence_length=sequence_length, seed=seed, with_positions=with_positions),
        EvaluationSamples(
            documents, validation, sequence_length=sequence_length, overlap=overlap, with_positions=with_positions
        )
        if validation_fraction
        else None,
    )


def split_documents(
    documents: TokenDocuments, *, validation_fraction: float, seed: int
) -> tuple[TokenDocuments, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The documents, and the numbers of those for training and for validation, ascending.

    In an order shuffled by the seed, documents go to the validation split until it has about `validation_fraction` of
    all tokens, at most `MOST_HELD_OUT` times as many. A document longer than that is used for training; if all are
    longer, the end of the shortest is for validation, as a document of its own.
    The result depends only on the documents' lengths, the fraction and the seed.
    """
    lengths = np.diff(documents.document_offsets)
    if not validation_fraction:
        return documents, np.arange(len(lengths)), np.arange(0)
    order = _permutation(len(lengths), _SPLIT, seed)
    order = order[lengths[order] > 0]
    if len(order) < 2:
        pieces = " the file in it (which is cut into pieces)," * Path(documents.name).is_dir()
        raise UserError(
            f"{documents.name} has {len(order)} of the 2 documents that training and validation need at least; "
            f"valid: more documents,{pieces} or --data.validation-fraction 0 --train.eval-every 0"
        )
    chosen, wanted = held_out(lengths, order, validation_fraction), validation_fraction * int(lengths.sum())
    if lengths[chosen].sum() > max(2.0, MOST_HELD_OUT * wanted):
        (document,) = chosen.tolist()
        offset = int(documents.document_offsets[document + 1]) - max(2, round(wanted))
        documents, chosen = documents.cut(document, offset), np.array([document + 1])
    is_validation = np.zeros(documents.num_documents, bool)
    is_validation[chosen] = True
    return documents, np.flatnonzero(~is_validation), np.flatnonzero(is_validation)


class TrainSamples:
    """An endless sequence of training samples; sample i is a pure function of the seed and i.

    In every epoch the documents are concatenated in a new random order and cut into samples of T + 1 tokens, of which
    the last is also the first of the next sample; a remainder too short for a sample is dropped. Samples are drawn in
    random order (Grain's index shuffle). Memory: 16 bytes per document for each of two epochs.
    """

    def __init__(
        self,
        documents: TokenDocuments,
        numbers: npt.NDArray[np.int64],
        *,
        sequence_length: int,
        seed: int,
        with_positions: bool = False,
    ) -> None:
        num_tokens = int(np.diff(documents.document_offsets)[numbers].sum())
        self.sequence_length, self._with_positions = sequence_length, with_positions
        self.epoch_size = (num_tokens - 1) // sequence_length
        assert self.epoch_size > 0, "shorter than one sequence"
        self._order = shuffled(self.epoch_size, _SAMPLE_ORDER, seed)
        self._lock = threading.Lock()

        @functools.lru_cache(maxsize=2)  # prefetching threads may be an epoch apart
        def epoch_stream(epoch: int) -> _TokenStream:
            return _TokenStream(documents, numbers[_permutation(len(numbers), _DOCUMENT_ORDER, seed, epoch)])

        self._epoch_stream = epoch_stream

    def __getitem__(self, index: int) -> Sample:
        with self._lock:  # only one thread builds an epoch
            stream = self._epoch_stream(index // self.epoch_size)
        start = self._order[index] * self.sequence_length
        window = stream.read(start, start + self.sequence_length + 1)
        sample = {"tokens": window[:-1], "targets": window[1:]}
        if self._with_positions:
            sample["positions"] = stream.positions(start, start + self.sequence_length)
        return sample

    def parts(self, index: int) -> list[tuple[int, slice]]:
        """The documents that a sample's targets are from: where each begins in the corpus, and its targets."""
        start = self._order[index] * self.sequence_length + 1
        return self._epoch_stream(index // self.epoch_size).parts(start, start + self.sequence_length)


class EvaluationSamples:
    """Samples that predict every token except the first exactly once, in canonical order; the last one is padded.

    They are windows of T tokens that advance by `overlap` targets, 1 to T; 0 stands for T. The first window counts all
    its targets, every other its last `overlap`, each predicted from at least T - `overlap` earlier tokens. `numbers`
    are the documents to evaluate on; None: all.
    """

    def __init__(
        self,
        documents: TokenDocuments,
        numbers: npt.NDArray[np.int64] | None = None,
        *,
        sequence_length: int,
        overlap: int = 0,
        with_positions: bool = False,
    ) -> None:
        assert 0 <= overlap <= sequence_length, (overlap, sequence_length)
        self.sequence_length, self.form = sequence_length, text_form(with_positions=with_positions)
        self.overlap, self._documents = overlap or sequence_length, documents
        self._numbers = np.arange(documents.num_documents) if numbers is None else numbers
        self._stream = _TokenStream(documents, self._numbers)
        if len(self._stream) < 2:
            raise UserError(f"{documents.name} has {len(self._stream)} tokens; valid: at least 2")

    @property
    def num_tokens(self) -> int:
        """The number of tokens."""
        return len(self._stream)

    @property
    def num_targets(self) -> int:
        """The number of predicted tokens."""
        return len(self._stream) - 1

    def documents(self) -> Iterator[npt.NDArray[np.integer]]:
        """The tokens, document by document."""
        return (self._documents.document(index) for index in self._numbers)

    def __len__(self) -> int:
        return 1 + -(-max(0, self.num_targets - self.sequence_length) // self.overlap)

    def __getitem__(self, index: int) -> Sample:
        start = index * self.overlap
        window = self._stream.read(start, min(start + self.sequence_length + 1, len(self._stream)))
        sample = _padded_sample(window, self.sequence_length, self.sequence_length - self.overlap if index else 0)
        if "positions" in self.form.entries:
            positions = self._stream.positions(start, start + len(window) - 1)
            sample["positions"] = np.pad(positions, (0, self.sequence_length - len(positions)))
        return sample


class ContinuationSamples:
    """Samples that predict the ends of token sequences, each from the tokens before it.

    A sequence is given as its ids and the index (at least 1) of the first one to predict. It gives one sample, with its
    last T tokens and their targets; if its end has more than T tokens, several samples predict each of these once.

    `owners` has the sequence of every sample. T is the smallest sufficient power of two, or the model's length.
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

    def __getitem__(self, index: int) -> Sample:
        window, num_predicted = self._windows[index]
        return _padded_sample(window, self.sequence_length, len(window) - 1 - num_predicted)


def _padded_sample(window: npt.NDArray[np.int32], sequence_length: int, num_ignored: int) -> Sample:
    """A sample from up to T + 1 tokens, padded at its end; the first `num_ignored` targets are not counted."""
    padding = (0, sequence_length + 1 - len(window))
    targets = np.pad(window[1:], padding, constant_values=IGNORED)
    targets[:num_ignored] = IGNORED
    return {"tokens": np.pad(window[:-1], padding), "targets": targets}


class _TokenStream:
    """Documents concatenated in a given order; loads only what is read."""

    def __init__(self, documents: TokenDocuments, order: npt.NDArray[np.int64]) -> None:
        self._documents, self._order = documents, order
        self._ends = np.cumsum(documents.document_offsets[order + 1] - documents.document_offsets[order])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        """The tokens from `start` to `stop`, int32 [stop - start]."""
        assert 0 <= start < stop <= len(self), (start, stop)
        window = np.empty(stop - start, np.int32)
        position = int(np.searchsorted(self._ends, start, side="right"))
        done = start
        while done < stop:
            end = int(self._ends[position])
            shift = int(self._documents.document_offsets[self._order[position] + 1]) - end  # offset into the corpus
            until = min(stop, end)
            window[done - start : until - start] = self._documents.read(done + shift, until + shift)
            done, position = until, position + 1
        return window

    def parts(self, start: int, stop: int) -> list[tuple[int, slice]]:
        """The documents of the tokens from `start` to `stop`: where each begins in the corpus, and which of these."""
        first, last = np.searchsorted(self._ends, [start, stop - 1], side="right")
        begins = self._documents.document_offsets[self._order[first : last + 1]].tolist()
        ends = (np.minimum(self._ends[first : last + 1], stop) - start).tolist()
        return [(begin, slice(*each)) for begin, each in zip(begins, itertools.pairwise([0, *ends]), strict=True)]

    def positions(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        """Positions of tokens in their documents, int32 [stop - start]; a document that began before `start` counts
        from there."""
        first = np.searchsorted(self._ends, start, side="right")
        last = np.searchsorted(self._ends, stop, side="left")
        return document_positions(self._ends[first:last] - start, stop - start)


def _permutation(count: int, *key: int) -> npt.NDArray[np.int64]:
    """Random order of 0 … count - 1, from raw bits, which NumPy releases must not change (unlike `Generator`'s)."""
    return np.argsort(np.random.Philox(np.random.SeedSequence(key)).random_raw(count), kind="stable")

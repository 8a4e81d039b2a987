"""BERT's samples: two segments of consecutive sentences, in order or swapped, with masked words.

T is the sequence length, N the number of tokens in a sample. A sample is described by `pairs_form` in `batch.py`:
`[CLS] A [SEP] B [SEP]`, or `[CLS] A [SEP]` for a document with only one sentence.
"""

import functools
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from megajax.core.batch import IGNORED, most_masked, pairs_form
from megajax.core.errors import UserError
from megajax.data.samples.base import Bits, Sample, hashed, key_of, shuffled
from megajax.data.samples.gpt import split_documents
from megajax.data.samples.masking import WordPieces, masked
from megajax.data.text.chunks import Chunks, count_sentences, join
from megajax.data.text.tokens import TokenDocuments

_SHORT_SHARE = 0.1  # of the samples aim at a random length
_SPECIAL = 3  # [CLS], [SEP] and [SEP]
_SHORTEST = 2  # smallest target in tokens: one of A, one of B
_ORDER, _LENGTHS, _SHIFT, _TRAIN, _EVALUATION = 11, 12, 13, 14, 15  # independent random streams of one seed


def train_and_validation(
    documents: TokenDocuments,
    *,
    sequence_length: int,
    validation_fraction: float,
    seed: int,
    vocabulary: WordPieces,
) -> tuple["TrainPairs", "EvaluationPairs | None"]:
    """Samples of the training and validation splits, which share no document; None if nothing is held out."""
    check_sentences(documents)
    documents, train, validation = split_documents(documents, validation_fraction=validation_fraction, seed=seed)
    return (
        TrainPairs(documents, train, sequence_length=sequence_length, seed=seed, vocabulary=vocabulary),
        EvaluationPairs(documents, validation, sequence_length=sequence_length, vocabulary=vocabulary)
        if validation_fraction
        else None,
    )


def check_sentences(documents: TokenDocuments) -> None:
    """Check that at least one document has two sentences."""
    counts = count_sentences(documents)
    if counts.single == counts.documents:
        raise UserError(
            f"{documents.name}: all {counts.documents} documents are single sequences, so no pairs of "
            "segments can be made; valid: documents split into sentences by megajax prepare "
            "--split-sentences"
        )


class _Pairs:
    """What both kinds of samples have in common."""

    def __init__(self, documents: TokenDocuments, sequence_length: int, vocabulary: WordPieces, *stream: int) -> None:
        check_length(sequence_length)
        self.sequence_length, self._key = sequence_length, key_of(*stream)
        self._documents, self._vocabulary = documents, vocabulary

    def _sample(self, chunks: Chunks, chunk: int, index: int) -> Sample:
        """The sample from chunk number `chunk`; `index` determines its randomness."""
        bits, vocabulary = Bits(self._key, index), self._vocabulary
        first, size, target = int(chunks.begins[chunk]), int(chunks.sizes[chunk]), int(chunks.targets[chunk])
        offsets = self._documents.sequence_offsets(first, first + size)
        offsets = offsets[np.append(True, offsets[1:] > offsets[:-1])]  # drop sentences without tokens
        tokens = self._documents.read(int(offsets[0]), int(offsets[-1])).astype(np.int32)
        if len(offsets) == 2:
            segments, order = [tokens[_cut(len(tokens), len(tokens) - target, bits)]], IGNORED
        else:
            middle = int(offsets[1 + bits.below(len(offsets) - 2)] - offsets[0])
            a, b = tokens[:middle], tokens[middle:]
            cut_a, cut_b = _surplus(len(a), len(b), target)
            segments, order = [a[_cut(len(a), cut_a, bits)], b[_cut(len(b), cut_b, bits)]], int(bits.happens(0.5))
        if order == 1:
            segments.reverse()
        cls, sep = np.array([vocabulary.cls], np.int32), np.array([vocabulary.sep], np.int32)
        tokens_N = np.concatenate([cls, *(part for segment in segments for part in (segment, sep))])
        special_N = np.zeros(len(tokens_N), bool)
        special_N[[0, 1 + len(segments[0]), -1]] = True
        result = masked(tokens_N, special_N, vocabulary, bits)
        types_T = np.zeros(self.sequence_length, np.int32)
        types_T[len(segments[0]) + 2 : len(tokens_N)] = 1
        most = most_masked(self.sequence_length)
        return {
            "tokens": _filled(result.tokens, self.sequence_length, vocabulary.pad),
            "token_types": types_T,
            "places": _filled(result.places, most, 0),
            "targets": _filled(result.targets, most, IGNORED),
            "length": np.array(len(tokens_N), np.int32),
            "order": np.array(order, np.int32),
        }


class TrainPairs(_Pairs):
    """An endless sequence of training samples; sample i is a pure function of the seed and i.

    Every epoch joins the sentences of each document anew: one chunk in ten aims at a random length, the others at T.
    Chunks are drawn in random order (Grain's index shuffle). For every sample it is drawn where A ends, which segment
    comes first, what is cut off and what is masked. An epoch has as many samples as the first one has chunks; a later
    epoch, which may have a few more or fewer chunks, leaves some out or repeats some. Memory: 16 bytes per sample for
    each of two epochs.
    """

    def __init__(
        self,
        documents: TokenDocuments,
        numbers: npt.NDArray[np.int64],
        *,
        sequence_length: int,
        seed: int,
        vocabulary: WordPieces,
    ) -> None:
        super().__init__(documents, sequence_length, vocabulary, _TRAIN, seed)
        self._lock = threading.Lock()

        @functools.lru_cache(maxsize=2)  # prefetching threads may be an epoch apart
        def epoch_chunks(epoch: int) -> tuple[Chunks, int]:
            key, shift = key_of(_LENGTHS, seed, epoch), int(key_of(_SHIFT, seed, epoch))
            return join(documents, numbers, lambda firsts: _targets(firsts, key, sequence_length)), shift

        self._epoch_chunks = epoch_chunks
        self.epoch_size = len(epoch_chunks(0)[0])
        assert self.epoch_size > 0, "no tokens"
        self._order = shuffled(self.epoch_size, _ORDER, seed)

    def __getitem__(self, index: int) -> Sample:
        with self._lock:  # only one thread builds an epoch
            chunks, shift = self._epoch_chunks(index // self.epoch_size)
        chunk = (self._order[index] + shift) % len(chunks)  # the shift varies which chunks are left out
        return self._sample(chunks, chunk, index)


class EvaluationPairs(_Pairs):
    """Samples with every sentence once, in canonical order; pairs and masks depend only on the documents. All aim at
    T. `numbers` are the documents to evaluate on; None: all."""

    def __init__(
        self,
        documents: TokenDocuments,
        numbers: npt.NDArray[np.int64] | None = None,
        *,
        sequence_length: int,
        vocabulary: WordPieces,
    ) -> None:
        super().__init__(documents, sequence_length, vocabulary, _EVALUATION)
        self.form = pairs_form()
        self._numbers = np.arange(documents.num_documents) if numbers is None else numbers
        target = sequence_length - _SPECIAL
        self._chunks = join(documents, self._numbers, lambda firsts: np.full(len(firsts), target))
        if not len(self._chunks):
            raise UserError(f"{documents.name} has no tokens; valid: at least one sentence")

    @property
    def num_tokens(self) -> int:
        """The number of tokens, each of which is in one pair."""
        return int(np.diff(self._documents.document_offsets)[self._numbers].sum())

    def documents(self) -> Iterator[npt.NDArray[np.integer]]:
        """The tokens, document by document."""
        return (self._documents.document(index) for index in self._numbers)

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, index: int) -> Sample:
        return self._sample(self._chunks, index, index)


def check_length(sequence_length: int) -> None:
    """Check that a sequence has room for a pair."""
    shortest = _SPECIAL + _SHORTEST
    if sequence_length < shortest:
        raise UserError(
            f"--model.sequence-length {sequence_length}: too short for [CLS] A [SEP] B [SEP]; valid: {shortest} or more"
        )


def _targets(firsts: npt.NDArray[np.int64], key: np.uint64, sequence_length: int) -> npt.NDArray[np.int64]:
    """The target lengths, in tokens, of chunks that begin with these sentences."""
    bits = hashed(firsts.astype(np.uint64) + key)
    longest = sequence_length - _SPECIAL
    short = _SHORTEST + (bits & np.uint64(0xFFFFFFFF)) % np.uint64(longest - _SHORTEST + 1)
    is_short = (bits >> np.uint64(32)) < _SHORT_SHARE * 2.0**32
    return np.where(is_short, short.astype(np.int64), longest)


def _filled(array_N: npt.NDArray[np.int32], length: int, padding: int) -> npt.NDArray[np.int32]:
    return np.pad(array_N, (0, length - len(array_N)), constant_values=padding)


def _surplus(length_a: int, length_b: int, target: int) -> tuple[int, int]:
    """How many tokens to cut off each of two segments: always from the longer one, until both fit."""
    surplus = max(0, length_a + length_b - target)
    of_longer = min(surplus, abs(length_a - length_b))
    both = surplus - of_longer
    cut_a, cut_b = both // 2, both - both // 2
    return (cut_a + of_longer, cut_b) if length_a > length_b else (cut_a, cut_b + of_longer)


def _cut(length: int, surplus: int, bits: Bits) -> slice:
    """The slice of a segment to keep; each surplus token is cut from the front or the back at random."""
    surplus = max(0, surplus)
    front = int((bits.raw(surplus) >> np.uint64(63)).sum()) if surplus else 0
    return slice(front, length - surplus + front)

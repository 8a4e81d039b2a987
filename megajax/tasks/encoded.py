"""Texts as token ids in flat arrays, and two of them as one input of the model.

N tokens of all texts, T the sequence length.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megajax.data.masking import WordPieces
from megajax.data.samples import Sample
from megajax.data.tokenizer import Tokenizer

SPECIAL = 3  # tokens of an input that are of no text: [CLS], [SEP] and [SEP]

_BATCH = 4096  # texts that are encoded at a time: their ids are Python's numbers for so long


class EncodedTexts:
    """Ids of many texts; equal texts are encoded and stored once."""

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer, *, with_characters: bool = False) -> None:
        numbers: dict[str, int] = {}
        self._number = np.fromiter((numbers.setdefault(text, len(numbers)) for text in texts), np.int64, len(texts))
        ids, characters = [np.empty(0, np.int32)], [np.empty((0, 2), np.int32)]
        lengths: list[int] = []
        different = iter(numbers)
        while batch := list(itertools.islice(different, _BATCH)):
            if with_characters:
                rows, offsets = zip(*tokenizer.encode_batch_with_offsets(batch), strict=True)
                characters.append(np.array(list(itertools.chain(*offsets)), np.int32).reshape(-1, 2))
            else:
                rows = tuple(tokenizer.encode_batch(batch))
            ids.append(np.fromiter(itertools.chain(*rows), np.int32))
            lengths += map(len, rows)
        self._ids_N, self._characters_N2 = np.concatenate(ids), np.concatenate(characters)
        self._begins = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self.lengths = np.diff(self._begins)[self._number]

    def __len__(self) -> int:
        return len(self._number)

    def __getitem__(self, number: int) -> npt.NDArray[np.int32]:
        """The ids of a text."""
        return self._ids_N[self._place(number)]

    def characters(self, number: int) -> npt.NDArray[np.int32]:
        """The range of characters of every token of a text, int32 [tokens, 2]."""
        return self._characters_N2[self._place(number)]

    def _place(self, number: int) -> slice:
        row = self._number[number]
        return slice(self._begins[row], self._begins[row + 1])


def joined(
    first: npt.NDArray[np.int32], second: npt.NDArray[np.int32], sequence_length: int, vocabulary: WordPieces
) -> Sample:
    """The input `[CLS] first [SEP] second [SEP]`, padded: its `tokens` and `token_types` [T], and its `length`."""
    middle = len(first) + 2  # where `second` begins
    length = middle + len(second) + 1
    tokens_T = np.full(sequence_length, vocabulary.pad, np.int32)
    tokens_T[0] = vocabulary.cls
    tokens_T[1 : middle - 1] = first
    tokens_T[middle : length - 1] = second
    tokens_T[[middle - 1, length - 1]] = vocabulary.sep
    types_T = np.zeros(sequence_length, np.int32)
    types_T[middle:length] = 1
    return {"tokens": tokens_T, "token_types": types_T, "length": np.array(length, np.int32)}

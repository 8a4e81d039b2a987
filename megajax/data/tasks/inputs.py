"""Texts as token ids, and pairs of texts and exams as samples (`classes_form` and `choice_form` in `batch.py`).

T is the sequence length.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megajax.core.batch import IGNORED, BatchSpec, choice_form, classes_form
from megajax.data.samples.base import Sample, Samples
from megajax.data.samples.masking import WordPieces
from megajax.data.samples.pairs import check_length
from megajax.data.tasks.records import Exam, Pair
from megajax.data.tasks.registry import TASKS
from megajax.data.text.tokenizer import Tokenizer

SPECIAL = 3  # special tokens in an input: [CLS], [SEP] and [SEP]
OPTIONS = TASKS["race"].classes

_BATCH = 4096  # texts encoded together; meanwhile their ids are Python integers
_BLANK = re.compile("_+")


class EncodedTexts:
    """Token ids of many texts; equal texts are encoded and stored once."""

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer, *, with_characters: bool = False) -> None:
        numbers: dict[str, int] = {}
        self._numbers = [numbers.setdefault(text, len(numbers)) for text in texts]
        self._ids: list[npt.NDArray[np.int32]] = []
        self._characters: list[npt.NDArray[np.int32]] = []
        different = list(numbers)
        for start in range(0, len(different), _BATCH):
            batch = different[start : start + _BATCH]
            if with_characters:
                rows, offsets = zip(*tokenizer.encode_batch_with_offsets(batch), strict=True)
                self._characters += [np.array(pairs, np.int32).reshape(-1, 2) for pairs in offsets]
            else:
                rows = tuple(tokenizer.encode_batch(batch))
            self._ids += [np.array(ids, np.int32) for ids in rows]
        self.lengths = np.array([len(self._ids[index]) for index in self._numbers], np.int64)

    def __getitem__(self, index: int) -> npt.NDArray[np.int32]:
        """The ids of one text."""
        return self._ids[self._numbers[index]]

    def characters(self, index: int) -> npt.NDArray[np.int32]:
        """The range of characters of every token in a text, int32 [tokens, 2]."""
        return self._characters[self._numbers[index]]


class JoinedTexts(Samples):
    """Samples with inputs `[CLS] first [SEP] second [SEP]`."""

    def __init__(self, records: Sequence[Any], form: BatchSpec, sequence_length: int, tokenizer: Tokenizer) -> None:
        check_length(sequence_length)
        self.records, self.form, self.sequence_length = records, form, sequence_length
        self._vocabulary = WordPieces.of(tokenizer)
        self.counts: dict[str, int] = {}  # description -> how many records were truncated or left out; no zeros

    def __len__(self) -> int:
        return len(self.records)

    def joined(self, first: npt.NDArray[np.int32], second: npt.NDArray[np.int32]) -> Sample:
        """The padded input for two texts: `tokens` and `token_types` [T], and `length`."""
        middle = len(first) + 2  # where `second` begins
        length = middle + len(second) + 1
        tokens_T = np.full(self.sequence_length, self._vocabulary.pad, np.int32)
        tokens_T[0] = self._vocabulary.cls
        tokens_T[1 : middle - 1] = first
        tokens_T[middle : length - 1] = second
        tokens_T[[middle - 1, length - 1]] = self._vocabulary.sep
        types_T = np.zeros(self.sequence_length, np.int32)
        types_T[middle:length] = 1
        return {"tokens": tokens_T, "token_types": types_T, "length": np.array(length, np.int32)}

    def label(self, index: int) -> Sample:
        """The label of a record."""
        label = self.records[index].label
        return {"label": np.array(IGNORED if label is None else label, np.int32)}


class PairInputs(JoinedTexts):
    """A sample for every pair: `[CLS] a [SEP] b [SEP]`. If it is too long, the longer text is truncated, or both are,
    as with Hugging Face's `truncation=True`."""

    def __init__(self, records: Sequence[Pair], tokenizer: Tokenizer, *, sequence_length: int) -> None:
        super().__init__(records, classes_form(), sequence_length, tokenizer)
        a, b = self._texts = [EncodedTexts([pair.texts[which] for pair in records], tokenizer) for which in (0, 1)]
        room = sequence_length - SPECIAL
        self._lengths = cut_longest_first(a.lengths, b.lengths, room)
        self.counts = counted(
            {f"pairs truncated to {sequence_length} tokens": int((a.lengths + b.lengths > room).sum())}
        )

    def __getitem__(self, index: int) -> Sample:
        a, b = (texts[index][: lengths[index]] for texts, lengths in zip(self._texts, self._lengths, strict=True))
        return self.joined(a, b) | self.label(index)


class ExamInputs(JoinedTexts):
    """A sample for every exam, with an input for each option: question and option, `[SEP]`, and the article.

    As in Megatron-LM, the option replaces `_` in the question or follows it, the two together are truncated to
    `option_tokens` tokens, and the article is truncated at its end. Missing options are padding of length 0.
    """

    def __init__(
        self, records: Sequence[Exam], tokenizer: Tokenizer, *, sequence_length: int, option_tokens: int
    ) -> None:
        super().__init__(records, choice_form(OPTIONS), sequence_length, tokenizer)
        self._articles = EncodedTexts([_cleaned(exam.article) for exam in records], tokenizer)
        texts = [_cleaned(with_option(exam.text, option)) for exam in records for option in exam.options]
        self._texts = EncodedTexts(texts, tokenizer)
        sizes = np.array([len(exam.options) for exam in records], np.int64)
        assert (sizes <= OPTIONS).all(), "more options than a batch has"
        self._begins = np.concatenate([[0], np.cumsum(sizes)])  # index of each exam's first option
        room = sequence_length - SPECIAL
        self._most = min(option_tokens, room)
        cut = np.minimum(self._texts.lengths, self._most)
        articles = np.repeat(self._articles.lengths, sizes)
        self.counts = counted(
            {
                f"questions with an option truncated to {self._most} tokens": int((self._texts.lengths > cut).sum()),
                f"inputs whose article was truncated to {sequence_length} tokens": int((cut + articles > room).sum()),
            }
        )

    def __getitem__(self, index: int) -> Sample:
        sample = {name: array[0] for name, array in self.form.padding(1, tokens=self.sequence_length).items()}
        for option, piece in enumerate(range(self._begins[index], self._begins[index + 1])):
            text = self._texts[piece][: self._most]
            article = self._articles[index][: self.sequence_length - SPECIAL - len(text)]
            for name, array in self.joined(text, article).items():
                sample[name][option] = array
        return sample | self.label(index)


def with_option(question: str, option: str) -> str:
    """The question with the option in place of every run of `_`, or appended if there is none."""
    found, blanks = _BLANK.subn(lambda _: option, question)
    return found if blanks else f"{question} {option}"


def cut_longest_first(
    lengths_a: npt.NDArray[np.int64], lengths_b: npt.NDArray[np.int64], room: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """How many tokens of each pair of texts fit in `room`: the longer text is truncated to the length of the shorter
    one, then both are. The longer one keeps the odd token; if they are equally long, the second."""
    small = np.minimum(np.minimum(lengths_a, lengths_b), room // 2)
    large = np.minimum(np.maximum(lengths_a, lengths_b), room - small)
    a_is_longer = lengths_a > lengths_b
    return np.where(a_is_longer, large, small), np.where(a_is_longer, small, large)


def counted(counts: dict[str, int]) -> dict[str, int]:
    """The counts that are not 0."""
    return {what: count for what, count in counts.items() if count}


def _cleaned(text: str) -> str:
    """The text with single spaces between words, as Megatron-LM cleans RACE."""
    return " ".join(text.split())

"""Pairs of texts and exams as samples, by `classes_form` and `choice_form` of `batch.py`. T is the sequence length."""

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megajax.batch import IGNORED, choice_form, classes_form
from megajax.data.masking import WordPieces
from megajax.data.pairs import check_length
from megajax.data.samples import Sample
from megajax.data.tokenizer import Tokenizer
from megajax.tasks.encoded import SPECIAL, EncodedTexts, joined
from megajax.tasks.records import Exam, Pair
from megajax.tasks.registry import TASKS

OPTIONS = TASKS["race"].classes

_BLANK = re.compile("_+")


class PairInputs:
    """A sample for every pair: `[CLS] a [SEP] b [SEP]`. If it is too long, the longer text is cut at its end, or both
    are.

    What is cut is what Hugging Face's `truncation=True` cuts.
    """

    def __init__(self, records: Sequence[Pair], tokenizer: Tokenizer, *, sequence_length: int) -> None:
        check_length(sequence_length)
        self.sequence_length, self.form, self.records = sequence_length, classes_form(), records
        self.owners = np.arange(len(records))
        self._vocabulary = WordPieces.of(tokenizer)
        self._texts = [EncodedTexts([pair.texts[which] for pair in records], tokenizer) for which in (0, 1)]
        lengths = self._texts[0].lengths, self._texts[1].lengths
        self._lengths = cut_longest_first(*lengths, sequence_length - SPECIAL)
        is_cut = lengths[0] + lengths[1] > sequence_length - SPECIAL
        self.counts = counted({f"pairs cut to {sequence_length} tokens": int(is_cut.sum())})

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, number: int) -> Sample:
        a, b = (texts[number][: lengths[number]] for texts, lengths in zip(self._texts, self._lengths, strict=True))
        return joined(a, b, self.sequence_length, self._vocabulary) | {"label": _label(self.records[number])}


class ExamInputs:
    """A sample for every exam: for each option an input of question and option, `[SEP]`, and the article.

    As in Megatron-LM, the option stands where the question has `_`, or after it, both are cut at so many tokens, and
    the article is cut at its end. Where there is no such option, there is padding of length 0.
    """

    def __init__(
        self, records: Sequence[Exam], tokenizer: Tokenizer, *, sequence_length: int, option_tokens: int
    ) -> None:
        check_length(sequence_length)
        self.sequence_length, self.form, self.records = sequence_length, choice_form(OPTIONS), records
        self.owners = np.arange(len(records))
        self._vocabulary = WordPieces.of(tokenizer)
        self._articles = EncodedTexts([_cleaned(exam.article) for exam in records], tokenizer)
        texts = [_cleaned(with_option(exam.text, option)) for exam in records for option in exam.options]
        self._texts = EncodedTexts(texts, tokenizer)
        sizes = np.array([len(exam.options) for exam in records], np.int64)
        assert (sizes <= OPTIONS).all(), "more options than a batch has"
        self._begins = np.concatenate([[0], np.cumsum(sizes)])  # of the options of every exam
        room = sequence_length - SPECIAL
        self._most = min(option_tokens, room)
        kept = np.minimum(self._texts.lengths, self._most)
        articles = np.repeat(self._articles.lengths, sizes)
        self.counts = counted(
            {
                f"questions with an option cut at {self._most} tokens": int((self._texts.lengths > kept).sum()),
                f"inputs whose article was cut at {sequence_length} tokens": int((kept + articles > room).sum()),
            }
        )

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, number: int) -> Sample:
        sample = {name: array[0] for name, array in self.form.padding(1, tokens=self.sequence_length).items()}
        for option, place in enumerate(range(self._begins[number], self._begins[number + 1])):
            text = self._texts[place][: self._most]
            article = self._articles[number][: self.sequence_length - SPECIAL - len(text)]
            for name, array in joined(text, article, self.sequence_length, self._vocabulary).items():
                sample[name][option] = array
        return sample | {"label": _label(self.records[number])}


def with_option(question: str, option: str) -> str:
    """The question with the option in place of every run of `_`, or appended if there is none."""
    found, blanks = _BLANK.subn(lambda _: option, question)
    return found if blanks else f"{question} {option}"


def cut_longest_first(
    lengths_a: npt.NDArray[np.int64], lengths_b: npt.NDArray[np.int64], room: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """How many tokens of each pair of texts fit in the room: the longer text is cut to the length of the shorter one,
    then both are. The longer one gets the odd token; of equal texts the second.
    """
    shorter, longer = np.minimum(lengths_a, lengths_b), np.maximum(lengths_a, lengths_b)
    fits = shorter + longer <= room
    small = np.where(fits, shorter, np.minimum(shorter, room // 2))
    large = np.where(fits, longer, room - small)
    a_is_longer = lengths_a > lengths_b
    return np.where(a_is_longer, large, small), np.where(a_is_longer, small, large)


def counted(counts: dict[str, int]) -> dict[str, int]:
    """The counts other than 0."""
    return {what: count for what, count in counts.items() if count}


def _cleaned(text: str) -> str:
    """The text with single spaces between words, as Megatron-LM cleans RACE's."""
    return " ".join(text.split())


def _label(record: Pair | Exam) -> npt.NDArray[np.int32]:
    return np.array(IGNORED if record.label is None else record.label, np.int32)

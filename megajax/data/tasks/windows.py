"""Questions and contexts as samples, with overlapping windows over long contexts (`span_form` in `batch.py`), and
answers from their logits. Windows, labels and answers are the same as in Hugging Face's question-answering example.

T is the sequence length, W the number of windows. A token's start logit scores an answer that starts there, its end
logit one that ends there; the logits of token 0, `[CLS]`, score "no answer".
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megajax.core.batch import IGNORED, span_form
from megajax.core.errors import UserError
from megajax.data.samples.base import Sample
from megajax.data.tasks.inputs import SPECIAL, EncodedTexts, JoinedTexts, counted
from megajax.data.tasks.records import Question
from megajax.data.tasks.registry import TaskConfig
from megajax.data.text.tokenizer import Tokenizer

NO_SPAN = "empty"
"""The answer if no span is valid, as in the published post-processing."""

Logits = npt.NDArray[np.float32]


class SpanWindows(JoinedTexts):
    """Samples `[CLS] question [SEP] window [SEP]`: for every question, one for each window over its context, in order.

    Neighbouring windows share `config.doc_stride` tokens. Labels are the first and last token of the first answer; both
    are 0 if the window does not contain all of it, or there is no answer.

    When `training`, questions whose answer is not found in the context are left out; otherwise they have no label.
    """

    def __init__(
        self,
        records: Sequence[Question],
        tokenizer: Tokenizer,
        *,
        sequence_length: int,
        config: TaskConfig,
        training: bool,
    ) -> None:
        used = [record for record in records if not training or record.is_placed]
        super().__init__(used, span_form(), sequence_length, tokenizer)
        self._questions = EncodedTexts([record.text.lstrip() for record in used], tokenizer)
        self._contexts = EncodedTexts([record.context for record in used], tokenizer, with_characters=True)
        whole = self._questions.lengths
        self._most = config.question_tokens or sequence_length
        self._num_asked = np.minimum(whole, self._most)  # tokens of every question
        self._cut(config)
        lost = self._label()
        self.counts = counted(
            {
                "questions whose answer is not in the context, left out": len(records) - len(used),
                f"questions truncated to {self._most} tokens": int((whole > self._num_asked).sum()),
                "questions whose answer does not fit into any window": int(lost.sum()),
            }
        )

    def __len__(self) -> int:
        return len(self.owners)

    def __getitem__(self, index: int) -> Sample:
        owner = self.owners[index]
        window = self._contexts[owner][self._begins[index] : self._ends[index]]
        sample = self.joined(self._questions[owner][: self._most], window)
        return sample | {"start": np.array(self._starts[index]), "end": np.array(self._stops[index])}

    def characters(self, index: int) -> tuple[int, npt.NDArray[np.int32]]:
        """The index in the sample of a window's first token; and the range of characters in the context of each of the
        window's tokens, int32 [tokens, 2]."""
        owner = self.owners[index]
        offset = int(self._num_asked[owner]) + 2
        return offset, self._contexts.characters(owner)[self._begins[index] : self._ends[index]]

    def _cut(self, config: TaskConfig) -> None:
        """Set `owners`, the question of every window, and the windows' ranges of context tokens."""
        tokens, room = self._contexts.lengths, self.sequence_length - SPECIAL - self._num_asked
        step = room - config.doc_stride
        long = tokens > room
        for index in np.flatnonzero(long & (step < 1))[:1]:
            raise UserError(
                f"question {self.records[index].name} has {self._num_asked[index]} tokens, which leaves room for "
                f"{max(room[index], 0)} of its context's {tokens[index]} tokens, but windows overlap by "
                f"{config.doc_stride}; valid: a smaller --task.doc-stride, a smaller --task.question-tokens than "
                f"{self._num_asked[index]}, or more than --model.sequence-length {self.sequence_length}"
            )
        windows = np.where(long, 1 + -(-(tokens - room) // np.maximum(step, 1)), 1)  # per question
        self.owners = np.repeat(np.arange(len(windows)), windows)
        which = np.arange(len(self.owners)) - np.repeat(np.cumsum(windows) - windows, windows)
        self._begins = which * step[self.owners]
        self._ends = np.minimum(self._begins + room[self.owners], tokens[self.owners])

    def _label(self) -> npt.NDArray[np.bool_]:
        """Set the answer's first and last token in every window; returns, for every question, whether its answer's
        place is known but no window contains all of it."""
        is_placed = np.array([record.is_placed for record in self.records], bool)
        has_answer = is_placed & np.array([bool(record.answers) for record in self.records], bool)
        tokens = [self._answer(index) if has_answer[index] else (-1, -1) for index in range(len(self.records))]
        first, last = np.array(tokens, np.int64).reshape(-1, 2)[self.owners].T
        is_inside = (first >= self._begins) & (last < self._ends)
        # If several tokens begin, or end, with the same character of the answer, take the one in the window.
        place = self._num_asked[self.owners] + 2 - self._begins
        starts = np.minimum(first, self._ends - 1) + place
        stops = np.maximum(last, self._begins) + place
        otherwise = np.where(is_placed, 0, IGNORED)[self.owners]
        self._starts, self._stops = (np.where(is_inside, at, otherwise).astype(np.int32) for at in (starts, stops))
        return has_answer & (np.bincount(self.owners, is_inside, len(self.records)) == 0)

    def _answer(self, index: int) -> tuple[int, int]:
        """The first and last context token of the first answer: the last token that begins at or before its first
        character, and the first token that ends at or after its last."""
        answer, spans = self.records[index].answers[0], self._contexts.characters(index)
        first = np.searchsorted(spans[:, 0], answer.start, side="right") - 1
        return int(first), int(np.searchsorted(spans[:, 1], answer.start + len(answer.text), side="left"))


@dataclass(frozen=True)
class FoundAnswer:
    """The answer found for a question."""

    text: str  # a part of the context; empty: no answer
    best: str  # the best text that is not empty
    difference: float  # how much "no answer" outscores `best`; 0 if every question has an answer


def find_answers(
    windows: SpanWindows, start_WT: Logits, end_WT: Logits, config: TaskConfig, *, unanswerable: bool
) -> list[FoundAnswer]:
    """Find the answer to every question.

    In every window the `config.n_best` best starts and ends form spans of up to `config.answer_tokens` tokens in the
    context, scored by the sum of their two logits. The best span over all windows is the answer. With `unanswerable`,
    the score of "no answer" is the lowest score of token 0 in any window; it wins if it exceeds the best span by more
    than `config.null_threshold`.

    Among equal logits the later token is tried first; among equal scores the earlier window wins, then the better
    start.
    """
    assert start_WT.shape == end_WT.shape == (len(windows), windows.sequence_length), (start_WT.shape, end_WT.shape)
    null_W = start_WT[:, 0] + end_WT[:, 0]
    bounds = np.searchsorted(windows.owners, np.arange(len(windows.records) + 1))
    answers = []
    for record, first, last in zip(windows.records, bounds, bounds[1:], strict=False):
        found = [_spans(windows, index, start_WT[index], end_WT[index], config) for index in range(first, last)]
        characters, logits = (np.concatenate(parts) for parts in zip(*found, strict=True))
        best, (of_start, of_end) = NO_SPAN, np.zeros(2, np.float32)
        if len(logits):
            place = (logits[:, 0] + logits[:, 1]).argmax()
            best, (of_start, of_end) = record.context[slice(*characters[place].tolist())], logits[place]
        difference = float(null_W[first:last].min() - of_start - of_end) if unanswerable else 0.0
        is_null = unanswerable and difference > config.null_threshold
        answers.append(FoundAnswer("" if is_null else best, best, difference))
    return answers


def _spans(
    windows: SpanWindows, index: int, start_T: Logits, end_T: Logits, config: TaskConfig
) -> tuple[npt.NDArray[np.int32], Logits]:
    """Spans in a window: their ranges of characters [S, 2], and their two logits [S, 2]."""
    offset, characters = windows.characters(index)
    # The tokens with the largest logits, largest first.
    best = (np.argsort(logits_T, kind="stable")[::-1][: config.n_best] - offset for logits_T in (start_T, end_T))
    starts, ends = (tokens[(tokens >= 0) & (tokens < len(characters))] for tokens in best)
    length = ends - starts[:, None] + 1
    row, column = np.nonzero((length > 0) & (length <= config.answer_tokens))
    first, last = starts[row], ends[column]
    logits = np.stack([start_T[offset + first], end_T[offset + last]], 1)
    return np.stack([characters[first, 0], characters[last, 1]], 1), logits


def mean_logits(windows: SpanWindows, logits: Sequence[Logits]) -> Logits:
    """The start logits, or end logits, of an ensemble, float32 [W, T].

    Every model's logits become probabilities over all tokens in all windows of a question, and the result is the
    logarithm of their mean. To it, for every question, the constant offset of the first model's logits from its log
    probabilities is added. That changes no answer, but makes the mean of equal models equal to each, to the last bit.
    """
    own = _log_probabilities(windows, logits[0])
    above = np.stack([_log_probabilities(windows, each) - own for each in logits])
    largest = above.max(axis=0)
    return (logits[0] + (largest + np.log(np.exp(above - largest).mean(axis=0)))).astype(np.float32)


def _log_probabilities(windows: SpanWindows, logits_WT: Logits) -> npt.NDArray[np.float64]:
    first_Q = np.searchsorted(windows.owners, np.arange(len(windows.records)))  # every question has a window
    largest_Q = np.maximum.reduceat(logits_WT.max(1), first_Q)
    shifted_WT = logits_WT.astype(np.float64) - largest_Q[windows.owners, None]
    total_Q: npt.NDArray[np.float64] = np.add.reduceat(np.exp(shifted_WT).sum(1), first_Q)
    return shifted_WT - np.log(total_Q)[windows.owners, None]

"""Answers from logits, as in Hugging Face's question-answering example.

W windows of all questions, T the sequence length. A token's start logit says how well an answer begins there, its end
logit how well one ends there; those of token 0, `[CLS]`, say that there is none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megajax.tasks.config import TaskConfig
from megajax.tasks.windows import SpanWindows

NO_SPAN = "empty"
"""The answer where no span is valid; the published post-processing says so."""

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class FoundAnswer:
    """The answer to a question."""

    text: str  # of the context; empty: it has none
    best: str  # the best text that is not empty
    difference: float  # by how much "it has none" scores above `best`; 0 where every question has an answer


def find_answers(
    windows: SpanWindows, start_WT: Logits, end_WT: Logits, config: TaskConfig, *, unanswerable: bool
) -> list[FoundAnswer]:
    """Find the answer to every question.

    In every window the `config.n_best` best starts and ends make spans, of up to `config.answer_tokens` tokens of the
    context, which score the sum of the two logits. The best one of all windows is the answer. With `unanswerable`, the
    least that token 0 scores in any window speaks for "none", which is the answer where that is more than
    `config.null_threshold` above the best span.

    Of equal logits the later token's is taken first; of equal scores that of the earlier window, then of the better
    start.
    """
    assert start_WT.shape == end_WT.shape == (len(windows), windows.sequence_length), (start_WT.shape, end_WT.shape)
    null_W = start_WT[:, 0] + end_WT[:, 0]
    bounds = np.searchsorted(windows.owners, np.arange(len(windows.records) + 1))
    answers = []
    for record, first, last in zip(windows.records, bounds, bounds[1:], strict=False):
        found = [_spans(windows, number, start_WT[number], end_WT[number], config) for number in range(first, last)]
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
    windows: SpanWindows, number: int, start_T: Logits, end_T: Logits, config: TaskConfig
) -> tuple[npt.NDArray[np.int32], Logits]:
    """Spans of a window: the first character and the one after the last [S, 2], and both logits [S, 2]."""
    place, characters = windows.characters(number)
    # The tokens of the largest logits, the largest first.
    best = (np.argsort(logits_T, kind="stable")[::-1][: config.n_best] - place for logits_T in (start_T, end_T))
    starts, ends = (tokens[(tokens >= 0) & (tokens < len(characters))] for tokens in best)
    length = ends - starts[:, None] + 1
    row, column = np.nonzero((length > 0) & (length <= config.answer_tokens))
    first, last = starts[row], ends[column]
    logits = np.stack([start_T[place + first], end_T[place + last]], 1)
    return np.stack([characters[first, 0], characters[last, 1]], 1), logits


def mean_logits(windows: SpanWindows, logits: Sequence[Logits]) -> Logits:
    """The start logits of an ensemble, or its end logits, float32 [W, T].

    Every model's become probabilities over all tokens of all windows of a question. Their mean's logarithm is given,
    plus, for every question, the constant that the first model's logits are above the logarithms of its probabilities,
    which changes no answer: so the mean of equal models is what each of them says, to the last bit.
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

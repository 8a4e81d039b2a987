"""Questions and contexts as samples, with overlapping windows over long contexts: `span_form` of `batch.py`.

Windows and labels are those of Hugging Face's question-answering example. T is the sequence length, W the number of
windows.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megajax.batch import IGNORED, span_form
from megajax.data.samples import Sample
from megajax.data.tokenizer import Tokenizer
from megajax.errors import UserError
from megajax.tasks.config import TaskConfig
from megajax.tasks.inputs import SPECIAL, EncodedTexts, JoinedTexts, counted
from megajax.tasks.records import Question


class SpanWindows(JoinedTexts):
    """Samples `[CLS] question [SEP] window [SEP]`: for every question one for each window over its context, in order.

    Neighbouring windows share `config.doc_stride` tokens. The label is the first and the last token of the first
    answer; both are 0 where the window does not have all of it, or there is none.

    When `training`, questions are left out whose answer has no place in the context; else they have no label.
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
                "questions left out, whose answer has no place in the context": len(records) - len(used),
                f"questions cut at {self._most} tokens": int((whole > self._num_asked).sum()),
                "questions whose answer no window holds as a whole": int(lost.sum()),
            }
        )

    def __len__(self) -> int:
        return len(self.owners)

    def __getitem__(self, number: int) -> Sample:
        owner = self.owners[number]
        window = self._contexts[owner][self._begins[number] : self._ends[number]]
        sample = self.joined(self._questions[owner][: self._most], window)
        return sample | {"start": np.array(self._starts[number]), "end": np.array(self._stops[number])}

    def characters(self, number: int) -> tuple[int, npt.NDArray[np.int32]]:
        """Where the tokens of a window stand in the context.

        Returns the place in the sample of the first one, and of each its first character and the one after its last,
        int32 [tokens, 2].
        """
        owner = self.owners[number]
        place = int(self._num_asked[owner]) + 2
        return place, self._contexts.characters(owner)[self._begins[number] : self._ends[number]]

    def _cut(self, config: TaskConfig) -> None:
        """Set `owners`, the question of every window, and the range of the context's tokens in it."""
        tokens, room = self._contexts.lengths, self.sequence_length - SPECIAL - self._num_asked
        step = room - config.doc_stride
        long = tokens > room
        for number in np.flatnonzero(long & (step < 1))[:1]:
            raise UserError(
                f"question {self.records[number].name}: beside its {self._num_asked[number]} tokens there is room for "
                f"{max(room[number], 0)} of the {tokens[number]} tokens of its context, and windows share "
                f"{config.doc_stride}; valid: a smaller --task.doc-stride, a smaller --task.question-tokens than "
                f"{self._num_asked[number]}, or more than --model.sequence-length {self.sequence_length}"
            )
        windows = np.where(long, 1 + -(-(tokens - room) // np.maximum(step, 1)), 1)  # of every question
        self.owners = np.repeat(np.arange(len(windows)), windows)
        which = np.arange(len(self.owners)) - np.repeat(np.cumsum(windows) - windows, windows)
        self._begins = which * step[self.owners]
        self._ends = np.minimum(self._begins + room[self.owners], tokens[self.owners])

    def _label(self) -> npt.NDArray[np.bool_]:
        """Set the first and the last token of the answer in every window.

        Returns, for every question, whether it has an answer whose place is known, but no window holds all of it.
        """
        is_placed = np.array([record.is_placed for record in self.records], bool)
        has_answer = is_placed & np.array([bool(record.answers) for record in self.records], bool)
        tokens = [self._answer(number) if has_answer[number] else (-1, -1) for number in range(len(self.records))]
        first, last = np.array(tokens, np.int64).reshape(-1, 2)[self.owners].T
        is_inside = (first >= self._begins) & (last < self._ends)
        # Of several tokens that begin, or end, with the same character of the answer, the one that is in the window.
        place = self._num_asked[self.owners] + 2 - self._begins
        starts = np.minimum(first, self._ends - 1) + place
        stops = np.maximum(last, self._begins) + place
        otherwise = np.where(is_placed, 0, IGNORED)[self.owners]
        self._starts, self._stops = (np.where(is_inside, at, otherwise).astype(np.int32) for at in (starts, stops))
        return has_answer & (np.bincount(self.owners, is_inside, len(self.records)) == 0)

    def _answer(self, number: int) -> tuple[int, int]:
        """The first and the last token of the context that the first answer lies in: the last one that begins at or
        before its first character, the first one that ends at or after its last."""
        answer, spans = self.records[number].answers[0], self._contexts.characters(number)
        first = np.searchsorted(spans[:, 0], answer.start, side="right") - 1
        return int(first), int(np.searchsorted(spans[:, 1], answer.start + len(answer.text), side="left"))

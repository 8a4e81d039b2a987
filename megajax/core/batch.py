"""What a batch holds: its arrays by name, their dims, what is counted in them, and their padding.

A batch is a dict of arrays, int32 [rows, *dims]; those that only a loss of the user's reads may have another dtype. All
code that makes, loads, shards or reads one asks its `BatchSpec`, so a model with other arrays needs only another
`BatchSpec`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

IGNORED = -1  # a target that is not to be predicted


@dataclass(frozen=True)
class BatchArray:
    """One array of a batch."""

    dims: tuple[str, ...]  # names of the dims after the rows: `tokens`, or one of the form's `sizes`
    padding: int = 0  # value after the end of a text, and in rows without a sample
    dtype: str = "int32"
    ids: bool = False  # whether its numbers are token ids, of which those beyond the vocabulary are refused


@dataclass(frozen=True)
class BatchSpec:
    """The arrays of a batch, and the losses computed from it.

    Attributes:
        entries: every array by name.
        targets: for every loss by name, the array with its targets; `IGNORED` entries are not predicted.
        measures: the same for every mean that is reported but not trained.
        sizes: for every dim except `tokens`, its size as a function of the sequence length.
        by_row: whether what counts is rows with a target, instead of targets.
    """

    entries: Mapping[str, BatchArray]
    targets: dict[str, str]
    measures: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, Callable[[int], int]] = field(default_factory=dict)
    by_row: bool = False

    def shapes(self, rows: int, *, tokens: int) -> dict[str, tuple[int, ...]]:
        """Shape of every array for this many rows of this many tokens."""
        sizes = {"tokens": tokens} | {dim: size(tokens) for dim, size in self.sizes.items()}
        return {name: (rows, *(sizes[dim] for dim in entry.dims)) for name, entry in self.entries.items()}

    def padding(self, rows: int, *, tokens: int) -> dict[str, npt.NDArray[Any]]:
        """A batch of padding only."""
        shapes = self.shapes(rows, tokens=tokens)
        return {name: np.full(shapes[name], entry.padding, entry.dtype) for name, entry in self.entries.items()}

    def counts(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """How many targets every loss and measure has in a batch, a scalar each."""
        arrays = self.targets | self.measures
        there = {name: batch[name] != IGNORED for name in dict.fromkeys(arrays.values())}
        found = {name: (each.any(axis=1) if self.by_row else each).sum() for name, each in there.items()}
        return {loss: found[name] for loss, name in arrays.items()}


def text_form(*, with_positions: bool = False) -> BatchSpec:
    """Text for next-token prediction: `tokens` and `targets` [T].

    With `positions` [T], every token's position in its document, attention and positions restart with every document.
    """
    entries = {"tokens": BatchArray(("tokens",)), "targets": BatchArray(("tokens",), IGNORED)}
    if with_positions:
        entries["positions"] = BatchArray(("tokens",))
    return BatchSpec(entries, targets={"next_token": "targets"})


CHOSEN, REJECTED = 1, -1  # answers


def preferences_form() -> BatchSpec:
    """Two answers to a prompt, each after it, as two documents (`text_form`). `answer` [T] is `CHOSEN` or `REJECTED`
    where a token has a target, which is of that answer, and otherwise 0; `reference`, of a row, is what another model
    thinks of the two (`models/preferences.py`)."""
    text = text_form(with_positions=True)
    arrays = {"answer": BatchArray(("tokens",)), "reference": BatchArray((), dtype="float32")}
    return BatchSpec({**text.entries, **arrays}, targets={"preferences": "targets"}, by_row=True)


def document_positions(begins: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int32]:
    """Each token's position in its document, int32 [length]. `begins` are the indices at which documents begin,
    ascending; the first token always counts as a beginning."""
    begin_T = np.zeros(length, np.int32)
    begin_T[begins] = begins
    return np.arange(length, dtype=np.int32) - np.maximum.accumulate(begin_T)


MASKED_SHARE = 0.15  # average share of masked tokens in a sample, special tokens included


def most_masked(sequence_length: int) -> int:
    """The most tokens of a sequence that can be masked: the average number, plus some because words have several
    pieces, rounded up to a multiple of 8."""
    return min(sequence_length, 8 * math.ceil((MASKED_SHARE * sequence_length + 16) / 8))


def pairs_form() -> BatchSpec:
    """One or two segments of text, `[CLS] A [SEP] B [SEP]`, with up to M masked tokens (`most_masked`).

    Per token: `tokens` [T], and `token_types` [T], 0 up to the first `[SEP]` and 1 after it. Per masked token: `places`
    [M], their positions in ascending order, and `targets` [M], the original tokens. Per row: `length`, the number of
    tokens without padding, and `order`: 0 if the segments follow each other as in the text, 1 if they were swapped,
    `IGNORED` if there is only one.
    """
    tokens, masked, of_row = ("tokens",), ("masked",), ()
    return BatchSpec(
        {
            "tokens": BatchArray(tokens),
            "token_types": BatchArray(tokens),
            "places": BatchArray(masked),
            "targets": BatchArray(masked, IGNORED),
            "length": BatchArray(of_row),
            "order": BatchArray(of_row, IGNORED),
        },
        targets={"masked_lm": "targets", "sentence_order": "order"},
        measures={"accuracy/sentence_order": "order"},
        sizes={"masked": most_masked},
    )


def _pairs(loss: str, *targets: str, options: int = 0) -> BatchSpec:
    """Inputs `[CLS] A [SEP] B [SEP]`, `options` of them per row if given, and numbers to predict for the row.

    Every input has `tokens` [T], `token_types` [T], 0 up to the first `[SEP]` and 1 after it, and `length`, the number
    of tokens without padding.
    """
    dims: dict[str, tuple[str, ...]] = {"tokens": ("tokens",), "token_types": ("tokens",), "length": ()}
    of_options = ("options",) if options else ()
    return BatchSpec(
        {name: BatchArray((*of_options, *own)) for name, own in dims.items()}
        | dict.fromkeys(targets, BatchArray((), IGNORED)),
        targets={loss: targets[0]},
        measures={f"accuracy/{loss}": targets[0]},
        sizes={"options": lambda _: options} if options else {},
    )


def classes_form() -> BatchSpec:
    """A pair of texts and its class, `label`."""
    return _pairs("classes", "label")


def span_form() -> BatchSpec:
    """A question with a window of its context, and the first and last token of the answer, `start` and `end`; both are
    0, the position of `[CLS]`, if the answer is not in the window."""
    return _pairs("span", "start", "end")


def choice_form(options: int) -> BatchSpec:
    """An article and a question, with up to `options` answers, each an input of its own; `label` is the right one, and
    `length` is 0 for an answer that does not exist."""
    return _pairs("choice", "label", options=options)

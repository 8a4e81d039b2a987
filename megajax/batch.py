"""What a batch holds: its arrays by name, their dims, what is counted in them, and what fills them up.

A batch is a dict of arrays, int32 [rows, *dims]. Whoever makes, loads, places or reads one asks its form, so that a
model of other arrays is another `BatchSpec`, and nothing else.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

IGNORED = -1  # in the place of a target: nothing is to be predicted here


@dataclass(frozen=True)
class Entry:
    """One array of a batch."""

    dims: tuple[str, ...]  # names of its dims after the rows, `tokens` or one of the form's `sizes`
    padding: int = 0  # what stands where there is nothing: after the end of a text, and in rows without a sample


@dataclass(frozen=True)
class BatchSpec:
    """The arrays of a batch, and the losses that are taken of it.

    Attributes:
        entries: every array by name.
        targets: for every loss by name the array whose entries other than `IGNORED` it predicts.
        measures: the same for every mean that is watched, not trained.
        sizes: of every dim but `tokens` by name, how it follows from the sequence length.
    """

    entries: Mapping[str, Entry]
    targets: dict[str, str]
    measures: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, Callable[[int], int]] = field(default_factory=dict)

    def shapes(self, rows: int, *, tokens: int) -> dict[str, tuple[int, ...]]:
        """Shape of every array of so many rows of so many tokens."""
        sizes = {"tokens": tokens} | {dim: size(tokens) for dim, size in self.sizes.items()}
        return {name: (rows, *(sizes[dim] for dim in entry.dims)) for name, entry in self.entries.items()}

    def padding(self, rows: int, *, tokens: int) -> dict[str, npt.NDArray[np.int32]]:
        """A batch in which there is nothing."""
        shapes = self.shapes(rows, tokens=tokens)
        return {name: np.full(shapes[name], entry.padding, np.int32) for name, entry in self.entries.items()}

    def counts(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """How many targets every loss and every measure has in a batch, a scalar each."""
        arrays = self.targets | self.measures
        found = {name: (batch[name] != IGNORED).sum() for name in dict.fromkeys(arrays.values())}
        return {loss: found[name] for loss, name in arrays.items()}


def text_form(*, with_positions: bool = False) -> BatchSpec:
    """Text whose next tokens are predicted: `tokens` and `targets` [T].

    With `positions` [T], every token's place in its document, attention and positions start anew with every document.
    """
    entries = {"tokens": Entry(("tokens",)), "targets": Entry(("tokens",), IGNORED)}
    if with_positions:
        entries["positions"] = Entry(("tokens",))
    return BatchSpec(entries, targets={"next_token": "targets"})


MASKED_SHARE = 0.15  # of a sample's tokens, special ones included, that are masked on average


def most_masked(sequence_length: int) -> int:
    """How many tokens of a sequence can be masked at most: those that are on average, some more for words of many
    pieces, and as many as make it a multiple of 8."""
    return min(sequence_length, 8 * math.ceil((MASKED_SHARE * sequence_length + 16) / 8))


def pairs_form() -> BatchSpec:
    """Two segments of text, `[CLS] A [SEP] B [SEP]`, or one, with masked tokens, of which there are up to M
    (`most_masked`).

    `tokens` [T] and `token_types` [T], 0 up to the first `[SEP]` and 1 after it; `places` [M], where tokens were
    chosen, ascending, and `targets` [M], what stood there; of every row `length`, its tokens without padding, and
    `order`: 0 where the segments follow each other as in the text, 1 where they were swapped, `IGNORED` where there is
    one only.
    """
    tokens, masked, of_row = ("tokens",), ("masked",), ()
    return BatchSpec(
        {
            "tokens": Entry(tokens),
            "token_types": Entry(tokens),
            "places": Entry(masked),
            "targets": Entry(masked, IGNORED),
            "length": Entry(of_row),
            "order": Entry(of_row, IGNORED),
        },
        targets={"masked_lm": "targets", "sentence_order": "order"},
        measures={"accuracy/sentence_order": "order"},
        sizes={"masked": most_masked},
    )


def _pairs(loss: str, *targets: str, options: int = 0) -> BatchSpec:
    """Inputs `[CLS] A [SEP] B [SEP]`, with `options` as many in a row, and numbers of a row that are to be found.

    Of every input `tokens` [T], `token_types` [T], 0 up to the first `[SEP]` and 1 after it, and `length`, its tokens
    without padding.
    """
    dims: dict[str, tuple[str, ...]] = {"tokens": ("tokens",), "token_types": ("tokens",), "length": ()}
    of_options = ("options",) if options else ()
    return BatchSpec(
        {name: Entry((*of_options, *own)) for name, own in dims.items()} | dict.fromkeys(targets, Entry((), IGNORED)),
        targets={loss: targets[0]},
        measures={f"accuracy/{loss}": targets[0]},
        sizes={"options": lambda _: options} if options else {},
    )


def classes_form() -> BatchSpec:
    """A pair of texts, and its class, `label`."""
    return _pairs("classes", "label")


def span_form() -> BatchSpec:
    """A question and a window of its context, and the first and the last token of the answer in it, `start` and `end`:
    both 0, which is `[CLS]`, where the window does not have it."""
    return _pairs("span", "start", "end")


def choice_form(options: int) -> BatchSpec:
    """A question with each of its options, and an article: up to so many inputs, of which the one at `label` is right;
    `length` is 0 where there is no such option."""
    return _pairs("choice", "label", options=options)

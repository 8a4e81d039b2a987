"""What a batch holds: its arrays by name, their dims, what is counted in them, and what fills them up.

A batch is a dict of arrays, int32 [rows, *dims]. Whoever makes, loads, places or reads one asks its form, so that a
model of other arrays is another `BatchForm`, and nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

IGNORED = -1
"""In the place of a target: nothing is to be predicted here."""


@dataclass(frozen=True)
class Entry:
    """One array of a batch.

    Attributes:
        dims: names of its dims after the rows; their sizes come from elsewhere.
        padding: what stands where there is nothing: after the end of a text, and in rows without a sample.
    """

    dims: tuple[str, ...]
    padding: int = 0


@dataclass(frozen=True)
class BatchForm:
    """The arrays of a batch, and the losses that are taken of it.

    Attributes:
        entries: every array by name.
        targets: for every loss by name the array whose entries other than `IGNORED` it predicts.
        measures: the same for every mean that is watched, not trained.
    """

    entries: Mapping[str, Entry]
    targets: dict[str, str]
    measures: dict[str, str] = field(default_factory=dict)

    def shapes(self, rows: int, **sizes: int) -> dict[str, tuple[int, ...]]:
        """Shape of every array of so many rows, from the sizes of the dims by name."""
        return {name: (rows, *(sizes[dim] for dim in entry.dims)) for name, entry in self.entries.items()}

    def padding(self, rows: int, **sizes: int) -> dict[str, npt.NDArray[np.int32]]:
        """A batch in which there is nothing."""
        shapes = self.shapes(rows, **sizes)
        return {name: np.full(shapes[name], entry.padding, np.int32) for name, entry in self.entries.items()}

    def counts(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """How many targets every loss and every measure has in a batch, a scalar each."""
        arrays = self.targets | self.measures
        found = {name: (batch[name] != IGNORED).sum() for name in dict.fromkeys(arrays.values())}
        return {loss: found[name] for loss, name in arrays.items()}


def text_form(*, with_positions: bool = False) -> BatchForm:
    """Text whose next tokens are predicted: `tokens` and `targets` [T].

    With `positions` [T], every token's place in its document, attention and positions start anew with every document.
    """
    entries = {"tokens": Entry(("tokens",)), "targets": Entry(("tokens",), IGNORED)}
    if with_positions:
        entries["positions"] = Entry(("tokens",))
    return BatchForm(entries, targets={"next_token": "targets"})


def pairs_form() -> BatchForm:
    """Two segments of text, `[CLS] A [SEP] B [SEP]`, or one, with masked tokens.

    `tokens` [T] and `token_types` [T], 0 up to the first `[SEP]` and 1 after it; `targets` [T], what stood where tokens
    were chosen; of every row `length`, its tokens without padding, and `order`: 0 where the segments follow each other
    as in the text, 1 where they were swapped, `IGNORED` where there is one only.
    """
    tokens, of_row = ("tokens",), ()
    return BatchForm(
        {
            "tokens": Entry(tokens),
            "token_types": Entry(tokens),
            "targets": Entry(tokens, IGNORED),
            "length": Entry(of_row),
            "order": Entry(of_row, IGNORED),
        },
        targets={"masked_lm": "targets", "sentence_order": "order"},
        measures={"accuracy/sentence_order": "order"},
    )

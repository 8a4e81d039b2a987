"""What a batch holds: the arrays of a family's samples by name, with their dims and what fills them up.

A batch is a dict of arrays, int32 [rows, *dims]. Whoever makes, loads, places or reads one asks here, so that a family
with other arrays is another `BatchForm`, and nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[np.int32]]

IGNORED = -1
"""Target of a token that is not predicted."""


@dataclass(frozen=True)
class Entry:
    """One array of a sample.

    Attributes:
        dims: names of its dims; sizes come from the model's configuration.
        padding: what stands where there is nothing: after the end of a text, and in rows without a sample.
    """

    dims: tuple[str, ...]
    padding: int = 0


@dataclass(frozen=True)
class BatchForm:
    """The arrays of a batch by name."""

    entries: Mapping[str, Entry]

    def shapes(self, rows: int, **sizes: int) -> dict[str, tuple[int, ...]]:
        """Shape of every array of a batch of `rows`, from the sizes of the dims by name."""
        return {name: (rows, *(sizes[dim] for dim in entry.dims)) for name, entry in self.entries.items()}

    def blank(self, rows: int, **sizes: int) -> Arrays:
        """A batch of padding only."""
        shapes = self.shapes(rows, **sizes)
        return {name: np.full(shapes[name], entry.padding, np.int32) for name, entry in self.entries.items()}

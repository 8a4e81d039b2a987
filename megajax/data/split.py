"""What is held out of a corpus or a task: groups that stay together, documents or the records of a context."""

import numpy as np
import numpy.typing as npt


def held_out(sizes: npt.NDArray[np.int64], order: npt.NDArray[np.int64], fraction: float) -> npt.NDArray[np.int64]:
    """The first groups in an order that have about a share of the total size; at least one group, and not all.

    A group larger than that share is not held out; if all are, it is the smallest.
    """
    budget = fraction * int(sizes.sum())
    candidates = order[sizes[order] <= budget]
    if not len(candidates):
        return order[[np.argmin(sizes[order])]]
    totals = np.cumsum(sizes[candidates])[: len(order) - 1]
    return candidates[: np.argmin(np.abs(totals - budget)) + 1]

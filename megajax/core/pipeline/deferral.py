"""Deferred weight gradients (arXiv 2401.10241): place them in a schedule's idle time. No JAX here.

The backward of a chunk is split into two passes: the gradient of its input, which the previous stage waits for, and the
gradients of its weights, which nothing waits for. A stage with no forward or backward in a tick where other stages have
one runs weight gradients instead. Until then both factors of every product are buffered.
"""

from dataclasses import dataclass

import numpy as np

_ROUNDING = 1e-9  # relative
_Table = tuple[float, np.ndarray, np.ndarray]  # time, early and late weight gradients


@dataclass(frozen=True)
class PassTimes:
    """Times of a stage's passes over a microbatch, in any unit; the chunks of a stage share them equally."""

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0


def most_pending(num_stages: int) -> int:
    """The most chunks that are pending on a stage at the end of a tick; more never help."""
    return 2 * (num_stages - 1)


def place(forward: np.ndarray, backward: np.ndarray, times: PassTimes, *, ring: bool) -> tuple[np.ndarray, np.ndarray]:
    """How many weight gradients every stage runs in every tick, int32 [ticks, stages]: before the forward is sent, and
    after the backward. `forward` and `backward` say where these run, bool [ticks, stages]. In a `ring` the last stage
    sends to the first, as with several chunks.

    A tick has two halves, each of which ends with a transfer between neighbours: first the forward, or weight gradients
    in its place, then the backward followed by weight gradients. The first half is as long as its slowest stage. The
    second begins on a stage when its own first half and that of the stage before it, which sends to it, have ended. A
    stage runs as many pending weight gradients, oldest first, as fit without making a half, or the tick, longer. There
    are two exceptions: while the first microbatches have returned and forwards still begin, a tick may be one weight
    gradient longer; and a stage with more than `most_pending` runs the surplus in any case. The last tick
    takes the rest. A weight gradient that takes longer than a forward or an input gradient does not fit in the place of
    one. For these a second rule lets it lengthen the half, and the faster of the two tables is taken; among equally
    fast ones, the one with the lowest limit on pending chunks: GPipe never needs more than p-1.
    """
    always_fits = times.weight_gradient <= min(times.forward, times.input_gradient)
    rules = (False,) if always_fits else (False, True)

    def table(most: int) -> _Table:
        tables = [_placed(forward, backward, times, most, ring, widen) for widen in rules]
        return min(tables, key=lambda table: table[0])

    enough, too_few = most_pending(forward.shape[1]), -1
    shortest = best = table(enough)
    limit = enough - 1  # usually already too few, and then no other limits are tried
    while too_few < limit < enough:
        candidate = table(limit)
        if candidate[0] <= shortest[0] * (1 + _ROUNDING):
            enough, best = limit, candidate
        else:
            too_few = limit
        limit = (too_few + enough) // 2
    return best[1], best[2]


def _placed(forward: np.ndarray, backward: np.ndarray, times: PassTimes, most: int, ring: bool, widen: bool) -> _Table:
    """The table made with the first rule, or with the second one if `widen`."""
    num_ticks, num_stages = forward.shape
    all_return = int(np.flatnonzero(backward.any(axis=1))[0]) + 2 * (num_stages - 1)
    no_more_enter = int(np.flatnonzero(forward.any(axis=1))[-1]) + 1
    early, late = np.zeros((2, num_ticks, num_stages), np.int32)
    pending, before = np.zeros(num_stages, np.int32), np.arange(num_stages) - 1
    total = 0.0

    def fitting(length: float, taken: np.ndarray) -> np.ndarray:
        room = np.floor((length - taken) / times.weight_gradient + _ROUNDING)
        return np.minimum(pending, np.minimum(room, num_ticks * num_stages)).astype(np.int32)

    def widened(length: float, taken: np.ndarray, active: np.ndarray) -> float:
        """The length of a half in which some stages run a pass, extended to fit one weight gradient on another."""
        others = taken[~active & (pending > 0)] if widen and active.any() else taken[:0]
        return max(length, others.min() + times.weight_gradient) if others.size else length

    for tick in range(num_ticks):
        taken = forward[tick] * times.forward
        early[tick] = fitting(widened(taken.max(), taken, forward[tick]), taken)
        taken = taken + early[tick] * times.weight_gradient
        received = taken[before]
        received[0] *= ring
        pending = pending - early[tick] + backward[tick]
        taken = np.maximum(taken, received) + backward[tick] * times.input_gradient
        surplus = np.maximum(pending - most, 0)
        longer = times.weight_gradient if all_return <= tick < no_more_enter else 0.0
        length = max(taken.max() + longer, (taken + surplus * times.weight_gradient).max())
        late[tick] = np.maximum(fitting(widened(length, taken, backward[tick]), taken), surplus)
        pending = pending - late[tick]
        total += (taken + late[tick] * times.weight_gradient).max()
    late[-1] += pending
    return total + pending.max() * times.weight_gradient, early, late

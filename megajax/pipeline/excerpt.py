"""Excerpts of schedules too large to draw in full: warm-up, one group of microbatches of the steady state, and
cool-down, for the first and the last stages. No JAX here."""

from dataclasses import dataclass

import numpy as np

from megajax.pipeline.table import Schedule

MOST_CELLS = 2000  # of a schedule that is drawn in full
_MOST_TICKS = 48  # of an excerpt's part
_MOST_STAGES = 32


@dataclass(frozen=True)
class Part:
    """Consecutive ticks, `first` inclusive, `past` exclusive."""

    name: str
    first: int
    past: int

    def words(self) -> str:
        return f"{self.name}: ticks {self.first:,} to {self.past - 1:,}"


@dataclass(frozen=True)
class Excerpt:
    """What is drawn of a schedule: parts and stages, both in order."""

    parts: tuple[Part, ...]
    stages: tuple[int, ...]
    of: tuple[int, int]  # ticks and stages of the schedule
    cells: int  # its passes

    @property
    def is_complete(self) -> bool:
        return not self.left_out()

    def left_out(self) -> str:
        """What is not drawn, in words; empty if nothing is left out."""
        ticks, stages = self.of[0] - sum(part.past - part.first for part in self.parts), self.of[1] - len(self.stages)
        words = [f"{ticks:,} of {self.of[0]:,} ticks"] * (ticks > 0)
        if stages:
            gap = next(a for a, b in zip(self.stages, self.stages[1:], strict=False) if b > a + 1)
            words.append(f"stages {gap + 1} to {gap + stages}")
        return " and ".join(words)


def excerpt(schedule: Schedule) -> Excerpt:
    """The entire schedule if it is small, else its parts."""
    ticks, p = schedule.num_ticks, schedule.num_stages
    passes = int(schedule.forward.active.sum() + schedule.backward.active.sum())
    cells = passes + (schedule.num_microbatches * schedule.num_virtual if schedule.deferral else 0)
    stages = tuple(range(p))
    if cells <= MOST_CELLS:
        return Excerpt((Part("all", 0, ticks),), stages, (ticks, p), cells)
    if p > _MOST_STAGES:
        half = _MOST_STAGES // 2
        stages = stages[:half] + stages[-half:]
    return Excerpt(tuple(_parts(schedule)), stages, (ticks, p), cells)


def _parts(schedule: Schedule) -> list[Part]:
    forward, backward = schedule.forward.active, schedule.backward.active
    ticks, group = schedule.num_ticks, max(schedule.num_virtual, 8)
    turn = int(backward[:, -1].argmax())
    turns = turn > _last(forward[:, -1])  # all forwards, then all backwards
    filled = 2 * schedule.num_stages if turns else int(backward[:, 0].argmax()) + 1
    drained = 2 * schedule.num_stages if turns else ticks - _last(forward[:, 0])
    begins, ends = min(filled, _MOST_TICKS, (ticks + 1) // 2), min(drained, _MOST_TICKS, ticks // 2)
    parts = [
        Part("warm-up" + " (its first ticks)" * (begins < filled), 0, begins),
        Part("cool-down" + " (its last ticks)" * (ends < drained), ticks - ends, ticks),
    ]
    length = min(2 * schedule.num_stages if turns else group, _MOST_TICKS, ticks - ends - begins)
    if length > 0:
        wanted = turn - length // 2 if turns else _group(schedule, (begins + ticks - ends - length) // 2)
        first = min(max(wanted, begins), ticks - ends - length)
        steady = bool((forward & backward)[first : first + length].all())
        name = "the turn" if turns else "steady" if steady else "middle"
        parts.insert(1, Part(name, first, first + length))
    return parts


def _last(active: np.ndarray) -> int:
    """The last tick in which something runs."""
    return len(active) - 1 - int(active[::-1].argmax())


def _group(schedule: Schedule, tick: int) -> int:
    """The tick nearest to `tick` in which the first stage begins a group of as many microbatches as stages."""
    forward = schedule.forward
    begins = (forward.chunk[:, 0] == 0) & (forward.microbatch[:, 0] % schedule.num_stages == 0)
    groups = np.flatnonzero(begins)
    return int(groups[np.abs(groups - tick).argmin()]) if groups.size else tick

"""What is drawn cell by cell of a schedule that is too large for the eye: its warm-up, one steady group of microbatches
and its cool-down, of the first and the last stages. No JAX here."""

from dataclasses import dataclass

import numpy as np

from megajax.pipeline.table import Schedule

MOST_CELLS = 2000  # that are drawn without leaving any out
_MOST_TICKS = 48  # of a part
_MOST_STAGES = 32


@dataclass(frozen=True)
class Part:
    """Ticks that follow each other, from `first` to before `past`."""

    name: str
    first: int
    past: int

    def words(self) -> str:
        return f"{self.name}: ticks {self.first:,} to {self.past - 1:,}"


@dataclass(frozen=True)
class Excerpt:
    """What is shown of a schedule.

    Attributes:
        parts: in order, without a tick in two of them.
        stages: in order.
        of: ticks and stages that there are.
        cells: passes over a microbatch and chunk that there are.
    """

    parts: tuple[Part, ...]
    stages: tuple[int, ...]
    of: tuple[int, int]
    cells: int

    @property
    def is_whole(self) -> bool:
        return self.of == (sum(part.past - part.first for part in self.parts), len(self.stages))

    def left_out(self) -> str:
        """In words; empty if nothing is."""
        ticks, stages = self.of[0] - sum(part.past - part.first for part in self.parts), self.of[1] - len(self.stages)
        words = [f"{ticks:,} of {self.of[0]:,} ticks"] * (ticks > 0)
        if stages:
            gap = next(a for a, b in zip(self.stages, self.stages[1:], strict=False) if b > a + 1)
            words.append(f"stages {gap + 1} to {gap + stages}")
        return " and ".join(words)


def excerpt(schedule: Schedule) -> Excerpt:
    """All of a schedule with few cells, and the parts of any other."""
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
    ticks = schedule.num_ticks
    filled, drains = int(backward[:, 0].argmax()), ticks - 1 - int(forward[::-1, 0].argmax())
    begins, ends = min(filled + 1, _MOST_TICKS, (ticks + 1) // 2), min(ticks - drains, _MOST_TICKS, ticks // 2)
    first, past = _middle(schedule, begins, ticks - ends)
    parts = [Part("warm-up", 0, begins), Part("cool-down", ticks - ends, ticks)]
    if first < past:
        steady = bool((forward & backward)[first:past].all())
        parts.insert(1, Part("steady" if steady else "middle", first, past))
    return parts


def _middle(schedule: Schedule, first: int, past: int) -> tuple[int, int]:
    """Of the ticks from `first` to before `past` those in which the first stage begins a group of as many microbatches
    as there are stages, in the middle of them; of a schedule that runs all forwards first, those where it turns."""
    forward, backward = schedule.forward, schedule.backward
    length = min(max(schedule.num_virtual, 8), _MOST_TICKS, past - first)
    last_forward = schedule.num_ticks - 1 - int(forward.active[::-1, -1].argmax())
    wanted = (first + past - length) // 2
    if (turn := int(backward.active[:, -1].argmax())) > last_forward:
        wanted = turn - length // 2
    else:
        begins = (forward.chunk[:, 0] == 0) & (forward.microbatch[:, 0] % schedule.num_stages == 0)
        if (groups := np.flatnonzero(begins)).size:
            wanted = int(groups[np.abs(groups - wanted).argmin()])
    wanted = min(max(wanted, first), past - length)
    return wanted, wanted + length

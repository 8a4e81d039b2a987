"""The sizes of the global batch in a run's steps: always the same, or growing with the samples drawn. No JAX here."""

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cache
from typing import Self


@dataclass(frozen=True)
class Stage:
    """Steps of one size, from `first_step` on."""

    first_step: int  # steps before it
    first_sample: int  # samples drawn before it
    size: int  # of its global batches


@dataclass(frozen=True)
class BatchSizes:
    """The stages of a run, in order, each of at least one step; the last one never ends.

    The samples that a step draws follow from its number alone: every sample is drawn once, in order, whatever the sizes
    are.
    """

    stages: tuple[Stage, ...]

    @classmethod
    @cache
    def of(cls, full: int, start: int = 0, increment: int = 0, samples: int = 0) -> Self:
        """Batches of `full` samples, or a ramp-up: batches start at `start` samples and grow by `increment` in equal
        intervals over the first `samples`, as Megatron-LM's `--rampup-batch-size start increment samples`.

        The size changes before the first step that begins in the next interval, so a size may be skipped.
        """
        if not start:
            return cls((Stage(0, 0, full),))
        assert 0 < start < full and (full - start) % increment == 0 and samples > 0
        parts = (full - start) // increment
        stages, step, drawn = [], 0, 0
        for part, size in enumerate(range(start, full, increment), start=1):
            end = -(-part * samples // parts)
            steps = max(0, -(-(end - drawn) // size))
            if steps:
                stages.append(Stage(step, drawn, size))
            step, drawn = step + steps, drawn + steps * size
        return cls((*stages, Stage(step, drawn, full)))

    @property
    def divisor(self) -> int:
        """The largest number that divides all sizes."""
        return math.gcd(*(stage.size for stage in self.stages))

    def at(self, step: int) -> Stage:
        """The stage of the step that follows `step` finished ones."""
        return self.stages[bisect_right(self.stages, step, key=lambda stage: stage.first_step) - 1]

    def first_sample(self, step: int) -> int:
        """How many samples `step` steps draw, which is the number of the next one."""
        stage = self.at(step)
        return stage.first_sample + (step - stage.first_step) * stage.size

    def steps(self, samples: int) -> int:
        """The fewest steps that draw this many samples."""
        place = bisect_right(self.stages, samples, key=lambda stage: stage.first_sample) - 1
        stage = self.stages[place]
        return stage.first_step - (stage.first_sample - samples) // stage.size

"""Batches of samples. Rows are numbered in the global batch; a process loads those that its devices need.

For every array of a sample, int32 [T], a batch has an array with R rows, int32 [R, T]. Global batches have a constant
size, or grow with the number of samples drawn.
"""

import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Self

import numpy as np
import numpy.typing as npt

from megajax.data.samples.base import EndlessSamples, Sample, Samples

Batch = dict[str, npt.NDArray[np.int32]]

_MAX_THREADS = 4


@dataclass(frozen=True)
class Stage:
    """Steps with the same batch size, from `first_step` on."""

    first_step: int  # number of steps before it
    first_sample: int  # number of samples drawn before it
    size: int  # of its global batches


@dataclass(frozen=True)
class BatchSizes:
    """The stages of a run, in order, each with at least one step; the last one never ends. Samples are drawn once each,
    in order, so a step's samples follow from its number alone."""

    stages: tuple[Stage, ...]

    @classmethod
    @cache
    def of(
        cls, full: int, start: int = 0, increment: int = 0, samples: int = 0, *, step: int = 0, drawn: int = 0
    ) -> Self:
        """Batches of `full` samples, or a ramp-up: batches begin with `start` samples and grow by `increment` in equal
        intervals over the first `samples`, as with Megatron-LM's `--rampup-batch-size start increment samples`.

        The size changes before the first step that starts in the next interval, so a size may be skipped. The first
        step may follow `step` others that have `drawn` samples.
        """
        if not start:
            return cls((Stage(step, drawn, full),))
        assert 0 < start < full and (full - start) % increment == 0 and samples > 0
        parts = (full - start) // increment
        stages = []
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

    def then(self, step: int, *sizes: int) -> "BatchSizes":
        """These sizes for `step` steps, then others, given as in `of`; a ramp-up counts all samples drawn before."""
        others = BatchSizes.of(*sizes, step=step, drawn=self.first_sample(step))
        return BatchSizes((*(stage for stage in self.stages if stage.first_step < step), *others.stages))

    def at(self, step: int) -> Stage:
        """The stage of the step that follows `step` finished ones."""
        return self.stages[bisect_right(self.stages, step, key=lambda stage: stage.first_step) - 1]

    def first_sample(self, step: int) -> int:
        """How many samples `step` steps draw, which is also the number of the next sample."""
        stage = self.at(step)
        return stage.first_sample + (step - stage.first_step) * stage.size

    def steps(self, samples: int) -> int:
        """The smallest number of steps that draw this many samples."""
        place = bisect_right(self.stages, samples, key=lambda stage: stage.first_sample) - 1
        stage = self.stages[place]
        return stage.first_step - (stage.first_sample - samples) // stage.size


def train_batches(
    samples: EndlessSamples, *, rows: Sequence[int], global_batch: int, start_step: int = 0, prefetch: int = 2
) -> Iterator[Batch]:
    """`growing_batches` with a constant size: the row at (step, row) is sample `step * global_batch + row`."""
    assert len(rows) and all(0 <= row < global_batch for row in rows), (rows, global_batch)
    sizes = BatchSizes.of(global_batch)
    return growing_batches(samples, sizes=sizes, rows_of=lambda _: rows, start_step=start_step, prefetch=prefetch)


def growing_batches(
    samples: EndlessSamples,
    *,
    sizes: BatchSizes,
    rows_of: Callable[[int], Sequence[int]],
    start_step: int = 0,
    prefetch: int = 2,
) -> Iterator[Batch]:
    """The batches of steps `start_step`, `start_step + 1`, …, without end.

    The row at (step, row) is always sample `sizes.first_sample(step) + row`. `rows_of` maps a step's number of rows to
    the rows to load, in the wanted order. Threads call it and prepare `prefetch` batches in advance; with 0 there are
    no threads.
    """

    def load(step: int) -> Batch:
        first = sizes.first_sample(step)
        wanted = rows_of(sizes.at(step).size)
        return _stack([samples[first + row] for row in wanted])

    return _prefetched(load, start_step, sys.maxsize, prefetch)


def evaluation_batches(
    samples: Samples, *, rows: Sequence[int], global_batch: int, limit: int = 0, prefetch: int = 2
) -> Iterator[Batch]:
    """All samples once, in order; rows after the last sample have only targets of -1. `rows` are the rows to load of
    each batch of `global_batch` rows, in the wanted order. There are at most `limit` batches (0: no limit)."""
    assert len(rows) and all(0 <= row < global_batch for row in rows), (rows, global_batch)
    padding = samples.form.padding(1, tokens=samples.sequence_length)
    no_sample = {name: array[0] for name, array in padding.items()}
    count = -(-len(samples) // global_batch)

    def load(batch: int) -> Batch:
        numbers = [batch * global_batch + row for row in rows]
        return _stack([samples[number] if number < len(samples) else no_sample for number in numbers])

    return _prefetched(load, 0, min(count, limit) if limit else count, prefetch)


def _stack(samples: list[Sample]) -> Batch:
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def _prefetched(load: Callable[[int], Batch], start: int, stop: int, prefetch: int) -> Iterator[Batch]:
    from grain import MapDataset, ReadOptions

    options = ReadOptions(num_threads=min(prefetch, _MAX_THREADS), prefetch_buffer_size=prefetch)
    batches = iter(MapDataset.range(start, stop).map(load).to_iter_dataset(options))
    try:
        yield from batches
    finally:
        batches.close()

"""A growing batch is Megatron-LM's, and draws the samples of one that does not grow."""

import itertools

import numpy as np
import pytest

from megajax.data.loader import BatchSizes, growing_batches

RAMPS = [
    (32, 8, 8, 96),
    (64, 4, 4, 1000),
    (64, 63, 1, 1),
    (1024, 16, 8, 300_000),  # Megatron-LM's own example
    (100, 10, 45, 7),  # a part is over before it began
    (12, 2, 5, 3),
]


def theirs(full: int, start: int, increment: int, samples: int, drawn: int) -> int:
    """The batch after so many samples, as Megatron-LM's help and code define it (num_microbatches_calculator.py)."""
    if drawn > samples:
        return full
    parts = (full - start) // increment
    return start + drawn * parts // samples * increment


@pytest.mark.parametrize("ramp", RAMPS, ids=str)
def test_every_step_has_megatron_s_size_and_the_next_samples(ramp: tuple[int, int, int, int]) -> None:
    sizes = BatchSizes.of(*ramp)
    drawn = 0
    for step in range(sizes.stages[-1].first_step + 5):
        assert sizes.first_sample(step) == drawn
        assert sizes.at(step).size == theirs(*ramp, drawn), step
        drawn += sizes.at(step).size
    assert sizes.at(10**9).size == ramp[0] and drawn > ramp[3]
    assert [stage.size for stage in sizes.stages] == sorted({stage.size for stage in sizes.stages})
    for samples in range(1, min(ramp[3] + 3 * ramp[0], 2000)):  # the steps that draw so many are the fewest
        steps = sizes.steps(samples)
        assert sizes.first_sample(steps - 1) < samples <= sizes.first_sample(steps)


def test_a_batch_that_does_not_grow() -> None:
    sizes = BatchSizes.of(6)
    assert len(sizes.stages) == 1 and sizes.divisor == 6
    assert [sizes.first_sample(step) for step in (0, 1, 10**7)] == [0, 6, 6 * 10**7]
    assert [sizes.steps(samples) for samples in (0, 1, 6, 7)] == [0, 1, 1, 2]


class Numbers:
    """Sample n is n."""

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        return {"tokens": np.array([number], np.int32)}


def test_no_sample_is_drawn_twice_or_left_out() -> None:
    """From any step, by two processes with other rows each, the samples are those of the order."""
    sizes = BatchSizes.of(12, 4, 4, 30)
    assert [sizes.at(step).size for step in range(6)] == [4, 4, 4, 4, 8, 8]

    def rows(start: int, first: int) -> list[list[int]]:
        """Of every step from one on, every second row."""
        batches = growing_batches(Numbers(), sizes=sizes, rows_of=lambda size: range(first, size, 2), start_step=start)
        return [batch["tokens"][:, 0].tolist() for batch in itertools.islice(batches, 9)]

    for start in (0, 3, 4, 5, 8):
        drawn = [sorted(even + odd) for even, odd in zip(rows(start, 0), rows(start, 1), strict=True)]
        first = sizes.first_sample(start)
        together = list(itertools.chain.from_iterable(drawn))
        assert together == list(range(first, first + len(together)))
        assert list(map(len, drawn)) == [sizes.at(step).size for step in range(start, start + 9)]

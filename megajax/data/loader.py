"""Batches of samples. Rows are numbered in the global batch; a process loads those that its devices need.

A batch has for every array of a sample, int32 [T], one of R rows, int32 [R, T].
"""

import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from megajax.data.batch_sizes import BatchSizes
from megajax.data.samples import EndlessSamples, Sample, Samples

Batch = dict[str, npt.NDArray[np.int32]]

_MAX_THREADS = 4


def train_batches(
    samples: EndlessSamples, *, rows: Sequence[int], global_batch: int, start_step: int = 0, prefetch: int = 2
) -> Iterator[Batch]:
    """`growing_batches` of a constant size: the row at (step, row) is sample `step * global_batch + row`."""
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
    """The batches of the steps `start_step`, `start_step + 1`, …, without end.

    The row at (step, row) is sample `sizes.first_sample(step) + row`, whatever `rows_of`, `start_step` and `prefetch`
    are.

    `rows_of` goes from a step's number of rows to the rows to load, in the order wanted; threads call it. They prepare
    `prefetch` batches in advance; with 0 there are no threads.
    """

    def load(step: int) -> Batch:
        first = sizes.first_sample(step)
        wanted = rows_of(sizes.at(step).size)
        return _stack([samples[first + row] for row in wanted])

    return _prefetched(load, start_step, sys.maxsize, prefetch)


def evaluation_batches(
    samples: Samples, *, rows: Sequence[int], global_batch: int, limit: int = 0, prefetch: int = 2
) -> Iterator[Batch]:
    """All samples once, in order; rows beyond the last sample have the target -1 throughout.

    The number of batches is the same for any `rows`: see `num_evaluation_batches`.

    `rows` are those to load of a batch of `global_batch` rows, in the order wanted. There are `limit` batches at most;
    0: all.
    """
    assert len(rows) and all(0 <= row < global_batch for row in rows), (rows, global_batch)
    padding = samples.form.padding(1, tokens=samples.sequence_length)
    no_sample = {name: array[0] for name, array in padding.items()}

    def load(batch: int) -> Batch:
        numbers = [batch * global_batch + row for row in rows]
        return _stack([samples[number] if number < len(samples) else no_sample for number in numbers])

    return _prefetched(load, 0, num_evaluation_batches(samples, global_batch=global_batch, limit=limit), prefetch)


def num_evaluation_batches(samples: Samples, *, global_batch: int, limit: int = 0) -> int:
    """Batches that `evaluation_batches` yields."""
    count = -(-len(samples) // global_batch)
    return min(count, limit) if limit else count


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

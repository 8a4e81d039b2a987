"""The row at (step, row) is the same whoever loads it, from wherever, however far ahead, and as the batch grows."""

import itertools
import threading

import numpy as np
import pytest

from megajax.core.batch import IGNORED
from megajax.data.samples.gpt import EvaluationSamples, TrainSamples
from megajax.data.samples.loader import BatchSizes, evaluation_batches, growing_batches, train_batches
from megajax.data.text.tokens import TokenDocuments

LENGTH = 8
DOCUMENTS = TokenDocuments.from_sequences(
    [[np.arange(40 * n, 40 * n + 10 + n, dtype=np.int32)] for n in range(30)], "corpus"
)
TRAIN = TrainSamples(DOCUMENTS, np.arange(30), sequence_length=LENGTH, seed=5)
EVALUATION = EvaluationSamples(DOCUMENTS, sequence_length=LENGTH)


def batches(count: int, **options):
    return list(itertools.islice(train_batches(TRAIN, **options), count))


def test_batches_follow_the_definition_over_epochs():
    steps = 3 * TRAIN.epoch_size // 6 + 2
    for step, batch in enumerate(batches(steps, rows=range(6), global_batch=6)):
        assert sorted(batch) == ["targets", "tokens"]
        for key, rows in batch.items():
            assert rows.shape == (6, LENGTH) and rows.dtype == np.int32 and rows.flags.c_contiguous
            assert (rows == [TRAIN[step * 6 + row][key] for row in range(6)]).all()


@pytest.mark.parametrize("prefetch", [0, 1, 2, 7])
@pytest.mark.parametrize("start_step", [0, 3, 10_000_000])
@pytest.mark.parametrize("rows", [[0], [5, 0, 3], range(3, 6), [2, 2]], ids=str)
def test_any_part_of_the_batch_from_any_step(rows, start_step, prefetch):
    whole = batches(5, rows=range(6), global_batch=6, start_step=start_step, prefetch=2)
    part = batches(4, rows=rows, global_batch=6, start_step=start_step + 1, prefetch=prefetch)
    for expected, found in zip(whole[1:], part, strict=True):
        for key in "tokens", "targets":
            assert (found[key] == expected[key][list(rows)]).all()


@pytest.mark.parametrize("global_batch, prefetch", [(1, 0), (4, 2), (7, 3), (1000, 2)])
def test_evaluation_covers_every_sample_once(global_batch, prefetch):
    """Whatever rows of a batch are asked for, there are as many batches."""
    form = {"global_batch": global_batch, "prefetch": prefetch}
    found = list(evaluation_batches(EVALUATION, rows=range(global_batch), **form))
    assert len(found) == -(-len(EVALUATION) // global_batch)
    tokens, targets = (np.concatenate([batch[name] for batch in found]) for name in ("tokens", "targets"))
    expected = np.concatenate([document[:] for document in map(DOCUMENTS.document, range(30))])[1:]
    assert (targets[targets != IGNORED] == expected).all() and (targets[len(EVALUATION) :] == IGNORED).all()
    assert tokens.dtype == targets.dtype == np.int32 and (tokens >= 0).all()
    for limit in 3, 10**6:
        last_row = list(evaluation_batches(EVALUATION, rows=[global_batch - 1], limit=limit, **form))
        assert len(last_row) == min(limit, len(found))
        for batch, whole in zip(last_row, found, strict=False):
            assert (batch["targets"] == whole["targets"][-1:]).all()


def test_a_batch_has_whatever_arrays_its_samples_have():
    """Positions of training and of evaluation; a row beyond the last sample has zeros."""
    options = {"sequence_length": LENGTH, "with_positions": True}
    train = TrainSamples(DOCUMENTS, np.arange(30), seed=5, **options)
    evaluation = EvaluationSamples(DOCUMENTS, **options)
    first = next(train_batches(train, rows=[1, 0], global_batch=2))
    (whole,) = evaluation_batches(evaluation, rows=range(100), global_batch=100)
    for batch, numbers, samples in (first, [1, 0], train), (whole, range(len(evaluation)), evaluation):
        assert sorted(batch) == ["positions", "targets", "tokens"]
        expected = np.stack([samples[number]["positions"] for number in numbers])
        assert expected.any() and (batch["positions"][: len(expected)] == expected).all()
    assert whole["positions"].shape == (100, LENGTH) and not whole["positions"][len(evaluation) :].any()


def test_threads_end_with_the_iterator():
    def prefetching():
        return [thread for thread in threading.enumerate() if "grain" in thread.name]

    iterator = train_batches(TRAIN, rows=range(6), global_batch=6, prefetch=4)
    next(iterator)
    assert prefetching()
    iterator.close()
    for thread in prefetching():
        thread.join(timeout=30)
    assert not prefetching()


def test_an_error_while_loading_reaches_the_caller():
    class Broken:
        sequence_length = LENGTH

        def __getitem__(self, number):
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        next(train_batches(Broken(), rows=[0], global_batch=1))


@pytest.mark.parametrize(
    "ramp",
    [
        (32, 8, 8, 96),
        (64, 4, 4, 1000),
        (64, 63, 1, 1),
        (1024, 16, 8, 300_000),  # Megatron-LM's own example
        (100, 10, 45, 7),  # a part is over before it began
        (12, 2, 5, 3),
    ],
    ids=str,
)
def test_every_step_has_megatron_s_size_and_the_next_samples(ramp: tuple[int, int, int, int]) -> None:
    """As Megatron-LM's help and code define it (num_microbatches_calculator.py)."""
    sizes, drawn = BatchSizes.of(*ramp), 0
    full, start, increment, growing = ramp
    for step in range(sizes.stages[-1].first_step + 5):
        assert sizes.first_sample(step) == drawn
        theirs = start + drawn * ((full - start) // increment) // growing * increment
        assert sizes.at(step).size == (full if drawn > growing else theirs), step
        drawn += sizes.at(step).size
    assert sizes.at(10**9).size == full and drawn > growing
    assert [stage.size for stage in sizes.stages] == sorted({stage.size for stage in sizes.stages})
    for samples in range(1, min(growing + 3 * full, 2000)):  # the steps that draw so many are the fewest
        steps = sizes.steps(samples)
        assert sizes.first_sample(steps - 1) < samples <= sizes.first_sample(steps)


def test_a_batch_that_does_not_grow() -> None:
    sizes = BatchSizes.of(6)
    assert len(sizes.stages) == 1 and sizes.divisor == 6
    assert [sizes.first_sample(step) for step in (0, 1, 10**7)] == [0, 6, 6 * 10**7]
    assert [sizes.steps(samples) for samples in (0, 1, 6, 7)] == [0, 1, 1, 2]


def test_no_sample_is_drawn_twice_or_left_out() -> None:
    """From any step, by two processes with other rows each, the samples are those of the order."""
    sizes = BatchSizes.of(12, 4, 4, 30)
    samples = [{"tokens": np.array([number], np.int32)} for number in range(200)]
    assert [sizes.at(step).size for step in range(6)] == [4, 4, 4, 4, 8, 8]

    def rows(start: int, first: int) -> list[list[int]]:
        """Of every step from one on, every second row."""
        batches = growing_batches(samples, sizes=sizes, rows_of=lambda size: range(first, size, 2), start_step=start)
        return [batch["tokens"][:, 0].tolist() for batch in itertools.islice(batches, 9)]

    for start in (0, 3, 4, 5, 8):
        drawn = [sorted(even + odd) for even, odd in zip(rows(start, 0), rows(start, 1), strict=True)]
        first = sizes.first_sample(start)
        together = list(itertools.chain.from_iterable(drawn))
        assert together == list(range(first, first + len(together)))
        assert list(map(len, drawn)) == [sizes.at(step).size for step in range(start, start + 9)]

"""The row at (step, row) is the same whoever loads it, from wherever, however far ahead."""

import itertools
import threading

import numpy as np
import pytest

from megajax.batch import IGNORED
from megajax.data.gpt import EvaluationSamples, TrainSamples
from megajax.data.loader import evaluation_batches, train_batches
from megajax.data.tokens import TokenDocuments

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


def test_the_global_batch_regroups_the_same_samples():
    small = batches(12, rows=range(2), global_batch=2)
    large = batches(4, rows=range(6), global_batch=6)
    for key in "tokens", "targets":
        assert (np.concatenate([b[key] for b in small]) == np.concatenate([b[key] for b in large])).all()


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


@pytest.mark.parametrize("rows", [[], [6], [-1]], ids=str)
def test_rows_lie_in_the_batch(rows):
    for function, samples in (train_batches, TRAIN), (evaluation_batches, EVALUATION):
        with pytest.raises(AssertionError):
            function(samples, rows=rows, global_batch=6)

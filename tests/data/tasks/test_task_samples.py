"""Samples by the task's name, the order of epochs, and the split by contexts."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from real_records import letters

from megajax.core.errors import UserError
from megajax.data.samples.loader import evaluation_batches, train_batches
from megajax.data.tasks.records import Answer, Exam, Pair, Question
from megajax.data.tasks.registry import TASKS, TaskConfig
from megajax.data.tasks.samples import EpochOrder, shared_contexts, split_by_context, task_samples

TOKENIZER = letters()
PAIR = Pair("0", ("a b", "c"), 1)
RECORDS = {
    "classes": PAIR,
    "span": Question("0", "a", "b c d", (Answer("c", 2),)),
    "choice": Exam("0", "a b", "c _", ("d", "e"), 1),
}


def make(name, records, training=True, **config):
    return task_samples(
        name, records, TOKENIZER, sequence_length=12, config=TaskConfig(doc_stride=2, **config), training=training
    )


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.head in RECORDS])
def test_every_task(name):
    record = RECORDS[TASKS[name].head]
    unknown = {"answers": (Answer("c", -1),)} if TASKS[name].head == "span" else {"label": None}
    records = [record, dataclasses.replace(record, **unknown), record]
    train, dev = make(name, records), make(name, records, training=False)
    assert len(train) == 2 and train.records == [record, record]
    assert len(dev) == 3 and list(dev.records) == records
    assert [count for what, count in train.counts.items() if "left out" in what] == [1] and not dev.counts
    (batch,) = evaluation_batches(dev, rows=range(4), global_batch=4)
    (target,) = dev.form.targets.values()
    assert (batch[target] >= 0).tolist() == [True, False, True, False]
    assert next(iter(train_batches(EpochOrder(train, 0), rows=range(4), global_batch=4)))[target].min() >= 0
    with pytest.raises(UserError, match=r"^--data\.train: none of its 1 records has an? [a-z ]+; valid: at least one"):
        make(name, records[1:2])


def test_the_configuration_is_heeded():
    exam = RECORDS["choice"]
    assert make("race", [exam], option_tokens=1)[0]["token_types"][0].argmax() == 3
    question = dataclasses.replace(RECORDS["span"], text="a a a")
    assert make("squad2", [question], question_tokens=1)[0]["token_types"].argmax() == 3


def test_every_epoch_is_another_permutation():
    pairs = [Pair(str(number), (letter, "z"), 0) for number, letter in enumerate("abcdefghijklmnopqrstuvwxy")]
    samples = make("qqp", pairs)
    order = EpochOrder(samples, 7)
    assert (order.sequence_length, order.epoch_size) == (12, 25)
    expected = sorted(int(samples[number]["tokens"][1]) for number in range(25))

    def tokens(order, numbers):
        return [int(order[number]["tokens"][1]) for number in numbers]

    epochs = [tokens(order, range(25 * epoch, 25 * (epoch + 1))) for epoch in range(6)]
    assert all(sorted(epoch) == expected for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6 and expected not in epochs
    numbers = [149, 3, 60, 3, 0]
    assert tokens(EpochOrder(samples, 7), numbers) == [epochs[number // 25][number % 25] for number in numbers]
    assert tokens(EpochOrder(samples, 8), range(150)) != tokens(order, range(150))
    # A resumed run must see what it would have seen: this may not change, in any version of NumPy or Grain.
    assert "".join(TOKENIZER.decode([token]) for token in epochs[1]) == "mdiprfhsjkwoyeulqatnvgbcx"


@given(st.lists(st.integers(1, 9), min_size=2, max_size=30), st.floats(0.05, 0.95), st.integers(0, 10**12))
def test_contexts_stay_whole(sizes, fraction, seed):
    entries = [Pair(f"{n}-{k}", (f"text {n}", "b"), 0) for n, size in enumerate(sizes) for k in range(size)]
    entries = entries[::2] + entries[1::2]
    train, dev = split_by_context(entries, fraction, seed)
    assert train and dev and shared_contexts(train, dev) == 0
    assert sorted(train + dev, key=entries.index) == entries
    assert train == sorted(train, key=entries.index) and dev == sorted(dev, key=entries.index)
    assert len(dev) <= fraction * len(entries) + max(sizes) / 2 or min(sizes) > fraction * len(entries)
    assert (train, dev) == split_by_context(entries, fraction, seed)


def test_what_cannot_be_split():
    with pytest.raises(UserError, match=r"^--data\.train: its 3 records have 1 different .*; valid: 2 or more"):
        split_by_context([PAIR] * 3, 0.5, 0)
    with pytest.raises(UserError, match="its 0 records have 0 different"):
        split_by_context([], 0.5, 0)
    assert shared_contexts([], [PAIR]) == 0 and shared_contexts([PAIR], [PAIR, PAIR]) == 2
    entries = [Pair(str(number), (str(number), "b"), 0) for number in range(40)]  # nor may what is held out change
    assert [int(each.name) for each in split_by_context(entries, 0.15, 5)[1]] == [3, 5, 17, 26, 29, 35]

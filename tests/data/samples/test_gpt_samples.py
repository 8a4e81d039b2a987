"""Splits and samples against the plain definition: documents joined, cut, each token predicted once."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.core.batch import IGNORED
from megajax.core.errors import UserError
from megajax.data.samples.gpt import (
    ContinuationSamples,
    EvaluationSamples,
    TrainSamples,
    split_documents,
    train_and_validation,
)
from megajax.data.text.tokens import TokenDocuments


def corpus(lengths: list[int]) -> TokenDocuments:
    """Documents whose ids are all different, so that every token can be recognised."""
    ids = np.arange(sum(lengths), dtype=np.int32)
    return TokenDocuments.from_sequences([[part] for part in np.split(ids, np.cumsum(lengths)[:-1])], "corpus.bin")


LENGTHS = [int(length) for length in np.random.default_rng(0).integers(0, 60, 200)]
CORPUS = corpus(LENGTHS)
TRAIN = np.flatnonzero(np.arange(200) % 10)
LENGTH = 16


def train_samples(**change) -> TrainSamples:
    return TrainSamples(**({"documents": CORPUS, "numbers": TRAIN, "sequence_length": LENGTH, "seed": 7} | change))


def windows(samples: TrainSamples, numbers) -> list[tuple[int, ...]]:
    """The T + 1 tokens of samples."""
    found = []
    for number in numbers:
        sample = samples[number]
        assert sample["tokens"].dtype == sample["targets"].dtype == np.int32
        assert sample["tokens"].shape == sample["targets"].shape == (LENGTH,)
        assert (sample["tokens"][1:] == sample["targets"][:-1]).all()
        found.append((*sample["tokens"].tolist(), int(sample["targets"][-1])))
    return found


def test_the_documents_of_a_samples_targets():
    samples = train_samples()
    for number in range(2 * samples.epoch_size):
        targets, parts = samples[number]["targets"], samples.parts(number)
        assert [span.start for _, span in parts] == [0, *(span.stop for _, span in parts[:-1])]
        for begin, span in parts:
            document = int(np.searchsorted(CORPUS.document_offsets, begin, side="right")) - 1
            assert {*targets[span].tolist()} <= {*CORPUS.document(document).tolist()}
        assert parts[-1][1].stop == LENGTH


def test_an_epoch_is_the_joined_documents_cut_with_one_token_shared():
    samples = train_samples()
    num_tokens = sum(LENGTHS[number] for number in TRAIN)
    assert samples.epoch_size == (num_tokens - 1) // LENGTH
    epoch = windows(samples, range(samples.epoch_size))
    next_of = {window[0]: window for window in epoch}
    assert len(next_of) == len(epoch)
    (first,) = set(next_of) - {window[-1] for window in epoch}
    joined = [first]
    while joined[-1] in next_of:
        joined += next_of[joined[-1]][1:]
    assert len(joined) == samples.epoch_size * LENGTH + 1
    assert len(set(joined)) == len(joined)
    # whole training documents in some order, but for the end of the last ones
    position, seen = 0, []
    while position < len(joined):
        number = int(np.searchsorted(CORPUS.document_offsets, joined[position], side="right")) - 1
        document = CORPUS.document(number).tolist()[: len(joined) - position]
        assert joined[position : position + len(document)] == document
        position += len(document)
        seen.append(number)
    assert set(seen) <= set(TRAIN.tolist())
    assert seen != sorted(seen)


def test_epochs_differ_and_each_is_in_a_random_order():
    samples = train_samples()
    size = samples.epoch_size
    first, second = windows(samples, range(size)), windows(samples, range(size, 2 * size))
    assert set(first) != set(second)  # documents are joined in another order
    for epoch in first, second:
        tokens = [token for window in epoch for token in window[:-1]]
        assert len(set(tokens)) == len(tokens)
    follows = sum(a[-1] == b[0] for a, b in itertools.pairwise(first))
    assert follows < 0.1 * size


def test_a_sample_is_a_pure_function_of_seed_and_number():
    numbers = np.random.default_rng(1).integers(0, 10 * train_samples().epoch_size, 60).tolist()
    one = train_samples()
    forwards = windows(one, numbers)
    assert windows(one, numbers[::-1])[::-1] == forwards
    assert [windows(train_samples(), [number])[0] for number in numbers[:5]] == forwards[:5]
    for seed in 8, 2**80, 2**80 + 1:
        assert windows(train_samples(seed=seed), numbers) != forwards
        forwards = windows(train_samples(seed=seed), numbers)


def test_golden_samples():
    """A resumed run must see the samples it would have seen: these may not change, in any version of NumPy or Grain."""
    first_tokens = [window[0] for window in windows(train_samples(), [0, 1, 2, 1000, 10**9])]
    assert first_tokens == [5410, 2526, 2577, 6237, 211]
    validation = split_documents(CORPUS, validation_fraction=0.03, seed=7)[2]
    assert validation.tolist() == [54, 56, 133, 145, 147]


@pytest.mark.parametrize("num_tokens, size", [(LENGTH + 1, 1), (2 * LENGTH, 1), (2 * LENGTH + 1, 2)])
def test_smallest_epochs(num_tokens, size):
    samples = TrainSamples(corpus([num_tokens]), np.array([0]), sequence_length=LENGTH, seed=0)
    assert samples.epoch_size == size
    assert len(set(windows(samples, range(5 * size)))) == size


@settings(max_examples=20)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12), sequence_length=st.integers(1, 50))
def test_positions_count_from_the_beginning_of_every_document(lengths, sequence_length):
    """Those of the window's first document from the window's first token; tokens and targets are as without them."""
    documents = corpus([*lengths, 51])
    beginnings = {int(documents.document(number)[0]) for number, length in enumerate([*lengths, 51]) if length}
    for kind, form in (EvaluationSamples, {}), (TrainSamples, {"numbers": np.arange(len(lengths) + 1), "seed": 1}):
        form["sequence_length"] = sequence_length
        samples, plain = kind(documents, with_positions=True, **form), kind(documents, **form)
        for number in range(min(len(samples), 50) if kind is EvaluationSamples else 5):
            sample, expected = samples[number], []
            counted = sample["targets"] != IGNORED
            for token in sample["tokens"][counted].tolist():
                expected.append(0 if not expected or token in beginnings else expected[-1] + 1)
            positions = sample.pop("positions")
            assert positions.dtype == np.int32 and positions.shape == (sequence_length,)
            assert positions[counted].tolist() == expected and not positions[~counted].any()
            assert sample.keys() == plain[number].keys()
            assert all((array == plain[number][name]).all() for name, array in sample.items())


@given(
    lengths=st.lists(st.integers(0, 100), min_size=2, max_size=60).filter(
        lambda lengths: np.count_nonzero(lengths) >= 2
    ),
    fraction=st.floats(0.001, 0.999),
    seed=st.integers(0, 2**64),
)
def test_split_is_a_partition_with_text_on_both_sides(lengths, fraction, seed):
    documents, train, validation = split_documents(corpus(lengths), validation_fraction=fraction, seed=seed)
    assert sorted([*train, *validation]) == list(range(documents.num_documents))
    assert (np.diff(train) > 0).all() and (np.diff(validation) > 0).all()
    lengths_d = np.diff(documents.document_offsets)
    assert lengths_d.sum() == sum(lengths) and lengths_d[train].sum() > 0
    assert 0 < lengths_d[validation].sum() <= max(2, 1.5 * fraction * sum(lengths) + 1)
    again = split_documents(corpus(lengths), validation_fraction=fraction, seed=seed)
    assert again[2].tolist() == validation.tolist()


@pytest.mark.parametrize("fraction", [0.03, 0.1, 0.5])
def test_validation_share(fraction):
    splits = [split_documents(CORPUS, validation_fraction=fraction, seed=seed)[2] for seed in range(20)]
    for validation in splits:
        share = sum(LENGTHS[number] for number in validation) / CORPUS.num_tokens
        assert share == pytest.approx(fraction, abs=30 / CORPUS.num_tokens)  # half of the longest document
    assert len(set(map(tuple, splits))) == 20


@pytest.mark.parametrize(
    "lengths, validation", [([1000, 10, 10], {(1000, 1010), (1010, 1020)}), ([500, 500], {(480, 500), (980, 1000)})]
)
def test_long_documents_are_trained_on(lengths, validation):
    """If all are long, all but the end of the shortest: two books do not lose one."""
    held_out = set()
    for seed in range(20):
        documents, _, numbers = split_documents(corpus(lengths), validation_fraction=0.02, seed=seed)
        held_out |= {tuple(documents.document_offsets[number : number + 2].tolist()) for number in numbers}
    assert held_out == validation


def test_a_cut_between_sentences():
    """Of a document of several, at the end that is nearest."""
    sentences = [np.arange(size, dtype=np.int32) for size in (4, 3, 5, 2)]
    documents = TokenDocuments.from_sequences([sentences[:1], sentences[1:]], "corpus").cut(1, 11)
    assert documents.document_offsets.tolist() == [0, 4, 12, 14] and documents.document_index.tolist() == [0, 1, 3, 4]
    assert documents.sequence_lengths.tolist() == [4, 3, 5, 2]
    documents = documents.cut(0, 1)
    assert documents.document_index.tolist() == [0, 1, 2, 4, 5]
    assert documents.sequence_lengths.tolist() == [1, 3, 3, 5, 2]


def test_splits_share_no_token():
    options = {"sequence_length": LENGTH, "validation_fraction": 0.1, "seed": 3}
    assert all("positions" in samples[0] for samples in train_and_validation(CORPUS, with_positions=True, **options))
    train, validation = train_and_validation(CORPUS, **options)
    trained = {token for window in windows(train, range(3 * train.epoch_size)) for token in window}
    validated = {int(token) for number in range(len(validation)) for token in validation[number]["targets"]}
    assert not trained & (validated - {IGNORED})
    assert len(trained) + validation.num_targets + 1 == pytest.approx(CORPUS.num_tokens, abs=LENGTH)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 50), st.data())
def test_windows_predict_every_token_once_from_all_they_can(lengths, sequence_length, data):
    """Every window after the first begins `overlap` tokens later and counts its last `overlap` targets, so that they
    follow at least T - `overlap` others; 0 stands for T."""
    given, documents = data.draw(st.integers(0, sequence_length)), corpus([*lengths, 2])
    samples = EvaluationSamples(documents, sequence_length=sequence_length, overlap=given)
    overlap, predicted = given or sequence_length, []
    for number in range(len(samples)):
        sample, start = samples[number], number * overlap
        assert sample["tokens"].shape == sample["targets"].shape == (sequence_length,)
        positions = np.flatnonzero(sample["targets"] != IGNORED)
        assert positions[0] == (sequence_length - overlap if number else 0) and (np.diff(positions) == 1).all()
        assert (sample["tokens"][: positions[-1] + 1] == start + np.arange(positions[-1] + 1)).all()
        assert (sample["targets"][positions] == start + positions + 1).all()
        predicted += sample["targets"][positions].tolist()
    assert predicted == list(range(1, documents.num_tokens)) and samples.num_targets == len(predicted)


def test_texts_that_do_not_do():
    for lengths in [], [100], [0, 100, 0]:
        with pytest.raises(UserError, match=rf"corpus\.bin has {min(len(lengths), 1)} of the 2 documents that"):
            split_documents(corpus(lengths), validation_fraction=0.1, seed=0)
    options = {"sequence_length": LENGTH, "validation_fraction": 0.3, "seed": 0}
    for train, validation in (LENGTH, 5), (LENGTH + 1, 1):
        message = rf"too short: it has {train} training tokens and {validation} for validation; valid: at least 17 "
        with pytest.raises(UserError, match=message):
            train_and_validation(corpus([train, validation]), **options)
    train_and_validation(corpus([LENGTH + 1, 2]), **options)
    for length in 0, 1:
        with pytest.raises(UserError, match=rf"corpus\.bin has {length} tokens; valid: at least 2"):
            EvaluationSamples(corpus([length]), sequence_length=4)


LONGEST = 10


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), max_size=5))
def test_every_end_is_predicted_once(sizes):
    """A sequence has ids that are all different; those of `first` and after are predicted, each from what follows on
    what stands before it, and from the last tokens that fit where the end fits into one window."""
    sequences = [(list(range(100 * n, 100 * n + first + length)), first) for n, (first, length) in enumerate(sizes)]
    samples, found = ContinuationSamples(sequences, sequence_length=LONGEST), []
    for number, owner in enumerate(samples.owners):
        tokens, targets = samples[number]["tokens"], samples[number]["targets"]
        assert tokens.shape == targets.shape == (samples.sequence_length,)
        assert tokens.dtype == targets.dtype == np.int32
        ids, first = sequences[owner]
        for position in np.flatnonzero(targets != IGNORED):
            before, token = tokens[: position + 1].tolist(), int(targets[position])
            assert before == list(range(token - len(before), token)) and before[0] >= 100 * owner
            if len(ids) - first <= LONGEST:
                assert before[0] == max(ids[0], ids[-1] - LONGEST)
            found.append((owner, token))
    assert found == [(n, token) for n, (ids, first) in enumerate(sequences) for token in ids[first:]]


@pytest.mark.parametrize(("lengths", "size"), [([2], 1), ([3, 2], 2), ([6], 8), ([4, 9], 8), ([11], 10), ([300], 10)])
def test_windows_are_no_longer_than_needed(lengths, size):
    """A power of two, so that few lengths are compiled; the model's own is the most."""
    samples = ContinuationSamples([(list(range(length)), 1) for length in lengths], sequence_length=LONGEST)
    assert samples.sequence_length == size


@pytest.mark.peer
@pytest.mark.parametrize("length", [1, 9, 10, 11, 25, 40])
def test_whole_texts_are_cut_as_the_harness_does(length):
    utils = pytest.importorskip("lm_eval.utils", reason="the extra `eval` is not installed")
    ids = list(range(1, length + 1))
    samples = ContinuationSamples([([0, *ids], 1)], sequence_length=LONGEST)
    windows = list(utils.get_rolling_token_windows(ids, prefix_token=0, max_seq_len=LONGEST, context_len=1))
    assert len(samples) == len(windows)
    for number, (inputs, predicted) in enumerate(windows):
        sample = samples[number]
        assert sample["tokens"][: len(inputs)].tolist() == inputs
        assert sample["targets"][sample["targets"] != IGNORED].tolist() == predicted

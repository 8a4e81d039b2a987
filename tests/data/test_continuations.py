"""Ends of sequences: each token predicted once, after as many others as fit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megajax.batch import IGNORED
from megajax.data.gpt import ContinuationSamples

LONGEST = 10


def predictions(samples: ContinuationSamples) -> list[tuple[int, list[int], int]]:
    """Owner of every predicted token, the tokens before it in its window, and the token."""
    found = []
    for number, owner in enumerate(samples.owners):
        tokens, targets = samples[number]["tokens"], samples[number]["targets"]
        assert tokens.shape == targets.shape == (samples.sequence_length,)
        assert tokens.dtype == targets.dtype == np.int32
        for position in np.flatnonzero(targets != IGNORED):
            found.append((owner, tokens[: position + 1].tolist(), int(targets[position])))
    return found


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), max_size=5))
def test_every_end_is_predicted_once(sizes):
    """A sequence has ids that are all different; those of `first` and after are predicted, each from what follows on
    what stands before it, and from the last tokens that fit where the end fits into one window."""
    sequences = [(list(range(100 * n, 100 * n + first + length)), first) for n, (first, length) in enumerate(sizes)]
    samples = ContinuationSamples(sequences, sequence_length=LONGEST)
    found = predictions(samples)
    wanted = [(n, token) for n, (ids, first) in enumerate(sequences) for token in ids[first:]]
    assert [(owner, token) for owner, _, token in found] == wanted
    for owner, before, token in found:
        assert before == list(range(token - len(before), token)) and before[0] >= 100 * owner
        ids, first = sequences[owner]
        if len(ids) - first <= LONGEST:
            assert before[0] == max(ids[0], ids[-1] - LONGEST)


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

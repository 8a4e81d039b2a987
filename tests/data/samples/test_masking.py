"""Masking of single samples, by its properties; its statistics are in test_pairs.py."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import full

from megajax.core.batch import most_masked
from megajax.core.errors import UserError
from megajax.data.samples.base import Bits, hashed, key_of
from megajax.data.samples.masking import WordPieces, masked
from megajax.data.text.tokenizers import train_tokenizer, wordpiece

WORDS = [f"w{n}" for n in range(40)]
TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *(f"##{word}" for word in WORDS)]
PIECES = WordPieces.of(wordpiece({token: number for number, token in enumerate(TOKENS)}))
SPECIAL = (2, 3)


@settings(max_examples=200, deadline=None)
@given(
    segments=st.lists(st.lists(st.integers(5, 84), min_size=1, max_size=40), min_size=1, max_size=2),
    key=st.integers(0, 2**70),
)
def test_any_sample(segments, key):
    """Words are chosen as a whole, within a segment; what is not chosen stays; what is chosen is the target."""
    ids = [2, *(token for segment in segments for token in [*segment, 3])]
    tokens_N = np.array(ids, np.int32)
    special_N = np.isin(tokens_N, SPECIAL)
    found = masked(tokens_N, special_N, PIECES, Bits(key_of(key)))
    again = masked(tokens_N, special_N, PIECES, Bits(key_of(key)))
    for one, other in zip(found[:3], again[:3], strict=True):
        assert (one == other).all() and one.dtype == np.int32
    assert (np.diff(found.places) > 0).all()
    chosen_N = np.isin(np.arange(len(ids)), found.places)
    begins = [place for place in range(len(ids)) if special_N[place] or special_N[place - 1] or ids[place] < 45]
    sizes = [end - begin for begin, end in itertools.pairwise(begins) if not special_N[begin]]
    assert chosen_N.any() == (min(sizes) <= most_masked(len(ids))) and not (chosen_N & special_N).any()
    assert (found.targets == tokens_N[chosen_N]).all()
    assert (found.tokens[~chosen_N] == tokens_N[~chosen_N]).all()
    assert not np.isin(found.tokens[chosen_N], [0, 1, 2, 3]).any()
    inner = ~special_N[1:] & ~special_N[:-1] & PIECES.continues[tokens_N[1:]]
    assert (chosen_N[1:] == chosen_N[:-1])[inner].all()
    covered = np.zeros(len(ids), int)
    for begin, end, count in found.spans:
        covered[begin:end] += 1
        starts = [begin, *(place for place in range(begin + 1, end) if not PIECES.continues[ids[place]])]
        assert len(starts) == count <= 3 and not special_N[begin:end].any()
    assert (covered == chosen_N).all()
    largest = max((end - begin for begin, end, _ in found.spans), default=0)
    assert chosen_N.sum() <= min(max(1, 0.15 * len(ids)) + largest, most_masked(len(ids)))


@pytest.mark.parametrize("length", [4, full(13), 27, full(125), 510])
def test_the_expected_number_is_the_budget(length):
    """Also where no whole number of words has 15%: words of one to three pieces; but one is always chosen."""
    rng = np.random.default_rng(length)
    counts = []
    for number in range(2000):
        ids = np.where(rng.random(length - 2) < 0.3, 60, 6)
        tokens_N = np.array([2, *ids, 3], np.int32)
        found = masked(tokens_N, np.isin(tokens_N, SPECIAL), PIECES, Bits(key_of(1), number))
        counts.append(len(found.targets))
    error = np.std(counts) / 2000**0.5
    expected = 0.15 * length
    if expected >= 4:
        assert np.mean(counts) == pytest.approx(expected, abs=4 * error)
    else:
        assert 1 <= np.mean(counts) < expected + 1.2


def test_every_word_is_as_likely():
    """But for those at the borders of segments, where fewer runs of words have room."""
    tokens_N = np.array([2, *range(5, 45), 3], np.int32)
    times = np.zeros(42)
    for number in range(4000):
        times[masked(tokens_N, np.isin(tokens_N, SPECIAL), PIECES, Bits(key_of(2), number)).places] += 1
    share = times[3:-3] / 4000
    assert share == pytest.approx(share.mean(), abs=0.025)


def test_vocabularies():
    assert (PIECES.cls, PIECES.sep, PIECES.mask, PIECES.pad) == (2, 3, 4, 0)
    assert np.flatnonzero(PIECES.continues).tolist() == list(range(45, 85))
    assert PIECES.replacements.tolist() == list(range(5, 85))
    unmasked = wordpiece({"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "a": 4})
    without_words = wordpiece({token: number for number, token in enumerate(TOKENS[:5])})
    for tokenizer, problem in (
        (unmasked, r"x has no \[MASK\]; valid: a WordPiece vocabulary"),
        (train_tokenizer(["words"] * 9, 260), r"x has no \[CLS\] and no \[SEP\] and no \[MASK\] and no \[PAD\]; valid"),
        (without_words, "x has only special tokens"),
        (None, "x is missing, which whole-word masking"),
    ):
        with pytest.raises(UserError, match=problem):
            WordPieces.of(tokenizer, "x")


def test_golden_bits():
    """They may not change, in any version of NumPy. The first are what splitmix64 gives from the state 0."""
    reference = [16294208416658607535, 7960286522194355700, 487617019471545679]
    assert hashed(np.arange(1, 4, dtype=np.uint64)).tolist() == reference
    bits = Bits(key_of(1), 2)
    assert [bits.below(1000) for _ in range(4)] == [993, 516, 984, 999]
    assert [bits.happens(0.5) for _ in range(4)] == [True, True, True, False]
    assert bits.raw(1).dtype == np.uint64

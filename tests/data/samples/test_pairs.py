"""BERT's samples: every one against the text it is from, and the statistics of many."""

import hashlib
import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megajax.core.batch import IGNORED, pairs_form
from megajax.core.errors import UserError
from megajax.data.samples import pairs
from megajax.data.samples.base import Bits, key_of
from megajax.data.samples.loader import evaluation_batches
from megajax.data.samples.masking import WordPieces
from megajax.data.samples.pairs import EvaluationPairs, TrainPairs, train_and_validation
from megajax.data.text.indexed import IndexedDataset, IndexedWriter
from megajax.data.text.tokenizers import wordpiece

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
NUM_WORDS = 60_000
TOKENS = [*SPECIAL, *(f"w{n}" for n in range(NUM_WORDS)), *(f"##w{n}" for n in range(100))]
PIECES = WordPieces.of(wordpiece({token: number for number, token in enumerate(TOKENS)}))
LENGTH = 32


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> IndexedDataset:
    """300 documents of up to 16 sentences. Every id stands once, so that each token tells where it is from."""
    rng = np.random.default_rng(0)
    ids = iter(range(5, 5 + NUM_WORDS))
    prefix = tmp_path_factory.mktemp("pairs") / "m"
    with IndexedWriter(prefix, len(TOKENS)) as writer:
        for _ in range(300):
            sizes = rng.integers(0, 25, rng.integers(0, 17)).tolist()
            writer.add_document(*(list(itertools.islice(ids, size)) for size in sizes))
    return IndexedDataset(prefix)


def train_pairs(documents, **change) -> TrainPairs:
    form = {"numbers": np.arange(0, 290), "sequence_length": LENGTH, "seed": 7, "vocabulary": PIECES}
    return TrainPairs(documents, **form | change)


def original(sample) -> np.ndarray:
    """The tokens of a sample before they were masked."""
    ids, there = sample["tokens"].copy(), sample["targets"] != IGNORED
    ids[sample["places"][there]] = sample["targets"][there]
    return ids[: sample["length"]]


def segments(sample) -> list[list[int]]:
    """What is between the special tokens."""
    ids = original(sample).tolist()
    assert ids[0] == PIECES.cls and ids[-1] == PIECES.sep
    middle = ids.index(PIECES.sep)
    return [part for part in (ids[1:middle], ids[middle + 1 : -1]) if part]


def test_every_sample_is_of_its_form(documents):
    """Two runs of neighbouring tokens of one document, in the order that the sample says."""
    samples = train_pairs(documents)
    form = pairs_form()
    shapes = form.shapes(1, tokens=LENGTH)
    for number in range(samples.epoch_size // 2, samples.epoch_size * 3 // 2):
        sample = samples[number]
        assert list(sample) == list(form.entries)
        assert all(array.dtype == np.int32 and (1, *array.shape) == shapes[name] for name, array in sample.items())
        length, order, parts = int(sample["length"]), int(sample["order"]), segments(sample)
        assert not sample["tokens"][length:].any() and (sample["places"] < length).all()
        first = len(parts[0]) + 2
        assert sample["token_types"].tolist() == [0] * first + [1] * (length - first) + [0] * (LENGTH - length)
        assert all(np.diff(part).tolist() == [1] * (len(part) - 1) for part in parts)
        homes = {int(np.searchsorted(documents.document_offsets, part[0] - 5, side="right")) for part in parts}
        assert len(homes) == 1 and homes.pop() - 1 < 290
        assert len(parts) == (1 if order == IGNORED else 2)
        if order != IGNORED:
            assert (parts[0][0] > parts[1][0]) == bool(order)


def test_an_epoch_has_every_chunk_once(documents):
    """As far as it has as many chunks as the first one; the next one joins other sentences."""
    samples = train_pairs(documents)
    epochs = []
    for epoch in range(2):
        places = range(epoch * samples.epoch_size, (epoch + 1) * samples.epoch_size)
        found = [sorted(token for part in segments(samples[place]) for token in part) for place in places]
        times = Counter(token for tokens in found for token in tokens)
        more = samples.epoch_size - len(samples._epoch_chunks(epoch)[0])
        assert abs(more) < 0.05 * samples.epoch_size and (epoch or not more)
        assert max(times.values()) <= (2 if more > 0 else 1)
        epochs.append({tuple(tokens) for tokens in found})
    assert 0.05 < len(epochs[0] & epochs[1]) / samples.epoch_size < 0.9
    starts = [min(segments(samples[number])[0]) for number in range(samples.epoch_size)]
    assert abs(np.corrcoef(starts[:-1], starts[1:])[0, 1]) < 0.1
    shifts = {samples._epoch_chunks(epoch)[1] % samples.epoch_size for epoch in range(20)}
    assert len(shifts) > 15, "an epoch with more chunks leaves none out for ever"


def test_a_sample_is_a_pure_function_of_seed_and_number(documents):
    numbers = np.random.default_rng(1).integers(0, 10 * train_pairs(documents).epoch_size, 40).tolist()

    def bytes_of(samples, numbers):
        return [b"".join(array.tobytes() for array in samples[number].values()) for number in numbers]

    one = train_pairs(documents)
    forwards = bytes_of(one, numbers)
    assert bytes_of(one, numbers[::-1])[::-1] == forwards
    assert [bytes_of(train_pairs(documents), [number])[0] for number in numbers[:5]] == forwards[:5]
    assert bytes_of(train_pairs(documents, seed=8), numbers) != forwards
    assert len(set(bytes_of(one, range(2 * one.epoch_size)))) > 1.98 * one.epoch_size  # a few are very short


def test_golden_samples(documents):
    """A resumed run must see the samples it would have seen: these may not change, in any version of NumPy or Grain."""
    train = train_pairs(documents)
    evaluation = EvaluationPairs(documents, sequence_length=LENGTH, vocabulary=PIECES)
    samples = [train[number] for number in (0, 1, 2, 5000, 10**6)] + [evaluation[3]]
    digest = hashlib.sha256(b"".join(array.astype("<i4").tobytes() for each in samples for array in each.values()))
    assert digest.hexdigest() == "5224f816b692392d345c1c39af1d08e6559ae36b0098f323d9bc31a94cee1910"


def test_evaluation_has_every_sentence_once(documents):
    """In order, each aiming at T: what is left out was cut off a pair that was too long."""
    numbers = np.arange(290, 300)
    samples = EvaluationPairs(documents, numbers, sequence_length=LENGTH, vocabulary=PIECES)
    seen: list[int] = []
    for number in range(len(samples)):
        tokens = sorted(token for part in segments(samples[number]) for token in part)
        assert not seen or tokens[0] > seen[-1]
        seen += tokens
    expected = {int(token) for document in samples.documents() for token in document}
    assert set(seen) <= expected and len(seen) > 0.6 * len(expected)
    long = EvaluationPairs(documents, numbers, sequence_length=1000, vocabulary=PIECES)
    assert {token for number in range(len(long)) for part in segments(long[number]) for token in part} == expected
    (batch,) = evaluation_batches(long, rows=range(16), global_batch=16)
    assert (batch["length"] > 0).sum() == len(long) and (batch["order"][len(long) :] == IGNORED).all()


@given(st.integers(1, 60), st.integers(1, 60), st.integers(2, 130))
def test_the_longer_segment_is_cut(length_a, length_b, target):
    a, b = length_a, length_b
    while a + b > target:
        a, b = (a - 1, b) if a > b else (a, b - 1)
    assert pairs._surplus(length_a, length_b, target) == (length_a - a, length_b - b)
    assert a >= 1 and b >= 1


def test_segments_are_cut_at_both_ends(documents):
    """A token at a time from the front or the back."""
    cuts = [pairs._cut(1000, 100, Bits(key_of(0), number)) for number in range(300)]
    assert {cut.stop - cut.start for cut in cuts} == {900}
    assert np.mean([cut.start for cut in cuts]) == pytest.approx(50, abs=1.5)


def check_statistics(samples, vocabulary, count, monkeypatch) -> float:
    """Shares of tokens, pairs and runs of words, as the paper has them; returns that of samples that are short."""
    spans = Counter()

    def counting(*arguments):
        result = masked(*arguments)
        spans.update(words for _, _, words in result.spans)
        return result

    masked = pairs.masked
    monkeypatch.setattr(pairs, "masked", counting)
    sums, orders = Counter(), Counter()
    for start in range(0, count, 500):
        found = [samples[number] for number in range(start, start + 500)]
        batch = {name: np.stack([sample[name] for sample in found]) for name in found[0]}
        ids_NT, chosen_NT = batch["tokens"].copy(), np.zeros(batch["tokens"].shape, bool)
        row, number = np.nonzero(batch["targets"] != IGNORED)
        place = row, batch["places"][row, number]
        ids_NT[place], chosen_NT[place] = batch["targets"][row, number], True
        seen = batch["tokens"][chosen_NT]
        after_NT = ~np.isin(ids_NT[:, :-1], [vocabulary.cls, vocabulary.sep])
        goes_on_NT = vocabulary.continues[ids_NT[:, 1:]] & after_NT
        assert (chosen_NT[:, 1:] == chosen_NT[:, :-1])[goes_on_NT].all(), "half a word"
        sums.update(tokens=int(batch["length"].sum()), chosen=len(seen), masks=int((seen == vocabulary.mask).sum()))
        sums.update(same=int((seen == ids_NT[chosen_NT]).sum()))
        sums.update(short=int((batch["length"] < 0.9 * samples.sequence_length).sum()))
        orders.update(batch["order"].tolist())
    assert sums["chosen"] / sums["tokens"] == pytest.approx(0.15, abs=0.003)
    assert sums["masks"] / sums["chosen"] == pytest.approx(0.8, abs=0.01)
    assert sums["same"] / sums["chosen"] == pytest.approx(0.1, abs=0.01)
    assert orders[1] / (orders[0] + orders[1]) == pytest.approx(0.5, abs=0.02)
    for words, share in (1, 6 / 11), (2, 3 / 11), (3, 2 / 11):
        assert spans[words] / spans.total() == pytest.approx(share, abs=0.02)
    return sums["short"] / count


@pytest.mark.full
def test_statistics_of_made_up_text(tmp_path, monkeypatch):
    """6,000 samples; words of one or more pieces, documents of 100 sentences."""
    rng = np.random.default_rng(3)
    with IndexedWriter(tmp_path / "m", len(TOKENS)) as writer:
        for _ in range(60):
            sizes = rng.integers(3, 40, 100)
            continues = [rng.random(size) < 0.2 for size in sizes]
            writer.add_document(*(np.where(more, 5 + NUM_WORDS, 5 + len(more)) for more in continues))
    documents = IndexedDataset(tmp_path / "m")
    samples = TrainPairs(documents, np.arange(60), sequence_length=128, seed=0, vocabulary=PIECES)
    assert 0.08 < check_statistics(samples, PIECES, 6_000, monkeypatch) < 0.13


def test_a_document_of_one_sentence(tmp_path):
    with IndexedWriter(tmp_path / "m", len(TOKENS)) as writer:
        writer.add_document([7] * 500)
        writer.add_document([8], [9])
    samples = TrainPairs(
        IndexedDataset(tmp_path / "m"), np.arange(1), sequence_length=LENGTH, seed=0, vocabulary=PIECES
    )
    sample = samples[0]
    assert samples.epoch_size == 1 and int(sample["order"]) == IGNORED and not sample["token_types"].any()
    assert segments(samples[0]) == [[7] * (int(sample["length"]) - 2)]


def test_corpora_that_do_not_do(tmp_path, documents):
    form = {"validation_fraction": 0.1, "seed": 0, "vocabulary": PIECES}
    train, _ = train_and_validation(documents, sequence_length=5, **form)
    lengths = {int(train[number]["length"]) for number in range(50)}
    assert 5 in lengths and max(lengths) == 5
    with IndexedWriter(tmp_path / "one", len(TOKENS)) as writer:
        writer.add_document([6, 7], [8])
        writer.add_document([])
    with pytest.raises(UserError, match="has 1 of the 2 documents that"):
        train_and_validation(IndexedDataset(tmp_path / "one"), sequence_length=LENGTH, **form)

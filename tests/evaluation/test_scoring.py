"""What every target is given: the same for any size of batch and on any mesh, and what one window per token gives."""

import functools

import numpy as np
import pytest
from tiny import drawn_params, full, tiny_config, tiny_program

from megajax.core.batch import IGNORED
from megajax.core.program.scoring import next_logits
from megajax.data.samples.gpt import EvaluationSamples
from megajax.data.text.tokens import TokenDocuments
from megajax.evaluation.scoring import perplexities, score_continuations, score_samples

LENGTH, VOCABULARY = 16, 101
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, VOCABULARY, 300, np.int32)
SEQUENCES = [(RNG.integers(0, VOCABULARY, length).tolist(), first) for length, first in [(9, 8), (40, 5), (5, 5)]]


@functools.cache
def model(mesh=(1, 1, 1), global_batch=64, **options):
    config = tiny_config(mesh, global_batch=global_batch, init_std=0.2, num_layers=2, **options)
    program = tiny_program(config)
    return program, drawn_params(program)


def windows(ids: np.ndarray, overlap: int) -> EvaluationSamples:
    return EvaluationSamples(TokenDocuments.from_sequences([[ids]], "ids"), sequence_length=LENGTH, overlap=overlap)


def one_window_per_token(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Loss of every token but the first, and whether it is the arg-max, from the logits after its LENGTH tokens."""
    program, params = model()
    tokens = np.zeros((len(ids) - 1, LENGTH), np.int32)
    last = np.minimum(np.arange(len(ids) - 1), LENGTH - 1)
    for row, end in enumerate(last):
        tokens[row, : end + 1] = ids[row - end : row + 1]
    logits = np.empty((len(tokens), VOCABULARY))
    for position in range(LENGTH):
        rows = np.flatnonzero(last == position)
        for part in np.split(rows, range(64, len(rows), 64)):
            chosen = np.resize(part, 64)  # fills the batch by repeating
            batch = {"tokens": tokens[chosen], "targets": np.full((64, LENGTH), IGNORED, np.int32)}
            found = next_logits(program)(params, program.put_batch(batch, program.local_rows), np.int32(position))
            logits[part] = np.asarray(found)[: len(part), :VOCABULARY]
    log_sum = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    return log_sum - logits[np.arange(len(tokens)), ids[1:]], logits.argmax(-1) == ids[1:]


def test_overlap_of_one_is_one_window_per_token():
    ids = np.random.default_rng(1).integers(0, VOCABULARY, 600, np.int32)
    program, params = model()
    samples = windows(ids, overlap=1)
    assert len(samples) == 599 - LENGTH + 1
    scores = [score["next_token"] for score in score_samples(program, params, samples)]
    loss, hit = one_window_per_token(ids)
    np.testing.assert_allclose(np.concatenate([score.loss for score in scores]), loss, rtol=2e-5, atol=1e-5)
    np.testing.assert_array_equal(np.concatenate([score.hit for score in scores]), hit)
    assert 0 < hit.sum() < 599
    (result,) = perplexities(program, params, samples).values()
    assert result.tokens == 599
    assert result.loss == pytest.approx(loss.mean(), rel=1e-6)
    assert result.perplexity == pytest.approx(np.exp(loss.mean()), rel=1e-5)


FORMS = [
    ((1, 1, 1), 7, {}),
    full((2, 2, 2), 8, {}),
    ((1, 2, 1), 6, {"vocabulary": "split"}),
    full((2, 2, 2), 8, {"vocabulary": "split", "zero": 3}),
    full((1, 1, 1), 100, {}),
]


@functools.cache
def expected():
    program, params = model()
    (texts,) = perplexities(program, params, windows(IDS, overlap=5)).values()
    return texts, score_continuations(program, params, SEQUENCES)


@pytest.mark.parametrize(("mesh", "global_batch", "options"), FORMS)
def test_every_mesh_and_batch_gives_the_same(mesh, global_batch, options):
    """The last batch is filled up; 7 rows are no multiple of anything."""
    program, params = model(mesh, global_batch, **options)
    texts, continuations = expected()
    (result,) = perplexities(program, params, windows(IDS, overlap=5)).values()
    assert result.tokens == texts.tokens == 299
    assert result.total_loss == pytest.approx(texts.total_loss, rel=1e-6)
    for found, wanted in zip(score_continuations(program, params, SEQUENCES), continuations, strict=True):
        assert found.log_probability == pytest.approx(wanted.log_probability, rel=2e-6)
        assert found.greedy == wanted.greedy


def test_continuations_are_sums_over_their_tokens():
    """One window, several windows because the end is longer than the context, and an empty end."""
    program, params = model()
    short, long, empty = score_continuations(program, params, SEQUENCES)
    (ids, first) = SEQUENCES[0]
    loss, hit = one_window_per_token(np.array(ids, np.int32))
    assert short.log_probability == pytest.approx(-loss[first - 1 :].sum(), rel=1e-5)
    assert short.greedy == hit[first - 1 :].all()
    assert (empty.log_probability, empty.greedy) == (0.0, True)
    parts = [(SEQUENCES[1][0][max(0, stop - 1 - LENGTH) : stop], stop) for stop in (5 + 16, 5 + 32, 40)]
    counts = [16, 16, 3]
    pieces = [(part, len(part) - count) for (part, _), count in zip(parts, counts, strict=True)]
    total = sum(piece.log_probability for piece in score_continuations(program, params, pieces))
    assert long.log_probability == pytest.approx(total, rel=1e-6)


def test_greedy_continuations_are_those_that_the_model_writes():
    from megajax.generation.choice import Sampling
    from megajax.generation.window import continue_in_windows

    program, params = model()
    ids = [*continue_in_windows(program, params, [3, 1, 4], num_tokens=10, sampling=Sampling(0.0))]
    other = [*ids[:-1], (ids[-1] + 1) % VOCABULARY]
    right, wrong = score_continuations(program, params, [([3, 1, 4, *ids], 3), ([3, 1, 4, *other], 3)])
    assert right.greedy and not wrong.greedy
    assert right.log_probability > wrong.log_probability

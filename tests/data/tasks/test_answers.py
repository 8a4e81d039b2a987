"""Answers of logits, against plain loops over every pair of tokens that follow the published description, question by
question."""

import dataclasses
import math

import numpy as np
import pytest
from real_records import SQUAD1, SQUAD2, letters, real_tokenizer, squad
from tiny import full

from megajax.data.tasks.records import Question
from megajax.data.tasks.registry import TaskConfig
from megajax.data.tasks.windows import NO_SPAN, FoundAnswer, SpanWindows, find_answers, mean_logits

CONFIG = TaskConfig(doc_stride=2)
PLAIN = Question("0", "x", "a b c d e", ())
PARTS = [
    (SQUAD1, slice(200, 380), 1),
    (SQUAD2, slice(0, 180), 1),
    *(pytest.param(file, slice(None), 5, marks=pytest.mark.full) for file in (SQUAD1, SQUAD2)),
]


def plain_windows(*records, length=11) -> SpanWindows:
    return SpanWindows(records, letters(), sequence_length=length, config=CONFIG, training=False)


def real_windows(folder, file, part) -> SpanWindows:
    config = TaskConfig(doc_stride=48)
    return SpanWindows(
        squad(folder / file)[part], real_tokenizer(folder), sequence_length=192, config=config, training=False
    )


def peaked(windows, seed, rounded=0.0) -> np.ndarray:
    """Noise with a few peaks a window, also on question, padding and [CLS]; rounded, many logits are equal."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 1, (len(windows), windows.sequence_length))
    rows, columns = rng.integers(0, len(windows), 4 * len(windows)), rng.integers(0, 192, 4 * len(windows))
    logits[rows, columns % windows.sequence_length] += rng.uniform(2, 8, len(rows))
    logits[:, 0] += rng.normal(1, 3, len(windows))
    return (np.round(logits / rounded) * rounded if rounded else logits).astype(np.float32)


def described(windows, number, start_WT, end_WT, config, unanswerable) -> FoundAnswer:
    """The answer to one question: every pair of tokens of every window is looked at by itself.

    A pair counts if both logits are among the `n_best` largest of their window, both tokens are the context's, and it
    has neither too many tokens nor fewer than one. Of all pairs and of "none", whose score is the least of all windows,
    the `n_best` of the highest scores stay; the best one with text is the answer, or none if that scores higher by more
    than the threshold.
    """
    context = windows.records[number].context
    candidates = []  # score, what decides between equal ones, text, logits
    none = None
    for window in np.flatnonzero(windows.owners == number).tolist():
        starts, ends = start_WT[window], end_WT[window]
        if none is None or starts[0] + ends[0] < none:
            none = starts[0] + ends[0]
        place, characters = windows.characters(window)

        def rank(logits):
            order = sorted(range(len(logits)), key=lambda token: (logits[token], token))
            return {token: len(order) - 1 - at for at, token in enumerate(order)}

        rank_of_start, rank_of_end = rank(starts.tolist()), rank(ends.tolist())
        for token in range(place, place + len(characters)):
            if rank_of_start[token] >= config.n_best:
                continue
            for other in range(token, min(token + config.answer_tokens, place + len(characters))):
                if rank_of_end[other] < config.n_best:
                    text = context[characters[token - place][0] : characters[other - place][1]]
                    earlier = (-window, -rank_of_start[token], -rank_of_end[other])
                    candidates.append((starts[token] + ends[other], earlier, text, (starts[token], ends[other])))
    if unanswerable:
        candidates.append((none, (-math.inf, 0, 0), "", None))
    best, logits = NO_SPAN, (np.float32(0), np.float32(0))
    for _ in range(min(config.n_best, len(candidates))):
        candidate = max(candidates)
        candidates.remove(candidate)
        if candidate[2]:
            best, logits = candidate[2:]
            break
    if not unanswerable:
        return FoundAnswer(best, best, 0.0)
    difference = float(none - logits[0] - logits[1])
    return FoundAnswer("" if difference > config.null_threshold else best, best, difference)


@pytest.mark.parametrize("rounded", [full(0.0), 0.25])
@pytest.mark.parametrize(
    ("file", "part", "seed", "unanswerable"),
    [(*PARTS[0], False), full(*PARTS[0], True), full(*PARTS[1], False), (*PARTS[1], True)],
)
def test_as_described(test_data, file, part, seed, unanswerable, rounded):
    windows = real_windows(test_data, file, part)
    start, end = peaked(windows, seed, rounded), peaked(windows, seed + 1, rounded)
    for config in CONFIG, dataclasses.replace(CONFIG, n_best=5, answer_tokens=8, null_threshold=-1.5):
        found = find_answers(windows, start, end, config, unanswerable=unanswerable)
        assert len(found) == len(windows.records)
        for number, answer in enumerate(found):
            assert answer == described(windows, number, start, end, config, unanswerable), number
        texts = [answer.text for answer in found]
        assert len(set(texts)) > 0.4 * len(texts) and (0 < texts.count("") < 0.6 * len(texts)) == unanswerable


def logits(windows, **places) -> np.ndarray:
    """Zeros but at the places `wW_tT`."""
    made = np.zeros((len(windows), windows.sequence_length), np.float32)
    for name, value in places.items():
        window, token = (int(part[1:]) for part in name.split("_"))
        made[window, token] = value
    return made


def test_the_best_span_over_windows():
    """Of two windows the better; never backwards, longer than allowed, or of the question."""
    windows = plain_windows(PLAIN, length=7)  # [CLS] x [SEP] and three of the context: abc, bcd, cde
    assert len(windows) == 3
    start, end = logits(windows, w0_t3=3, w1_t4=2, w0_t1=9), logits(windows, w0_t4=1, w1_t5=3, w0_t1=9)
    (answer,) = find_answers(windows, start, end, CONFIG, unanswerable=False)
    assert answer == FoundAnswer("c d", "c d", 0.0)
    (answer,) = find_answers(windows, end, start, CONFIG, unanswerable=False)  # it would be d c
    assert answer.text == "a"  # as good as d, which is in a later window
    (answer,) = find_answers(windows, start, end, dataclasses.replace(CONFIG, answer_tokens=1), unanswerable=False)
    assert answer.text == "a"


@pytest.mark.parametrize(("threshold", "text"), [(-2.5, ""), (-2.0, "b c"), (0.0, "b c")])
def test_no_answer(threshold, text):
    """The least of what the windows say counts; only more than the threshold is none."""
    windows = plain_windows(PLAIN, length=7)
    start, end = logits(windows, w1_t3=3, w0_t0=9, w1_t0=2, w2_t0=5), logits(windows, w1_t4=1, w0_t0=9)
    config = dataclasses.replace(CONFIG, null_threshold=threshold)
    assert find_answers(windows, start, end, config, unanswerable=True) == [FoundAnswer(text, "b c", -2.0)]


def test_no_span_is_valid():
    windows = plain_windows(dataclasses.replace(PLAIN, context=""), PLAIN)
    zeros = np.zeros((2, 11), np.float32)
    assert next(answer.text for answer in find_answers(windows, zeros, zeros, CONFIG, unanswerable=False)) == NO_SPAN
    start = logits(windows, w0_t0=1, w1_t0=1)
    found = find_answers(windows, start, zeros, dataclasses.replace(CONFIG, n_best=1), unanswerable=True)
    assert found == [FoundAnswer("", NO_SPAN, 1.0)] * 2  # no place is left for another


@pytest.mark.parametrize("models", [1, 2, 3, 5])
def test_an_ensemble_of_one_model_with_itself(test_data, models):
    windows = real_windows(test_data, SQUAD2, slice(0, 250))
    start, end = peaked(windows, 1), peaked(windows, 2)
    start[0] *= 300  # probabilities of 0
    means = [mean_logits(windows, [each] * models) for each in (start, end)]
    assert means[0].dtype == np.float32 and (means[0] == start).all() and (means[1] == end).all()
    alone = find_answers(windows, start, end, CONFIG, unanswerable=True)
    assert find_answers(windows, *means, CONFIG, unanswerable=True) == alone


def test_an_ensemble_is_the_mean_of_probabilities():
    """Over all tokens of all windows of a question; whatever the order of the models."""
    windows = plain_windows(PLAIN, dataclasses.replace(PLAIN, context="a b"), length=7)
    assert windows.owners.tolist() == [0, 0, 0, 1]
    rng = np.random.default_rng(0)
    models = [rng.normal(0, 4, (4, 7)).astype(np.float32) for _ in range(3)]
    models[1] += 50  # a constant changes no probability
    mean, again = mean_logits(windows, models), mean_logits(windows, models[::-1])
    for rows in slice(0, 3), slice(3, 4):
        expected = np.zeros(7 * (rows.stop - rows.start))
        for model in models:
            weights = [math.exp(logit) for logit in model[rows].ravel().tolist()]
            expected += [weight / math.fsum(weights) / 3 for weight in weights]
        for found in mean, again:
            weights = np.exp(found[rows].astype(np.float64).ravel())
            np.testing.assert_allclose(weights / weights.sum(), expected, rtol=2e-5)
    far = [logits(windows, w0_t3=2000), logits(windows, w0_t4=2000)]  # each finds the other's impossible
    mean = mean_logits(windows, far)
    assert np.isfinite(mean).all() and mean[0, 3] == pytest.approx(mean[0, 4]) and mean[0].max() == mean[0, 3:5].max()

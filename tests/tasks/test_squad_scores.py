"""SQuAD's figures, against torchmetrics (1.1) and against what is published of 2.0, written once more."""

import dataclasses
import math
import random
import re
import string

import pytest
from real_records import SQUAD1, SQUAD2, squad

from megajax.tasks.answers import FoundAnswer
from megajax.tasks.records import Answer, Question
from megajax.tasks.squad_scores import normalized, question_scores, squad_figures

ADVERSARIAL = [
    lambda text: f"The {text.upper()}!",
    lambda text: f"a an the {text} , . ;",
    lambda text: re.sub(" ", " \t\n ", text),
    lambda text: text.replace(" ", "\u00a0") + "\u2014",
    lambda text: f"\u201c{text}\u201d",  # no ASCII punctuation: it stays
    lambda text: f"{text} {text}",
    lambda text: " ".join(reversed(text.split())),
    lambda text: text[:-1],
    lambda text: "".join(f"{letter}-" for letter in text),
    lambda text: text + "\u0301",
    lambda text: f"theatre {text} another",
    lambda text: "the",
    lambda text: "...",
    lambda text: " ",
    lambda text: "\u0130stanbul \u00df \u01c5",
]


def predictions(questions, kind, seed=0) -> list[str]:
    """Perfect (of several right ones any), empty, perturbed or adversarial ones."""
    rng = random.Random(seed)
    texts = []
    for question in questions:
        right = rng.choice(question.answers).text if question.answers else ""
        words = question.context.split()
        if kind == "empty":
            right = ""
        elif kind == "perturbed":
            first = rng.randrange(len(words))
            other = " ".join(words[first : first + rng.randrange(6)])
            right = rng.choice([right, f"{right} {other}", other, " ".join(right.split()[1:])])
        elif kind == "adversarial":
            right = rng.choice(ADVERSARIAL)(right or rng.choice(words))
        texts.append(right)
    return texts


KINDS = ["perfect", "empty", "perturbed", "adversarial"]
MADE_UP = [
    Question("articles", "?", "c", (Answer("the The", 0), Answer("an", 0))),
    Question("mixed", "?", "c", (Answer("a", 0), Answer("the cat", 0), Answer("Cat's", 0))),
    Question("unicode", "?", "c", (Answer("İstanbul\u2014ß", 0), Answer("e\u0301te\u0301", 0))),
    Question("punctuation", "?", "c", (Answer("$1,000.00", 0), Answer("U.S.A.", 0), Answer("...", 0))),
]
MADE_UP_TEXTS = ["", "the", "A", "cat", "cats", "the Cat!", "İstanbul\u2014ß", "été", "100000", "u s a", "usa", "."]
MADE_UP_TEXTS += ["a cat"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Cat\tsat, on a mat.", "cat sat on mat"),
        ("an-other the-atre", "another theatre"),  # punctuation goes first, so these are no articles
        ("A.", ""),
        ("\u00a0an\u2014the ", "\u2014"),
        ("\u201cThe cat\u201d", "\u201c cat\u201d"),
        ("la", "la"),
        ("", ""),
    ],
)
def test_normalized(text, expected):
    assert normalized(text) == expected


def test_scores_of_a_question():
    question = Question("0", "?", "c", (Answer("the Denver Broncos", 0), Answer("Broncos", 0)))
    none = Question("1", "?", "c", ())
    cases = [("broncos!", 1, 1), ("Denver", 0, 2 / 3), ("Denver Broncos team", 0, 0.8), ("", 0, 0), ("a", 0, 0)]
    for text, exact, f1 in cases:
        for unanswerable in False, True:
            assert question_scores(question, text, unanswerable=unanswerable) == (exact, pytest.approx(f1))
    assert question_scores(none, "", unanswerable=True) == question_scores(none, "the.", unanswerable=True) == (1, 1)
    assert question_scores(none, "x", unanswerable=True) == (0, 0)
    assert question_scores(none, "", unanswerable=False) == (0, 0)  # 1.1 has no such questions
    only_articles = MADE_UP[0]
    assert question_scores(only_articles, "a", unanswerable=False) == (1, 0)
    assert question_scores(only_articles, "a", unanswerable=True) == (1, 1)


def found(texts) -> list[FoundAnswer]:
    return [FoundAnswer(text, text, 0.0) for text in texts]


def test_figures_at_thresholds():
    right = (Answer("x", 0),)
    questions = [Question(str(number), "?", "x", right if number < 3 else ()) for number in range(5)]
    bests, differences = ["x", "x y", "z", "x", "x"], [-3.0, -1.0, 5.0, -2.0, 2.0]
    given = [
        FoundAnswer("" if difference > 3 else best, best, difference)
        for best, difference in zip(bests, differences, strict=True)
    ]
    figures = squad_figures(questions, given, unanswerable=True)
    third = (1 + 2 / 3) / 3
    assert figures == {
        "exact_match": 20.0,
        "f1": pytest.approx(100 * (1 + 2 / 3) / 5),
        "records": 5,
        "HasAns_exact": pytest.approx(100 / 3),
        "HasAns_f1": pytest.approx(100 * third),
        "NoAns_exact": 0.0,
        "NoAns_f1": 0.0,
        "best_exact": 60.0,
        "best_exact_thresh": -3.0,
        "best_f1": 60.0,
        "best_f1_thresh": -3.0,
    }
    assert squad_figures(questions[:3], given[:3], unanswerable=False).keys() == {"exact_match", "f1", "records"}
    mixed = squad_figures(questions, given, unanswerable=False)
    assert mixed == squad_figures(questions[:3], given[:3], unanswerable=False)
    unknown = squad_figures(questions[3:], given[3:], unanswerable=False)
    assert math.isnan(unknown["f1"]) and math.isnan(unknown["exact_match"]) and unknown["records"] == 0
    only = squad_figures(questions[3:], given[3:], unanswerable=True)
    assert not any("HasAns" in name for name in only) and (only["best_f1"], only["best_f1_thresh"]) == (100, 0)


# SQuAD 2.0 as it is published, written another way: words are found by a regular expression, what is counted with is a
# list, every threshold is tried by itself.


def described_words(text: str) -> list[str]:
    kept = "".join(letter for letter in text.lower() if letter not in set(string.punctuation))
    words: list[str] = []
    for word in re.findall(r"\S+", kept):
        words += [part for part in re.split(r"(?<!\w)(?:an|a|the)(?!\w)", word) if part]
    return words


def described_scores(question, text) -> tuple[float, float]:
    best_exact = best_f1 = 0.0
    golds = [described_words(answer.text) for answer in question.answers]
    for gold in [gold for gold in golds if gold] or [[]]:
        words = described_words(text)
        best_exact = max(best_exact, float(gold == words))
        left, same = list(gold), 0
        for word in words:
            if word in left:
                left.remove(word)
                same += 1
        f1 = float(gold == words) if not gold or not words else 2 * same / (len(gold) + len(words))
        best_f1 = max(best_f1, f1)
    return best_exact, best_f1


def described_best(questions, scores, differences) -> tuple[float, float]:
    """ "None" to all, then with every difference as the threshold; of equal figures the first."""
    best, at = sum(not question.answers for question in questions), 0.0
    rows = [
        (difference, bool(question.answers), score)
        for question, score, difference in zip(questions, scores, differences, strict=True)
    ]
    for threshold in sorted(differences):
        total = sum((score if has else 0.0) if difference <= threshold else not has for difference, has, score in rows)
        if total > best + 1e-9:
            best, at = total, threshold
    return 100 * best / len(questions), at


def at_threshold(bests, differences, threshold) -> list[FoundAnswer]:
    return [
        FoundAnswer("" if difference > threshold else best, best, difference)
        for best, difference in zip(bests, differences, strict=True)
    ]


def check_as_published(questions, texts) -> bool:
    """Of every question, of all at one threshold, and at the best one of exact match and of F1.

    Returns:
        whether that is better than "none" to all.
    """
    rng = random.Random(1)
    for question, text in zip(questions, texts, strict=True):
        expected = described_scores(question, text)
        assert question_scores(question, text, unanswerable=True) == pytest.approx(expected, abs=1e-12), (
            question,
            text,
        )
    differences = [rng.gauss(-1 if question.answers else 1, 2) for question in questions]
    bests = [text or "something" for text in texts]
    given = at_threshold(bests, differences, 0.5)
    figures = squad_figures(questions, given, unanswerable=True)
    rows = [described_scores(question, answer.text) for question, answer in zip(questions, given, strict=True)]
    parts = {"": rows}
    for name, has in ("HasAns_", True), ("NoAns_", False):
        parts[name] = [row for row, question in zip(rows, questions, strict=True) if bool(question.answers) == has]
    for name, part in parts.items():
        for which, key in enumerate(("exact" if name else "exact_match", "f1")):
            assert figures[name + key] == pytest.approx(100 * math.fsum(row[which] for row in part) / len(part))
    scores = [described_scores(question, best) for question, best in zip(questions, bests, strict=True)]
    none = 100 * sum(not question.answers for question in questions) / len(questions)
    for which, key in enumerate(("exact", "f1")):
        best, threshold = described_best(questions, [score[which] for score in scores], differences)
        assert (figures[f"best_{key}"], figures[f"best_{key}_thresh"]) == (pytest.approx(best), threshold)
        figure = "exact_match" if key == "exact" else "f1"
        again = squad_figures(questions, at_threshold(bests, differences, threshold), unanswerable=True)
        # The official script says 0 where "none" to all is best, and counts an answer of punctuation alone as one.
        if best > none and all(map(normalized, bests)):
            assert again[figure] == pytest.approx(best) and best >= figures[figure] - 1e-9
        elif best > none:
            assert again[figure] >= best - 1e-9
    return best > none


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", KINDS)
def test_version_2_as_published(test_data, kind, step):
    questions = squad(test_data / SQUAD2)[::step]
    assert 50 < sum(not question.answers for question in questions) < 600 // step
    assert check_as_published(questions, predictions(questions, kind)) == (kind != "empty")
    others = squad(test_data / SQUAD1)[:: 100 * step if step > 1 else 1]
    for question, text in zip(others, predictions(others, kind, 2), strict=True):
        expected = described_scores(question, text)
        assert question_scores(question, text, unanswerable=True) == pytest.approx(expected, abs=1e-12)


def test_perfect_and_empty_answers(test_data):
    questions = squad(test_data / SQUAD2)
    perfect = squad_figures(questions, found(predictions(questions, "perfect")), unanswerable=True)
    empty = squad_figures(questions, found(predictions(questions, "empty")), unanswerable=True)
    assert (perfect["exact_match"], perfect["f1"], perfect["records"]) == (100, 100, 706)
    assert empty["exact_match"] == empty["f1"] == pytest.approx(100 * 320 / 706)
    assert (empty["HasAns_f1"], empty["NoAns_f1"]) == (0, 100)
    for question in MADE_UP:
        for text in MADE_UP_TEXTS:
            assert question_scores(question, text, unanswerable=True) == pytest.approx(described_scores(question, text))


def check_against_torchmetrics(questions, texts) -> None:
    """Each question alone, since torchmetrics adds up in 32 bits, and all together."""
    metric = pytest.importorskip("torchmetrics.functional.text", reason="the extra `peer` is not installed").squad
    given, golds, nothing = [], [], 0
    for question, text in zip(questions, texts, strict=True):
        rights = [answer.text for answer in question.answers]
        given.append({"prediction_text": text, "id": question.name})
        golds.append({"answers": {"text": rights, "answer_start": [0] * len(rights)}, "id": question.name})
        theirs = metric(given[-1:], golds[-1:])
        exact, f1 = question_scores(question, text, unanswerable=False)
        both_nothing = not normalized(text) and not all(map(normalized, rights))
        nothing += both_nothing
        if both_nothing:
            # Where no word is left of both, torchmetrics' F1 is 1, as that of version 2.0; the script of 1.1 says 0.
            assert (exact, f1, theirs["f1"].item()) == (1, 0, 100)
        assert 100 * exact == theirs["exact_match"].item()
        assert 100 * f1 == pytest.approx(theirs["f1"].item(), rel=3e-7) or both_nothing
    figures, theirs = squad_figures(questions, found(texts), unanswerable=False), metric(given, golds)
    assert figures["records"] == len(questions) and nothing < 0.6 * len(questions)
    assert figures["exact_match"] == pytest.approx(theirs["exact_match"].item(), rel=2e-5)
    assert figures["f1"] + 100 * nothing / len(questions) == pytest.approx(theirs["f1"].item(), rel=2e-5)


@pytest.mark.peer
@pytest.mark.parametrize("step", [40, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", KINDS)
def test_version_1_as_torchmetrics_scores_it(test_data, kind, step):
    questions = squad(test_data / SQUAD1)[::step]
    check_against_torchmetrics(questions, predictions(questions, kind))


@pytest.mark.peer
def test_made_up_answers_as_torchmetrics_scores_them():
    for question in MADE_UP:
        named = [dataclasses.replace(question, name=str(number)) for number in range(len(MADE_UP_TEXTS))]
        check_against_torchmetrics(named, MADE_UP_TEXTS)

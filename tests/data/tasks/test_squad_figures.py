"""SQuAD's figures, against torchmetrics (1.1) and against what is published of 2.0, written once more."""

import dataclasses
import math
import random
import re
import string

import pytest
from real_records import SQUAD1, SQUAD2, squad

from megajax.data.tasks.figures import normalized, question_scores, squad_figures
from megajax.data.tasks.records import Answer, Question
from megajax.data.tasks.windows import FoundAnswer

ADVERSARIAL = ["The {}!", "a an the {} , . ;", "{0} {0}", "{}\u0301", "theatre {} another", "the", "...", " "]
ADVERSARIAL += ["\u201c{}\u201d", "\u0130stanbul \u00df \u01c5"]  # no ASCII punctuation: it stays
CHANGES = [
    str.upper,
    lambda text: re.sub(" ", " \t\n ", text),
    lambda text: text.replace(" ", "\u00a0") + "\u2014",
    lambda text: " ".join(reversed(text.split())),
    lambda text: text[:-1],
    "-".join,
    *(form.format for form in ADVERSARIAL),
]
KINDS = ["perfect", "empty", "perturbed", "adversarial"]
MADE_UP = [
    Question("articles", "?", "c", (Answer("the The", 0), Answer("an", 0))),
    Question("mixed", "?", "c", (Answer("a", 0), Answer("the cat", 0), Answer("Cat's", 0))),
    Question("unicode", "?", "c", (Answer("İstanbul\u2014ß", 0), Answer("e\u0301te\u0301", 0))),
    Question("punctuation", "?", "c", (Answer("$1,000.00", 0), Answer("U.S.A.", 0), Answer("...", 0))),
]
MADE_UP_TEXTS = ["", "the", "A", "cat", "cats", "the Cat!", "İstanbul\u2014ß", "été", "100000", "u s a", "usa", "."]
MADE_UP_TEXTS += ["a cat"]


def predictions(questions, kind) -> list[str]:
    """Perfect (of several right ones any), empty, perturbed or adversarial ones."""
    rng = random.Random(0)
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
            right = rng.choice(CHANGES)(right or rng.choice(words))
        texts.append(right)
    return texts


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


def at_threshold(bests, differences, threshold) -> list[FoundAnswer]:
    return [
        FoundAnswer("" if difference > threshold else best, best, difference)
        for best, difference in zip(bests, differences, strict=True)
    ]


def test_figures_at_thresholds():
    right = (Answer("x", 0),)
    questions = [Question(str(number), "?", "x", right if number < 3 else ()) for number in range(5)]
    given = at_threshold(["x", "x y", "z", "x", "x"], [-3.0, -1.0, 5.0, -2.0, 2.0], 3)
    assert squad_figures(questions, given, unanswerable=True) == {
        "exact_match": 20.0,
        "f1": pytest.approx(100 * (1 + 2 / 3) / 5),
        "records": 5,
        "HasAns_exact": pytest.approx(100 / 3),
        "HasAns_f1": pytest.approx(100 * (1 + 2 / 3) / 3),
        "NoAns_exact": 0.0,
        "NoAns_f1": 0.0,
        "best_exact": 60.0,
        "best_exact_thresh": -3.0,
        "best_f1": 60.0,
        "best_f1_thresh": -3.0,
    }
    mixed = squad_figures(questions, given, unanswerable=False)
    assert mixed == squad_figures(questions[:3], given[:3], unanswerable=False)
    assert mixed.keys() == {"exact_match", "f1", "records"}
    unknown = squad_figures(questions[3:], given[3:], unanswerable=False)
    assert math.isnan(unknown["f1"]) and math.isnan(unknown["exact_match"]) and unknown["records"] == 0
    only = squad_figures(questions[3:], given[3:], unanswerable=True)
    assert not any("HasAns" in name for name in only) and (only["best_f1"], only["best_f1_thresh"]) == (100, 0)


# SQuAD 2.0 as it is published, written another way: words are found by a regular expression, what is counted with is a
# list, every threshold is tried by itself.


def described_words(text: str) -> list[str]:
    kept = "".join(letter for letter in text.lower() if letter not in set(string.punctuation))
    return [part for word in kept.split() for part in re.split(r"(?<!\w)(?:an|a|the)(?!\w)", word) if part]


def described_scores(question, text) -> tuple[float, float]:
    words, best_exact, best_f1 = described_words(text), 0.0, 0.0
    golds = [described_words(answer.text) for answer in question.answers]
    for gold in [gold for gold in golds if gold] or [[]]:
        left, same = list(gold), 0
        for word in words:
            if word in left:
                left.remove(word)
                same += 1
        f1 = float(gold == words) if not gold or not words else 2 * same / (len(gold) + len(words))
        best_exact, best_f1 = max(best_exact, float(gold == words)), max(best_f1, f1)
    return best_exact, best_f1


def described_figures(questions, answers) -> dict[str, float]:
    rows = [
        (bool(question.answers), answer.difference, *(described_scores(question, text) for text in texts))
        for question, answer in zip(questions, answers, strict=True)
        for texts in [(answer.text, answer.best)]
    ]
    nothing = sum(not has_answer for has_answer, *_ in rows)
    found: dict[str, float] = {"records": len(rows)}
    for which, key in enumerate(("exact", "f1")):
        for name, wanted in {"": (True, False), "HasAns_": (True,), "NoAns_": (False,)}.items():
            scores = [score[which] for has_answer, _, score, _ in rows if has_answer in wanted]
            found[name + key] = 100 * math.fsum(scores) / len(scores)
        totals = [(nothing, 0.0)]  # "none" to all; then every difference as the threshold
        for threshold in sorted(difference for _, difference, *_ in rows):
            right = [best[which] * has if difference <= threshold else not has for has, difference, _, best in rows]
            totals.append((sum(right), threshold))
        total, threshold = max(totals, key=lambda total: round(total[0], 9))  # of equal ones the first
        found |= {f"best_{key}": 100 * total / len(rows), f"best_{key}_thresh": threshold}
    return found | {"exact_match": found.pop("exact")}


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", KINDS)
def test_version_2_as_published(test_data, kind, step):
    questions = squad(test_data / SQUAD2)[::step]
    assert 50 < sum(not question.answers for question in questions) < 600 // step
    rng = random.Random(1)
    differences = [rng.gauss(-1 if question.answers else 1, 2) for question in questions]
    given = at_threshold([text or "something" for text in predictions(questions, kind)], differences, 0.5)
    figures = squad_figures(questions, given, unanswerable=True)
    assert figures == pytest.approx(described_figures(questions, given))
    none_to_all = 100 * sum(not question.answers for question in questions) / len(questions)
    assert (figures["best_f1"] > none_to_all) == (kind != "empty")
    questions += squad(test_data / SQUAD1)[:: 100 * step if step > 1 else 1]
    for question, text in zip(questions, predictions(questions, kind), strict=True):
        expected = described_scores(question, text)
        assert question_scores(question, text, unanswerable=True) == pytest.approx(expected, abs=1e-12)


def found(texts) -> list[FoundAnswer]:
    return at_threshold(texts, [0.0] * len(texts), 0.0)


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
@pytest.mark.parametrize("question", MADE_UP, ids=lambda question: question.name)
def test_made_up_answers_as_torchmetrics_scores_them(question):
    named = [dataclasses.replace(question, name=str(number)) for number in range(len(MADE_UP_TEXTS))]
    check_against_torchmetrics(named, MADE_UP_TEXTS)

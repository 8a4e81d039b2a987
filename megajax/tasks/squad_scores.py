"""SQuAD's figures, as the official scripts of versions 1.1 and 2.0 compute them."""

import math
import re
import string
from collections import Counter
from collections.abc import Sequence

from megajax.tasks.answers import FoundAnswer
from megajax.tasks.records import Question

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalized(text: str) -> str:
    """A text in lower case without ASCII's punctuation, articles and further white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def question_scores(question: Question, text: str, *, unanswerable: bool) -> tuple[float, float]:
    """Exact match and F1 of an answer, 0 to 1 each, each by the right answer that it is nearest to.

    With `unanswerable`, as SQuAD 2.0 counts, no answer is right where there is none, and a right answer of nothing but
    punctuation and articles is none.
    """
    golds = [normalized(answer.text) for answer in question.answers]
    if unanswerable:
        golds = [gold for gold in golds if gold] or [""]
    answer = normalized(text)
    exact = max((gold == answer for gold in golds), default=False)
    return float(exact), max((_f1(gold, answer, unanswerable) for gold in golds), default=0.0)


def _f1(gold: str, answer: str, unanswerable: bool) -> float:
    gold_words, words = gold.split(), answer.split()
    if unanswerable and not (gold_words and words):
        return float(gold_words == words)
    same = sum((Counter(gold_words) & Counter(words)).values())
    if not same:
        return 0.0
    precision, recall = same / len(words), same / len(gold_words)
    return 2 * precision * recall / (precision + recall)


def squad_figures(
    questions: Sequence[Question], answers: Sequence[FoundAnswer], *, unanswerable: bool
) -> dict[str, float | int]:
    """The figures of the answers, in percent.

    Returns:
        `exact_match`, `f1`, and `records`, how many there are; of SQuAD 1.1 all are of the questions that have an
        answer, and NaN where none has, as in a test set; of SQuAD 2.0 also those of the questions that have an answer,
        `HasAns_exact` and `HasAns_f1`, and that have none, `NoAns_exact` and `NoAns_f1`, where there are such; and the
        best that another threshold gives, `best_exact` and `best_f1`, with that threshold, `best_exact_thresh` and
        `best_f1_thresh`.
    """
    pairs = list(zip(questions, answers, strict=True))
    if not unanswerable:
        pairs = [(question, answer) for question, answer in pairs if question.answers]
    scores = [question_scores(question, answer.text, unanswerable=unanswerable) for question, answer in pairs]
    exact, f1 = _percent(scores)
    figures: dict[str, float | int] = {"exact_match": exact, "f1": f1, "records": len(scores)}
    if not unanswerable:
        return figures
    for name, has_answer in ("HasAns", True), ("NoAns", False):
        part = [
            score for score, question in zip(scores, questions, strict=True) if bool(question.answers) == has_answer
        ]
        if part:
            figures[f"{name}_exact"], figures[f"{name}_f1"] = _percent(part)
    best = [question_scores(question, answer.best, unanswerable=True) for question, answer in pairs]
    for which, name in enumerate(("exact", "f1")):
        found = best_threshold(questions, answers, [score[which] for score in best])
        figures[f"best_{name}"], figures[f"best_{name}_thresh"] = found
    return figures


def _percent(scores: Sequence[tuple[float, float]]) -> tuple[float, float]:
    if not scores:
        return math.nan, math.nan
    exact, f1 = (100 * sum(column) / len(scores) for column in zip(*scores, strict=True))
    return exact, f1


def best_threshold(
    questions: Sequence[Question], answers: Sequence[FoundAnswer], scores: Sequence[float]
) -> tuple[float, float]:
    """The best mean score in percent, and the threshold that gives it: "none" is the answer where `difference` is more.

    As the official script searches: from "none" to every question on, the questions are answered one by one, the least
    difference first; 0 is the threshold if "none" to all is best.

    `scores` are those of every answer's `best`, 0 to 1.
    """
    total = best = float(sum(not question.answers for question in questions))
    threshold = 0.0
    for number in sorted(range(len(answers)), key=lambda number: answers[number].difference):
        if questions[number].answers:
            total += scores[number]
        elif answers[number].best:
            total -= 1
        if total > best:
            best, threshold = total, answers[number].difference
    return 100 * best / len(questions), threshold

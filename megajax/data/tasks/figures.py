"""Scores of answers: accuracy for classes and options; exact match and F1, computed like the official scripts of SQuAD
1.1 and 2.0. Also files of predictions for the official scorers: SQuAD's JSON, GLUE's TSV, and a similar one for RACE.

Letters: N records, C classes or options.
"""

import json
import math
import os
import re
import string
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megajax.core.errors import UserError
from megajax.data.tasks.records import Exam, Pair, Question, Record
from megajax.data.tasks.registry import TASKS
from megajax.data.tasks.windows import FoundAnswer
from megajax.host.files import write_atomically
from megajax.host.paths import check_place

_HEADERS = {"classes": "index\tprediction", "choice": "id\tanswer"}
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def predicted_classes(records: Sequence[Pair | Exam], probabilities_NC: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    """The most probable class of every record, [N], for an exam among its own options; in a tie the first one."""
    assert probabilities_NC.shape[0] == len(records), probabilities_NC.shape
    num_classes = probabilities_NC.shape[1]
    counts = [len(record.options) if isinstance(record, Exam) else num_classes for record in records]
    there_NC = np.arange(num_classes)[None, :] < np.array(counts, np.intp).reshape(-1, 1)
    return np.where(there_NC, probabilities_NC, -np.inf).argmax(axis=1)


def class_figures(records: Sequence[Pair | Exam], probabilities_NC: npt.NDArray[Any]) -> dict[str, float]:
    """Accuracy in percent, over all records with a label and over those of every group.

    Returns:
        `accuracy`, NaN if no record has a label; `accuracy_GROUP` for every group in the records, in alphabetical
        order; `records`, the number of records with a label.
    """
    found = zip(records, predicted_classes(records, probabilities_NC).tolist(), strict=True)
    rights = [(record.group, record.label == label) for record, label in found if record.label is not None]
    figures = {"accuracy": _percent([right for _, right in rights])}
    for name in sorted({group for group, _ in rights if group}):
        figures[f"accuracy_{name}"] = _percent([right for group, right in rights if group == name])
    return figures | {"records": len(rights)}


def normalized(text: str) -> str:
    """A text in lower case without ASCII punctuation and articles, and with single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def question_scores(question: Question, text: str, *, unanswerable: bool) -> tuple[float, float]:
    """Exact match and F1 of an answer, each from 0 to 1, and each against the right answer that it is nearest to.

    With `unanswerable`, as SQuAD 2.0 counts, an empty answer is right if there is none, and right answers that consist
    only of punctuation and articles do not count.
    """
    golds = [normalized(answer.text) for answer in question.answers]
    if unanswerable:
        golds = [gold for gold in golds if gold] or [""]
    answer = normalized(text)
    return float(answer in golds), max((_f1(gold, answer, unanswerable) for gold in golds), default=0.0)


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
) -> dict[str, float]:
    """The figures of the answers, in percent.

    Returns:
        `exact_match`, `f1`, and `records`, the number of questions. SQuAD 1.1 counts questions that have an answer; NaN
        if none has, as in a test set. For 2.0 also `HasAns_exact` and `HasAns_f1` for those with an answer, `NoAns_…`
        for the others, if there are such; and the best figures with another threshold, `best_exact` and `best_f1`, with
        that threshold, `best_exact_thresh` and `best_f1_thresh`.
    """
    pairs = [pair for pair in zip(questions, answers, strict=True) if unanswerable or pair[0].answers]
    scores = [question_scores(question, answer.text, unanswerable=unanswerable) for question, answer in pairs]
    exact, f1 = (_percent([score[which] for score in scores]) for which in (0, 1))
    figures = {"exact_match": exact, "f1": f1, "records": len(scores)}
    if not unanswerable:
        return figures
    for name, has_answer in ("HasAns", True), ("NoAns", False):
        subset = [
            score for score, question in zip(scores, questions, strict=True) if bool(question.answers) == has_answer
        ]
        if subset:
            figures[f"{name}_exact"], figures[f"{name}_f1"] = map(_percent, zip(*subset, strict=True))
    best = [question_scores(question, answer.best, unanswerable=True) for question, answer in pairs]
    for which, name in enumerate(("exact", "f1")):
        found = _best_threshold(questions, answers, [score[which] for score in best])
        figures[f"best_{name}"], figures[f"best_{name}_thresh"] = found
    return figures


def _percent(scores: Sequence[float]) -> float:
    return 100 * sum(scores) / len(scores) if scores else math.nan


def _best_threshold(
    questions: Sequence[Question], answers: Sequence[FoundAnswer], scores: Sequence[float]
) -> tuple[float, float]:
    """The best mean score in percent, and the threshold that gives it: "none" is the answer if `difference` is larger.

    The search is that of the official script: starting with "none" for every question, they are answered one by one,
    the smallest difference first. The threshold is 0 if "none" for all is best. `scores`, 0 to 1, are for each `best`.
    """
    total = best = float(sum(not question.answers for question in questions))
    threshold = 0.0
    for index in sorted(range(len(answers)), key=lambda index: answers[index].difference):
        if questions[index].answers:
            total += scores[index]
        elif answers[index].best:
            total -= 1
        if total > best:
            best, threshold = total, answers[index].difference
    return 100 * best / len(questions), threshold


def check_predictions(path: str, records: Sequence[Record]) -> None:
    """Check that predictions for these records can be written."""
    check_place(path, "--predictions")
    if os.path.lexists(path):
        raise UserError(f"--predictions {path} already exists; valid: a new name")
    names = set()
    for record in records:
        if record.name in names:
            valid = "records with names of their own, such as those of one file"
            raise UserError(f"--predictions: two records have the name {record.name[:60]}; valid: {valid}")
        names.add(record.name)


def write_predictions(path: str, task_name: str, records: Sequence[Record], predictions: Sequence[Any]) -> None:
    """Write the class or option of every record, or the text of its answer, to a new file."""
    assert len(predictions) == len(records), (len(predictions), len(records))
    check_predictions(path, records)
    task = TASKS[task_name]
    names = [record.name for record in records]
    if task.head == "span":
        text = json.dumps(dict(zip(names, predictions, strict=True)), indent=4) + "\n"
    else:
        rows = [f"{name}\t{task.labels[int(label)]}" for name, label in zip(names, predictions, strict=True)]
        text = "\n".join([_HEADERS[task.head], *rows]) + "\n"
    write_atomically(Path(path), text)

"""What the files of predictions score, by the published rules and nothing of megajax."""

import collections
import csv
import json
import re
import string
from pathlib import Path


def by_independent_scorer(task: str, predictions: Path, data: Path) -> dict[str, float]:
    """The figures of a file of predictions."""
    if task.startswith("squad"):
        exact, f1 = squad_percent(predictions, data)
        return {"exact_match": exact, "f1": f1}
    if task == "race":
        passages = [json.loads(line) for line in data.read_text().splitlines()]
        right = {
            f"{passage['id']}#{number}": answer
            for passage in passages
            for number, answer in enumerate(passage["answers"], start=1)
        }
        return {"accuracy": share_right(predictions, right)}
    with data.open(newline="") as rows:
        found = csv.DictReader(rows, delimiter="\t", quoting=csv.QUOTE_NONE)
        right = {row.get("index") or row["id"]: row.get("gold_label") or row["is_duplicate"] for row in found}
    return {"accuracy": share_right(predictions, right)}


def share_right(predictions: Path, right: dict[str, str]) -> float:
    """Percent of the records, by name, that a TSV of predictions has right; it must have all of them and no others."""
    _, *rows = predictions.read_text(encoding="utf-8").splitlines()
    found = dict(row.split("\t") for row in rows)
    assert len(found) == len(rows) and found.keys() == right.keys()
    return 100 * sum(found[name] == label for name, label in right.items()) / len(right)


def squad_percent(predictions: Path, data: Path) -> tuple[float, float]:
    """Exact match and F1 of a JSON of predictions, as the script of SQuAD 2.0 counts; 1.1 differs nowhere here."""
    found, scores = json.loads(predictions.read_text(encoding="utf-8")), []
    for article in json.loads(data.read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                golds = [answer["text"] for answer in question["answers"]] or [""]
                answer = found.pop(question["id"])
                each = [_exact_and_f1(gold, answer) for gold in golds]
                scores.append((max(exact for exact, _ in each), max(f1 for _, f1 in each)))
    assert not found
    return 100 * sum(exact for exact, _ in scores) / len(scores), 100 * sum(f1 for _, f1 in scores) / len(scores)


def _exact_and_f1(gold: str, answer: str) -> tuple[float, float]:
    a, b = _plain(gold), _plain(answer)
    common = sum((collections.Counter(a) & collections.Counter(b)).values())
    if not a or not b:
        return float(a == b), float(a == b)
    return float(a == b), 2 * common / (len(a) + len(b))


def _plain(text: str) -> list[str]:
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()

"""Small files of every task, made up: words that follow no sense, in the formats of GLUE, SQuAD and RACE."""

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

_WORDS = ["".join(random.Random(n).choices("etaoinshrdlu", k=2 + n % 6)) for n in range(90)]


def text(rng: random.Random, least: int, most: int) -> str:
    """So many words."""
    return " ".join(rng.choices(_WORDS, k=rng.randint(least, most)))


def write_documents(file: Path) -> Path:
    """Sixty documents of one to twelve sentences."""
    rng = random.Random(5)
    texts = [" ".join(text(rng, 3, 9).capitalize() + "." for _ in range(1 + n % 12)) for n in range(60)]
    return _written(file, "".join(json.dumps({"text": each}) + "\n" for each in texts))


def write_mnli(file: Path, count: int, seed: int, first: int = 0) -> Path:
    """Pairs of two genres, one of `matched` and one of `mismatched`, in turn."""
    rng = random.Random(seed)
    rows = ["index\tgenre\tsentence1\tsentence2\tgold_label"]
    for number in range(first, first + count):
        genre = ("fiction", "verbatim")[number % 2]
        label = ("entailment", "neutral", "contradiction")[rng.randrange(3)]
        rows.append(f"{number}\t{genre}\t{text(rng, 2, 30)}\t{text(rng, 2, 12)}\t{label}")
    return _written(file, "\n".join(rows) + "\n")


def write_qqp(file: Path, count: int, seed: int, first: int = 0) -> Path:
    """Pairs of questions, some of which have the same words."""
    rng = random.Random(seed)
    rows = ["id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"]
    for number in range(first, first + count):
        one, other, same = text(rng, 2, 30), text(rng, 2, 12), rng.random() < 0.4
        rows.append(f"{number}\t{2 * number}\t{2 * number + 1}\t{one}?\t{one if same else other}?\t{int(same)}")
    return _written(file, "\n".join(rows) + "\n")


def write_squad(file: Path, count: int, seed: int, first: int = 0, impossible: bool = False) -> Path:
    """Two questions about every context; the longer contexts take several windows. With `impossible` some have no
    answer."""
    rng = random.Random(seed)
    paragraphs, number = [], first
    while number < first + count:
        words = rng.choices(_WORDS, k=rng.choice([8, 20, 70]))
        questions: list[dict[str, Any]] = []
        for _ in range(min(2, first + count - number)):
            begin = rng.randrange(len(words))
            answer, start = " ".join(words[begin : begin + 2]), len(" ".join([*words[:begin], ""]))
            question: dict[str, Any] = {"id": f"q{number}", "question": text(rng, 2, 6) + "?"}
            none = impossible and rng.random() < 0.4
            question["answers"] = [] if none else [{"text": answer, "answer_start": start}]
            questions.append(question | ({"is_impossible": none} if impossible else {}))
            number += 1
        paragraphs.append({"context": " ".join(words), "qas": questions})
    return _written(file, json.dumps({"version": "1", "data": [{"title": "t", "paragraphs": paragraphs}]}))


def write_race(file: Path, count: int, seed: int, first: int = 0) -> Path:
    """Passages of two questions with 2 to 4 options, a line each."""
    rng = random.Random(seed)
    lines, number = [], first
    while number < first + count:
        options = [[text(rng, 1, 3) for _ in range(rng.randint(2, 4))] for _ in range(min(2, first + count - number))]
        passage = {
            "id": f"{('middle', 'high')[len(lines) % 2]}{number}.txt",
            "article": text(rng, 10, 60),
            "questions": [text(rng, 2, 4) + (" _ ." if rng.random() < 0.5 else "?") for _ in options],
            "options": options,
            "answers": ["ABCD"[rng.randrange(len(choice))] for choice in options],
        }
        lines.append(json.dumps(passage))
        number += len(options)
    return _written(file, "\n".join(lines) + "\n")


WRITERS: dict[str, Callable[..., Path]] = {
    "mnli": write_mnli,
    "qqp": write_qqp,
    "squad1": write_squad,
    "squad2": functools.partial(write_squad, impossible=True),
    "race": write_race,
}
"""(file, how many records, seed, number of the first) -> the file."""

SUFFIXES = {"mnli": ".tsv", "qqp": ".tsv", "squad1": ".json", "squad2": ".json", "race": ".jsonl"}


def _written(file: Path, content: str) -> Path:
    file.write_text(content, encoding="utf-8")
    return file

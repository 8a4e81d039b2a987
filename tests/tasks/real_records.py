"""Real records, read by a few lines of their own, and a tokenizer small enough to reckon with."""

import csv
import json
from pathlib import Path

from megajax.data.tokenizer import Tokenizer
from megajax.data.tokenizers import read_wordpiece, wordpiece
from megajax.tasks.records import Answer, Exam, Pair, Question

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SQUAD1, SQUAD2 = "squad/dev-v1.1.json", "squad/dev-v2.0-2articles.json"


def letters() -> Tokenizer:
    """A vocabulary whose words are single letters and digits."""
    return wordpiece({token: number for number, token in enumerate([*SPECIAL, *"abcdefghijklmnopqrstuvwxyz_"])})


def real_tokenizer(folder: Path) -> Tokenizer:
    return read_wordpiece(folder / "bert-uncased" / "vocab.txt")


def squad(file: Path) -> list[Question]:
    return [
        Question(
            each["id"],
            each["question"],
            paragraph["context"],
            tuple(Answer(answer["text"], answer["answer_start"]) for answer in each["answers"]),
        )
        for article in json.loads(file.read_text(encoding="utf-8"))["data"]
        for paragraph in article["paragraphs"]
        for each in paragraph["qas"]
    ]


def race(folder: Path) -> list[Exam]:
    exams = []
    for file in sorted(folder.rglob("*.txt")):
        entry = json.loads(file.read_text(encoding="utf-8"))
        rows = zip(entry["questions"], entry["options"], entry["answers"], strict=True)
        exams += [
            Exam(f"{entry['id']}-{number}", entry["article"], text, tuple(options), "ABCD".index(right))
            for number, (text, options, right) in enumerate(rows)
        ]
    return exams


def pairs(file: Path, first: str, second: str) -> list[Pair]:
    """Of GLUE's TSV, without labels."""
    with file.open(encoding="utf-8", newline="") as rows:
        table = csv.DictReader(rows, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [Pair(str(number), (row[first], row[second]), None) for number, row in enumerate(table)]

"""The readers of the tasks' files that are fuzzed: a line of `TASK_READERS` each."""

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mutations import GZ, ZST, of_one_file
from saved_tokenizers import write_saved

from megajax.data.tasks.instructions import InstructionRows
from megajax.data.tasks.preferences import PreferenceRows
from megajax.data.tasks.records import Pair
from megajax.data.tasks.registry import TaskConfig
from megajax.data.tasks.samples import read_records
from megajax.data.text.tokenizer import Tokenizer
from megajax.data.text.tokenizers import load_tokenizer

_WORDS = [f'word{n} and {n * n} "é"' for n in range(12)]


def _read(task: str) -> Callable[[Path], object]:
    def read(path: Path) -> None:
        records = read_records(task, [str(path)], TaskConfig(), "--data.train")
        assert records.entries and all(isinstance(record, Pair) or record.context for record in records.entries)
        assert all(len(line.splitlines()) == 1 for line in records.lines())
        str(records.entries).encode()

    return read


def _rows(*columns: str, labels: tuple[str, ...]) -> str:
    rows = [(str(n), "telephone", text, text[::-1], labels[n % len(labels)]) for n, text in enumerate(_WORDS)]
    return "".join("\t".join(row) + "\n" for row in [columns, *rows])


_MNLI = _rows("index", "genre", "sentence1", "sentence2", "gold_label", labels=("neutral", "entailment", "-"))
_QQP = _rows("id", "more", "question1", "question2", "is_duplicate", labels=("0", "1"))


def _squad(**more: Any) -> str:
    paragraphs = []
    for number, text in enumerate(_WORDS):
        answers = [{"text": "word", "answer_start": 0}, {"text": "and", "answer_start": text.index("and")}]
        asked = {"question": f" What is {number}?", "id": str(number), "answers": answers} | more
        paragraphs.append({"context": text, "qas": [asked, asked | {"id": f"other {number}"}]})
    return json.dumps({"version": "v2.0", "data": [{"title": "t", "paragraphs": paragraphs}]})


def _passage(number: int) -> dict[str, Any]:
    options = [["yes", "no"], ["a", "b", "c", "d"], ["one"]]
    found = {"id": f"middle{number}.txt", "article": "\n".join(_WORDS), "options": options, "answers": ["B", "D", "A"]}
    return found | {"questions": ["Is _ it?", "Which?", "What?"]}


_LINES = "".join(json.dumps(_passage(number)) + "\n" for number in range(6))


def _read_instructions(file: Path) -> None:
    records = read_records("instructions", [str(file)], TaskConfig(), "--data.train")
    rows = InstructionRows(records.entries, _chatting(), sequence_length=24, seed=1)
    assert all(rows[number]["targets"].max() >= 0 for number in range(len(rows)))


def _read_preferences(file: Path) -> None:
    records = read_records("preferences", [str(file)], TaskConfig(), "--data.train")
    rows = PreferenceRows(records.entries, _chatting(), sequence_length=24)
    assert all({*rows[number]["answer"]} >= {-1, 1} for number in range(len(rows)))


@functools.cache
def _chatting() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return load_tokenizer(write_saved(Path(folder), "qwen"))


_TURNS = [
    {"role": role, "content": text} for role, text in zip(("system", "user", "assistant") * 2, _WORDS, strict=False)
]
_ASKED = [{"messages": _TURNS[:3]}, {"prompt": "a é", "completion": "b"}, {"messages": _TURNS[1:], "source": None}]
_PAIRS = [
    {"prompt": "a é", "chosen": "b", "rejected": "c d"},
    {"prompt": _TURNS[:2], "chosen": _TURNS[2:3], "rejected": [_TURNS[5]]},
    {"chosen": _TURNS[:3], "rejected": [*_TURNS[:2], _TURNS[5]]},
]

TASK_READERS = [
    of_one_file("MNLI", "a.tsv", _MNLI, _read("mnli")),
    of_one_file("QQP", "a.tsv.gz", _QQP, _read("qqp"), GZ),
    of_one_file("SQuAD 1.1", "a.json", _squad(), _read("squad1")),
    of_one_file("SQuAD 2.0", "a.json.zst", _squad(is_impossible=False, plausible_answers=[]), _read("squad2"), ZST),
    of_one_file("RACE: folder", "d/1.txt", json.dumps(_passage(1), indent=1), lambda file: _read("race")(file.parent)),
    of_one_file("instructions", "a.jsonl", "".join(json.dumps(each) + "\n" for each in _ASKED), _read_instructions),
    of_one_file("preferences", "a.jsonl", "".join(json.dumps(each) + "\n" for each in _PAIRS), _read_preferences),
    of_one_file("RACE: lines", "a.jsonl", _LINES, _read("race")),
]

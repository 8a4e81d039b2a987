"""RACE's files as records."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from real_records import read

from megajax.core.errors import UserError
from megajax.data.tasks.records import Exam

OPTIONS = [["Ada", "I", "He", "She"], ["one", "two", "three"], ["no", "yes"]]
PASSAGE = {"article": "Ada\nwrote.", "questions": ["Who _ ?", "How many?", "Is it?"], "options": OPTIONS}


def write(path: Path, name: str | None = None, **change) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    value = PASSAGE | {"answers": ["D", "B", "A"]} | ({} if name is None else {"id": name}) | change
    path.write_text(json.dumps(value))
    return str(path)


def test_a_passage_with_its_questions(tmp_path: Path) -> None:
    records = read("race", write(tmp_path / "1.txt", "high5.txt", more=[1]))
    assert records.entries == [
        Exam("high5.txt#1", "Ada\nwrote.", "Who _ ?", ("Ada", "I", "He", "She"), 3, "high"),
        Exam("high5.txt#2", "Ada\nwrote.", "How many?", ("one", "two", "three"), 1, "high"),
        Exam("high5.txt#3", "Ada\nwrote.", "Is it?", ("no", "yes"), 0, "high"),
    ]
    assert not records.odd


def test_files_of_folders_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = [
        "high/1.txt.gz",
        "high/deep/2.jsonl",
        "high/middle/3.txt",
        "middle/09.json",
        "middle/9.json",
        "middle/9a.txt",
        "middle/10.txt",
        "x.txt",
    ]
    for name in reversed(names[1:]):
        write(tmp_path / "r" / name)
    for name in ("r/.hidden/1.txt", "r/._1.txt", "r/readme.md"):
        write(tmp_path / name, article="")
    (tmp_path / "r" / "high" / "1.txt.gz").write_bytes(gzip.compress((tmp_path / "r" / "x.txt").read_bytes()))
    (tmp_path / "r" / "high" / "deep").rename(tmp_path / "deep")
    for link in ("high/deep", "high/the-same", ".links"):  # each folder is read once
        (tmp_path / "r" / link).symlink_to(tmp_path / "deep")
    (tmp_path / "deep" / "back").symlink_to(tmp_path / "r")
    exams = read("race", tmp_path / "r").entries[::3]
    assert [exam.name for exam in exams] == [f"{tmp_path}/r/{name}#1" for name in names]
    assert [exam.group for exam in exams] == ["high"] * 2 + ["middle"] * 5 + [""]
    (tmp_path / "deep" / "lost").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"^--data\.dev: cannot read .*/high/deep/lost: a link to nowhere: "):
        read("race", tmp_path / "r")


def test_a_passage_on_each_line(tmp_path: Path) -> None:
    lines = [json.dumps(PASSAGE | {"answers": ["A"] * 3, "id": name}) for name in ("middle1.txt", "high2.txt")]
    lines.append(json.dumps(PASSAGE | {"answers": ["A"] * 3}))
    (tmp_path / "dev.jsonl").write_text("\n".join([*lines[:1], "", *lines[1:]]) + "\n")
    names = [exam.name for exam in read("race", tmp_path / "dev.jsonl").entries[::3]]
    assert names == ["middle1.txt#1", "high2.txt#1", f"{tmp_path}/dev.jsonl:4#1"]
    (tmp_path / "one.txt").write_text(json.dumps(json.loads(lines[0]), indent=2))
    assert read("race", tmp_path / "one.txt").entries == read("race", tmp_path / "dev.jsonl").entries[:3]


def test_odd_questions_are_counted(tmp_path: Path) -> None:
    options = [["one"], ["a", ""], []]
    file = write(tmp_path / "1.txt", "a", options=options, answers=["A", "A", "A"])
    again = write(tmp_path / "2.txt", "a")
    records = read("race", file, again)
    assert [record.name for record in records.entries] == ["a#2", f"{again}#1", f"{again}#2", f"{again}#3"]
    assert records.lines() == [
        f"2 questions with fewer than 2 options, skipped, first --data.dev: {file}: question 1",
        f"1 questions with an empty text or option, kept, first --data.dev: {file}: question 2",
        f"1 passages with a duplicate id, named by their file, first --data.dev: {again}",
    ]
    with pytest.raises(UserError, match="question 1: questions with fewer than 2 options, skipped; valid: 2 to 4"):
        read("race", file, strict=True)


def test_a_test_set_has_no_answers(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_text(json.dumps(PASSAGE))
    assert [exam.label for exam in read("race", tmp_path / "1.txt", labelled=False).entries] == [None] * 3
    with pytest.raises(UserError, match='no key "answers"'):
        read("race", tmp_path / "1.txt")


@pytest.mark.parametrize(
    ("folder", "groups", "letters"),
    [
        ("RACE/dev", {"middle": 1436}, (311, 384, 386, 355)),
        ("RACE/train/middle", {"middle": 3697}, (792, 971, 1030, 904)),
        ("RACE/train/high", {"high": 1029}, (232, 263, 282, 252)),
    ],
)
def test_race_itself(folder: str, groups: dict[str, int], letters: tuple[int, ...], test_data: Path) -> None:
    records = read("race", test_data / "race" / folder, strict=True)
    assert Counter(exam.group for exam in records.entries) == groups
    assert Counter(exam.label for exam in records.entries) == dict(enumerate(letters))
    assert len({exam.name for exam in records.entries}) == sum(letters)

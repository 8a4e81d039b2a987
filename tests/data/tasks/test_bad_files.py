"""What cannot be used of the tasks' files: each with the one line that says so."""

import gzip
import json
import os
from pathlib import Path

import pytest
from real_records import read

from megajax.core.errors import UserError
from megajax.data.tasks.registry import TASKS

MNLI = "index\tgenre\tsentence1\tsentence2\tgold_label\n1\tfiction\tA man.\tA dog.\tneutral\n"
QQP = "id\tquestion1\tquestion2\tis_duplicate\n1\tWhy?\tHow?\t0\n"
QUESTION = {"id": "q1", "question": "Who?", "answers": [{"text": "Ada", "answer_start": 0}]}
PASSAGE = {
    "id": "high1.txt",
    "article": "Ada wrote.",
    "questions": ["Who?"],
    "options": [["Ada", "I"]],
    "answers": ["A"],
}


def squad(*questions, **change) -> str:
    paragraph = {"context": "Ada wrote programs.", "qas": list(questions)} | change
    return json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": [paragraph]}]})


def race(**change) -> str:
    return json.dumps({key: value for key, value in (PASSAGE | change).items() if value is not None})


def asked(**change) -> str:
    return squad(QUESTION | change)


SQUAD = squad(QUESTION)
ODD = ": empty, binary, or another format"
AT = f"column {len(SQUAD) + 1} (char {len(SQUAD)})"
Q1 = ": question 1 (id q1)"
LATIN = (MNLI + "2\tf\tA\xe9.\tB.\tneutral\n").encode("latin-1")

BAD = [
    # task, content, message after "--data.dev: FILE"
    ("mnli", "", ODD),
    ("mnli", b"\x00\x01\x02", ODD),
    ("mnli", MNLI.encode("utf-16"), ODD),
    ("mnli", MNLI + "2\tf\tA\xe9.\tB.\tneutral\n", None),  # as UTF-8 this can be read
    ("mnli", LATIN, ":3: not UTF-8 text (at byte 5); valid: UTF-8"),
    ("mnli", MNLI + "2\tf\t\0\tB.\tneutral\n" + "x" * 70_000, ODD),
    ("mnli", MNLI + "\n" * 70_000 + "2\tf\t\0\tB.\tneutral\n", ":70003 contains a NUL character; valid: text"),
    ("mnli", MNLI.splitlines()[0], " has no records"),
    ("mnli", QQP, " looks like a file of qqp, not mnli"),
    ("mnli", SQUAD, " looks like a file of squad1 or squad2, not mnli"),
    ("mnli", "1\tA\n", " has no column sentence1, sentence2, gold_label, only 1, A"),
    ("mnli", "label\tsentence1\tsentence1\tsentence2\n", ': column "sentence1" occurs 2 times; valid: once'),
    ("mnli", MNLI + "2\tfiction\tA\tB\n", ":3: 4 columns; valid: 5, as in the first line"),
    ("mnli", MNLI + "2\tfiction\tA\tB\tmaybe\n", ':3: label "maybe"; valid: entailment, neutral, contradiction'),
    ("mnli", MNLI + "x" * (1 << 20) + "y\n", ": line 3 has more than 1 MiB; valid: at most that"),
    ("qqp", QQP + "2\tWhy?\tHow?\t2\n", ':3: label "2"; valid: 0, 1'),
    ("squad1", "<!DOCTYPE html>", ODD),
    ("squad1", SQUAD + "}", f": not JSON: Extra data: line 1 {AT}"),
    ("squad1", SQUAD.encode() + b"\xff", f": not UTF-8 text (at byte {len(SQUAD)}); valid: UTF-8"),
    ("squad1", "[]", ": the record is not an object; valid: an object"),
    ("squad1", '{"version": 1}', ': no key "data", there are "version"; valid: a list under "data"'),
    ("squad1", '{"data": []}', " has no records"),
    ("squad1", '{"data": {}}', ': "data" is not a list; valid: a list'),
    ("squad1", '{"data": [1]}', ": the article after 0 paragraphs: the record is not an object; valid: an object"),
    ("squad1", squad(QUESTION, context=" \n"), ": paragraph 1: the context is empty; valid: text"),
    ("squad1", squad(QUESTION, context=None), ': paragraph 1: "context" is not text; valid: text'),
    ("squad1", squad(3), ": question 1: the record is not an object; valid: an object"),
    ("squad1", asked(id=1), ': question 1: "id" is not text; valid: text'),
    ("squad1", asked(question=["Who?"]), f'{Q1}: "question" is not text; valid: text'),
    ("squad1", asked(question="\ud800"), f'{Q1}: "question" contains half a character (\\ud800 to \\udfff); valid'),
    ("squad1", squad({"id": "q1", "question": "?"}), f'{Q1}: no key "answers", there are "id", "question"'),
    ("squad1", asked(answers=[{"text": "A", "answer_start": True}]), f'{Q1}: "answer_start" is not a whole number'),
    ("squad2", asked(answers=[{"text": " ", "answer_start": 3}]), f"{Q1}: an answer is empty"),
    ("squad1", asked(answers=["Ada"]), f"{Q1}: an answer is not an object; valid: an object"),
    ("squad1", asked(answers=[]), f"{Q1} has no answer; valid: at least one, or squad2 for questions without"),
    ("squad1", asked(is_impossible=True, answers=[]), f"{Q1} is impossible, so this looks like a squad2 file"),
    ("squad2", asked(is_impossible=1), f'{Q1}: "is_impossible" is not true or false; valid: true or false'),
    ("squad1", squad(QUESTION, QUESTION), ": question 2 (id q1) has the same id as of FILE, question 1; valid: every"),
    ("race", SQUAD, " looks like a file of squad1 or squad2, not race"),
    ("race", '{"questions": []}', ': no key "article", there are "questions"; valid: text under "article"'),
    ("race", race(article=" "), ": the article is empty; valid: text"),
    ("race", race(questions="Who?"), ': "questions" is not a list; valid: a list'),
    ("race", race(questions=[]), ": 0 questions, 1 lists of options, 1 answers; valid: as many of each"),
    ("race", race(questions=[], options=[], answers=[]), " has no records"),
    ("race", race(options=["Ada"]), ': question 1: its entry in "options" is not a list; valid: a list'),
    ("race", race(options=[["Ada", 1]]), ": question 1: an option is not text; valid: text"),
    ("race", race(options=[list("abcde")]), ": question 1 has 5 options; valid: 2 to 4"),
    ("race", race(options=[["Ada"]]), " has no records (1 questions with fewer than 2 options, skipped)"),
    ("race", race(answers=["C"]), ': question 1: answer "C"; valid: A, B'),
    ("race", race(answers=[0]), ": question 1: the answer is not text; valid: text"),
    ("race", race(id="a\nb"), ": the id 'a\\nb' cannot be used as a name; valid: letters and digits"),
]


@pytest.mark.parametrize(("task", "content", "message"), BAD, ids=[f"{task}-{n}" for n, (task, *_) in enumerate(BAD)])
def test_a_bad_file_is_one_line(task: str, content: str | bytes, message: str | None, tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    if message is None:
        assert read(task, file).entries
        return
    with pytest.raises(UserError) as caught:
        read(task, file)
    assert str(caught.value).startswith(f"--data.dev: {file}{message}".replace("FILE", str(file)))
    assert "; valid: " in str(caught.value)


@pytest.mark.parametrize("task", TASKS)
def test_what_is_no_file_is_one_line(task: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.gz").write_bytes(gzip.compress(SQUAD.encode() * 99)[:-9])
    (tmp_path / "b.gz").write_text(SQUAD)
    folder = " has no files; valid: files that end in " if TASKS[task].suffixes else " is a folder; valid: a file of "
    expected = {
        "missing": " does not exist; valid: a file of ",
        "pipe": " is a named pipe; valid: a file of ",
        "folder": folder,
        "a.gz": ": truncated or damaged: Compressed file ended before the end-of-stream marker was reached; valid: ",
        "b.gz": ": truncated or damaged: Not a gzipped file (b'{\"'); valid: the complete file",
    }
    for name, problem in expected.items():
        with pytest.raises(UserError) as caught:
            read(task, tmp_path / name)
        assert str(caught.value).startswith(f"--data.dev: {tmp_path / name}{problem}")
    (tmp_path / "a.tsv").write_text(QQP)
    (tmp_path / "b.tsv").symlink_to(tmp_path / "a.tsv")
    for paths, problem in (
        ([], "--data.dev is not given; valid: "),
        ([""], "--data.dev is empty; valid: a path"),
        ([str(tmp_path / "a.tsv"), str(tmp_path / "b.tsv")], r".*/b\.tsv is named twice; valid: every file once$"),
    ):
        with pytest.raises(UserError, match=f"^{problem}"):
            read(task, *paths)

"""SQuAD's files as records."""

import json
from pathlib import Path

import pytest
from real_records import SQUAD1, SQUAD2, read

from megajax.core.errors import UserError
from megajax.data.tasks.records import NOT_THERE, Answer, Question

CONTEXT = "Émile Zola wrote novels."


def write(path: Path, *questions, beginning: str = "") -> str:
    value = {"data": [{"title": "t", "paragraphs": [{"context": CONTEXT, "qas": list(questions)}]}]}
    path.write_text(beginning + json.dumps(value, ensure_ascii=False), encoding="utf-8")
    return str(path)


def asked(name: str = "q", *answers: tuple[str, int], **more):
    found = [{"text": text, "answer_start": start} for text, start in answers]
    return {"id": name, "question": " \tWho wrote? ", "answers": found} | more


def question(name: str = "q", *answers: tuple[str, int]) -> Question:
    return Question(name, "Who wrote? ", CONTEXT, tuple(Answer(*answer) for answer in answers))


def test_records_of_both_releases(tmp_path: Path) -> None:
    answers = [("Émile Zola", 0), ("Zola", 6)]
    first = write(tmp_path / "1", asked("a", *answers, evidences=[1]), asked("b", ("novels.", 17)), beginning="\ufeff")
    records = read("squad1", first)
    assert records.entries == [question("a", *answers), question("b", ("novels.", 17))] and not records.odd
    assert read("squad2", first).entries == records.entries
    plausible = [{"text": "Zola", "answer_start": 6}]
    hard = asked("c", is_impossible=True, plausible_answers=plausible)
    second = write(tmp_path / "2", hard, asked("d", *answers, is_impossible=False), asked("e"))
    expected = [*records.entries, question("c"), question("d", *answers), question("e")]
    both = read("squad2", first, second, strict=True)
    assert both.entries == expected and not both.odd


def test_answers_not_at_their_offset_count_but_are_not_trained_on(tmp_path: Path) -> None:
    wrong = ("Zola", 5), ("zola", 6), ("novels.", -7), ("novels.", 10**30), ("novels.x", 17)
    file = write(tmp_path / "f", asked("a", *wrong, ("Zola", 6)), asked("b", wrong[0]), asked("c", ("Zola", 6)))
    records = read("squad1", file)
    assert [answer.start for answer in records.entries[0].answers] == [6] + [NOT_THERE] * 5
    assert [answer.text for answer in records.entries[0].answers] == ["Zola", *(text for text, _ in wrong)]
    assert records.entries[1:] == [question("b", ("Zola", NOT_THERE)), question("c", ("Zola", 6))]
    what = "answers that are not at their stated offset, not trained on"
    assert records.lines() == [f"6 {what}, first --data.dev: {file}: question 1 (id a)"]
    with pytest.raises(UserError, match=rf"question 1 \(id a\): {what}; valid: .*, or --no-task\.strict$"):
        read("squad1", file, strict=True)


def test_odd_questions_are_kept_and_counted(tmp_path: Path) -> None:
    both = asked("b", ("Zola", 6), is_impossible=True)
    file = write(tmp_path / "f", asked("a", is_impossible=False), both, asked("c", question="  "))
    records = read("squad2", file)
    assert [record.answers for record in records.entries] == [(), (), ()]
    assert records.entries[2].text == ""
    odd = {
        "questions without answers that are not marked impossible, taken as impossible": "question 1 (id a)",
        "impossible questions with answers, taken as impossible": "question 2 (id b)",
        "empty questions, kept": "question 3 (id c)",
    }
    assert records.odd == {what: (1, f"--data.dev: {file}: {where}") for what, where in odd.items()}


def test_a_test_set_has_no_answers(tmp_path: Path) -> None:
    file = write(tmp_path / "f", {"id": "q", "question": "Who wrote? "})
    assert read("squad1", file, labelled=False).entries == [question()]


def test_squad_itself(test_data: Path) -> None:
    """The official dev file of 1.1, whole; a part of it; two articles of 2.0."""
    whole = {record.name: record for record in read("squad1", test_data / SQUAD1, strict=True).entries}
    assert len(whole) == 10570 and len({record.context for record in whole.values()}) == 2067
    assert all(record.answers for record in whole.values())
    part = read("squad1", test_data / "squad/expmrc-squad-dev.json", strict=True).entries
    assert len(part) == 501 and all(record.context == whole[record.name].context for record in part)
    second = read("squad2", test_data / SQUAD2, strict=True).entries
    assert len(second) == 706 and sum(not record.answers for record in second) == 320

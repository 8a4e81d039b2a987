"""SQuAD's JSON files, 1.1 and 2.0: questions about a paragraph, with the span of it that answers them."""

from collections.abc import Iterator
from typing import Any

from megajax.errors import UserError
from megajax.tasks.records import NOT_THERE, Answer, Question
from megajax.tasks.registry import TASKS
from megajax.tasks.sources import TaskFile, checked, entry, parsed


def read_squad(file: TaskFile) -> None:
    """Read the questions of a file.

    What is left of a question's first word is stripped, as in Hugging Face's example. An answer that is not at its
    offset counts as right, as for the official scorer, but is not trained on: it comes after those that are, with the
    start `NOT_THERE`. Where answers need not be there, questions without the key `answers` have none.
    """
    records, names = file.records, file.records.names
    value = parsed(file.text(), file.place, file.task)
    for number, (context, found) in enumerate(_found(value, file.place), start=1):
        place = f"{file.place}: question {number}"
        name = entry(found, "id", str, place)
        place += f" (id {name[:60]})"
        if name in names:
            raise UserError(f"{place} has the id of another, {names[name]}; valid: every id once")
        names[name] = f"of {file.path}, question {number}"
        text = entry(found, "question", str, place).lstrip()
        if not text:
            records.note("questions that are empty, kept", place, "a question")
        records.entries.append(Question(name, text, context, _answers(found, context, file, place)))


def _found(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Every question as the file has it, with its context."""
    number = 0
    for article in entry(value, "data", list, place):
        for paragraph in entry(article, "paragraphs", list, f"{place}: the article after {number} paragraphs"):
            number += 1
            at = f"{place}: paragraph {number}"
            context = entry(paragraph, "context", str, at)
            if not context.strip():
                raise UserError(f"{at}: the context is empty; valid: text")
            for question in entry(paragraph, "qas", list, at):
                yield context, question


def _answers(found: dict[str, Any], context: str, file: TaskFile, place: str) -> tuple[Answer, ...]:
    records, unanswerable = file.records, TASKS[file.task].unanswerable
    is_impossible = "is_impossible" in found and entry(found, "is_impossible", bool, place)
    if is_impossible and not unanswerable:
        valid = f"{TASKS['squad1'].files}, every question with an answer"
        raise UserError(f"{place} is impossible, so this looks like a file of squad2, not of squad1; valid: {valid}")
    if "answers" not in found and (is_impossible or not file.labelled):
        return ()
    answers = [_answer(answer, context, place) for answer in entry(found, "answers", list, place)]
    if is_impossible:
        if answers:
            records.note("questions that are impossible and have answers, taken as impossible", place, "one of both")
        return ()
    if not answers and not unanswerable and file.labelled:
        raise UserError(f"{place} has no answer; valid: at least one, or squad2 for questions without")
    if not answers and unanswerable and "is_impossible" in found:
        records.note("questions that are possible and have no answers, taken as impossible", place, "one of both")
    for answer in answers:
        if answer.start == NOT_THERE:
            records.note("answers that are not at their offset, not trained on", place, "the offset in characters")
    return tuple(sorted(answers, key=lambda answer: answer.start == NOT_THERE))


def _answer(found: Any, context: str, place: str) -> Answer:
    text = entry(checked(found, dict, place, "an answer"), "text", str, place)
    start = entry(found, "answer_start", int, place)
    if not text.strip():
        raise UserError(f'{place}: an answer is empty; valid: text, or "is_impossible": true in squad2')
    there = 0 <= start <= len(context) and context.startswith(text, start)
    return Answer(text, start if there else NOT_THERE)

"""SQuAD's JSON files, 1.1 and 2.0: questions about a paragraph, with the span of it that answers them."""

from collections.abc import Iterator, Sequence
from typing import Any

from megajax.errors import UserError
from megajax.tasks.config import TaskConfig
from megajax.tasks.records import NOT_THERE, Answer, Question, Records
from megajax.tasks.registry import TASKS
from megajax.tasks.sources import VALID, check_beginning, checked, entry, parsed, task_files, whole_text

_TASKS = [name for name, task in TASKS.items() if task.head == "span"]


def read_squad(
    task: str, paths: Sequence[str], config: TaskConfig, flag: str, *, labelled: bool = True
) -> Records[Question]:
    """The questions of files, in their order.

    What is left of a question's first word is stripped, as in Hugging Face's example. An answer that is not at its
    offset counts as right, as for the official scorer, but is not trained on: it comes after those that are, with the
    start `NOT_THERE`.

    Args:
        task: one of the tasks that these files are of.
        paths: JSON files.
        config: whether odd records end the reading.
        flag: that named the paths, for error messages.
        labelled: whether questions must have the key `answers`; without it they have none.

    Raises:
        UserError: a file cannot be used, or a record in it; the message has its number and id.
    """
    impossible = TASKS[task].unanswerable
    records: Records[Question] = Records(strict=config.strict)
    places: dict[str, str] = {}
    for file in task_files(paths, task, flag):
        check_beginning(file, _TASKS, flag)
        value = parsed(whole_text(file, flag), f"{flag}: {file}", task)
        number = 0
        for context, found in _found(value, f"{flag}: {file}"):
            number += 1
            place = f"{flag}: {file}: question {number}"
            name = entry(found, "id", str, place)
            place += f" (id {name[:60]})"
            if name in places:
                raise UserError(f"{place} has the id of another, {places[name]}; valid: every id once")
            places[name] = f"of {file}, question {number}"
            text = entry(found, "question", str, place).lstrip()
            if not text:
                records.note("questions that are empty, kept", place, "a question")
            answers = _answers(found, context, place, impossible, labelled, records)
            records.entries.append(Question(name, text, context, answers))
        if not number:
            raise UserError(f"{flag}: {file} has no questions; valid: {VALID[task]}")
    return records


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


def _answers(
    found: dict[str, Any], context: str, place: str, impossible: bool, labelled: bool, records: Records[Question]
) -> tuple[Answer, ...]:
    said = "is_impossible" in found and entry(found, "is_impossible", bool, place)
    if said and not impossible:
        valid = f"{VALID['squad1']}, every question with an answer"
        raise UserError(f"{place} is impossible, so this looks like a file of squad2, not of squad1; valid: {valid}")
    if "answers" not in found and (said or not labelled):
        return ()
    answers = [_answer(answer, context, place) for answer in entry(found, "answers", list, place)]
    if said:
        if answers:
            records.note("questions that are impossible and have answers, taken as impossible", place, "one of both")
        return ()
    if not answers and not impossible and labelled:
        raise UserError(f"{place} has no answer; valid: at least one, or squad2 for questions without")
    if not answers and impossible and "is_impossible" in found:
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

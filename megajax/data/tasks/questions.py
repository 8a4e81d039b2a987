"""Questions in JSON files: SQuAD 1.1 and 2.0, answered with a span of text; RACE exams, with options to choose from."""

import io
import re
from collections.abc import Iterator
from typing import Any

from megajax.core.errors import UserError
from megajax.data.tasks.records import NOT_THERE, Answer, Exam, Question
from megajax.data.tasks.registry import TASKS
from megajax.data.tasks.sources import TaskFile, checked, entry, parsed
from megajax.host import reading

_GROUPS = ("middle", "high")
_GROUP = re.compile(r"(middle|high)[0-9]")
_LETTERS = TASKS["race"].labels


def read_squad(file: TaskFile) -> None:
    """Read the questions in a file.

    White space before a question is stripped, as in Hugging Face's example. An answer that is not at its offset counts
    as right, as in the official scorer, but is not trained on: it is listed last, with the start `NOT_THERE`. If
    questions may be unanswerable, those without the key `answers` have none.
    """
    records, names = file.records, file.records.names
    value = parsed(file.text(), file.place, file.task)
    for number, (context, found) in enumerate(_found(value, file.place), start=1):
        place = f"{file.place}: question {number}"
        name = entry(found, "id", str, place)
        place += f" (id {name[:60]})"
        if name in names:
            raise UserError(f"{place} has the same id as {names[name]}; valid: every id once")
        names[name] = f"of {file.path}, question {number}"
        text = entry(found, "question", str, place).lstrip()
        if not text:
            records.note("empty questions, kept", place, "a question")
        records.entries.append(Question(name, text, context, _answers(found, context, file, place)))


def _found(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Every question as in the file, with its context."""
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
        raise UserError(f"{place} is impossible, so this looks like a squad2 file, not squad1; valid: {valid}")
    if "answers" not in found and (is_impossible or not file.labelled):
        return ()
    answers = [_answer(answer, context, place) for answer in entry(found, "answers", list, place)]
    if is_impossible:
        if answers:
            records.note("impossible questions with answers, taken as impossible", place, "one of both")
        return ()
    if not answers and not unanswerable and file.labelled:
        raise UserError(f"{place} has no answer; valid: at least one, or squad2 for questions without")
    if not answers and unanswerable and "is_impossible" in found:
        records.note(
            "questions without answers that are not marked impossible, taken as impossible", place, "one of both"
        )
    for answer in answers:
        if answer.start == NOT_THERE:
            records.note(
                "answers that are not at their stated offset, not trained on", place, "the offset in characters"
            )
    return tuple(sorted(answers, key=lambda answer: answer.start == NOT_THERE))


def _answer(found: Any, context: str, place: str) -> Answer:
    text = entry(checked(found, dict, place, "an answer"), "text", str, place)
    start = entry(found, "answer_start", int, place)
    if not text.strip():
        raise UserError(f'{place}: an answer is empty; valid: text, or "is_impossible": true in squad2')
    there = 0 <= start <= len(context) and context.startswith(text, start)
    return Answer(text, start if there else NOT_THERE)


def read_race(file: TaskFile) -> None:
    """Read the questions in a file, which has one passage, or one per line. Questions with fewer than 2 options are
    skipped and counted. The group follows from the passage's id, or else from the folders that contain the file."""
    text = file.text()
    if not _is_lines(text):
        _add_questions(parsed(text, file.place, file.task), file, file.place)
        return
    for number, line in enumerate(io.StringIO(text, newline="\n"), start=1):
        if line.strip():
            place = f"{file.place}:{number}"
            _add_questions(parsed(line, place, file.task), file, place)


def _is_lines(text: str) -> bool:
    """Whether a text has one JSON object per line."""
    first, _, rest = text.lstrip().partition("\n")
    if not rest.strip():
        return False
    try:
        return isinstance(reading.parse_json(first), dict)
    except ValueError:
        return False


def _passage_name(passage: dict[str, Any], file: TaskFile, place: str) -> str:
    """The passage's id, or its place if it has no id or another passage has the same one."""
    names, own = file.records.names, place.removeprefix(f"{file.flag}: ")
    name = entry(passage, "id", str, place) if "id" in passage else own
    if name in names:
        file.records.note("passages with a duplicate id, named by their file", place, "every id once")
        name = own
    if name in names or not name.isprintable() or not name:
        raise UserError(f"{place}: the id {name[:60]!r} cannot be used as a name; valid: letters and digits")
    names[name] = place
    return name


def _add_questions(found: Any, file: TaskFile, place: str) -> None:
    passage = checked(found, dict, place, "the record")
    name = _passage_name(passage, file, place)
    of_name, folders = _GROUP.match(name), reversed(file.path.parent.parts)
    group = of_name[1] if of_name else next((folder for folder in folders if folder in _GROUPS), "")
    article = entry(passage, "article", str, place)
    if not article.strip():
        raise UserError(f"{place}: the article is empty; valid: text")
    questions, options = entry(passage, "questions", list, place), entry(passage, "options", list, place)
    has_answers = file.labelled or "answers" in passage
    answers = entry(passage, "answers", list, place) if has_answers else [None] * len(questions)
    if not len(questions) == len(options) == len(answers):
        counts = f"{len(questions)} questions, {len(options)} lists of options, {len(answers)} answers"
        raise UserError(f"{place}: {counts}; valid: as many of each")
    for number, (text, choice, answer) in enumerate(zip(questions, options, answers, strict=True), start=1):
        at = f"{place}: question {number}"
        text = checked(text, str, at, "the question")
        choice = tuple(
            checked(option, str, at, "an option") for option in checked(choice, list, at, 'its entry in "options"')
        )
        if len(choice) > len(_LETTERS):
            raise UserError(f"{at} has {len(choice)} options; valid: 2 to {len(_LETTERS)}")
        if len(choice) < 2:
            file.records.note("questions with fewer than 2 options, skipped", at, "2 to 4 options")
            continue
        if not text.strip() or not all(option.strip() for option in choice):
            file.records.note("questions with an empty text or option, kept", at, "text")
        label = _label(answer, len(choice), at) if has_answers else None
        file.records.entries.append(Exam(f"{name}#{number}", article, text, choice, label, group))


def _label(answer: Any, count: int, place: str) -> int:
    letter = checked(answer, str, place, "the answer")
    if letter not in _LETTERS[:count]:
        raise UserError(f'{place}: answer "{letter[:40]}"; valid: {", ".join(_LETTERS[:count])}')
    return _LETTERS.index(letter)

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
    value = parsed(file.text(), file.where, file.task)
    for index, (context, question) in enumerate(_questions(value, file.where), start=1):
        where = f"{file.where}: question {index}"
        name = entry(question, "id", str, where)
        where += f" (id {name[:60]})"
        if name in names:
            raise UserError(f"{where} has the same id as {names[name]}; valid: every id once")
        names[name] = f"of {file.path}, question {index}"
        text = entry(question, "question", str, where).lstrip()
        if not text:
            records.note("empty questions, kept", where, "a question")
        records.entries.append(Question(name, text, context, _answers(question, context, file, where)))


def _questions(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Every question as in the file, with its context."""
    count = 0
    for article in entry(value, "data", list, where):
        for paragraph in entry(article, "paragraphs", list, f"{where}: the article after {count} paragraphs"):
            count += 1
            at = f"{where}: paragraph {count}"
            context = entry(paragraph, "context", str, at)
            if not context.strip():
                raise UserError(f"{at}: the context is empty; valid: text")
            for question in entry(paragraph, "qas", list, at):
                yield context, question


def _answers(question: dict[str, Any], context: str, file: TaskFile, where: str) -> tuple[Answer, ...]:
    records, unanswerable = file.records, TASKS[file.task].unanswerable
    is_impossible = "is_impossible" in question and entry(question, "is_impossible", bool, where)
    if is_impossible and not unanswerable:
        valid = f"{TASKS['squad1'].files}, every question with an answer"
        raise UserError(f"{where} is impossible, so this looks like a squad2 file, not squad1; valid: {valid}")
    if "answers" not in question and (is_impossible or not file.labelled):
        return ()
    answers = [_answer(answer, context, where) for answer in entry(question, "answers", list, where)]
    if is_impossible:
        if answers:
            records.note("impossible questions with answers, taken as impossible", where, "one of both")
        return ()
    if not answers and not unanswerable and file.labelled:
        raise UserError(f"{where} has no answer; valid: at least one, or squad2 for questions without")
    if not answers and unanswerable and "is_impossible" in question:
        records.note(
            "questions without answers that are not marked impossible, taken as impossible", where, "one of both"
        )
    for answer in answers:
        if answer.start == NOT_THERE:
            records.note(
                "answers that are not at their stated offset, not trained on", where, "the offset in characters"
            )
    return tuple(sorted(answers, key=lambda answer: answer.start == NOT_THERE))


def _answer(answer: Any, context: str, where: str) -> Answer:
    text = entry(checked(answer, dict, where, "an answer"), "text", str, where)
    start = entry(answer, "answer_start", int, where)
    if not text.strip():
        raise UserError(f'{where}: an answer is empty; valid: text, or "is_impossible": true in squad2')
    there = 0 <= start <= len(context) and context.startswith(text, start)
    return Answer(text, start if there else NOT_THERE)


def read_race(file: TaskFile) -> None:
    """Read the questions in a file, which has one passage, or one per line. Questions with fewer than 2 options are
    skipped and counted. The group follows from the passage's id, or else from the folders that contain the file."""
    text = file.text()
    if not _is_lines(text):
        _add_questions(parsed(text, file.where, file.task), file, file.where)
        return
    for number, line in enumerate(io.StringIO(text, newline="\n"), start=1):
        if line.strip():
            where = f"{file.where}:{number}"
            _add_questions(parsed(line, where, file.task), file, where)


def _is_lines(text: str) -> bool:
    """Whether a text has one JSON object per line."""
    first, _, rest = text.lstrip().partition("\n")
    if not rest.strip():
        return False
    try:
        return isinstance(reading.parse_json(first), dict)
    except ValueError:
        return False


def _passage_name(passage: dict[str, Any], file: TaskFile, where: str) -> str:
    """The passage's id, or its place if it has no id or another passage has the same one."""
    names, default = file.records.names, where.removeprefix(f"{file.flag}: ")
    name = entry(passage, "id", str, where) if "id" in passage else default
    if name in names:
        file.records.note("passages with a duplicate id, named by their file", where, "every id once")
        name = default
    if name in names or not name.isprintable() or not name:
        raise UserError(f"{where}: the id {name[:60]!r} cannot be used as a name; valid: letters and digits")
    names[name] = where
    return name


def _add_questions(found: Any, file: TaskFile, where: str) -> None:
    passage = checked(found, dict, where, "the record")
    name = _passage_name(passage, file, where)
    of_name, folders = _GROUP.match(name), reversed(file.path.parent.parts)
    group = of_name[1] if of_name else next((folder for folder in folders if folder in _GROUPS), "")
    article = entry(passage, "article", str, where)
    if not article.strip():
        raise UserError(f"{where}: the article is empty; valid: text")
    questions, options = entry(passage, "questions", list, where), entry(passage, "options", list, where)
    has_answers = file.labelled or "answers" in passage
    answers = entry(passage, "answers", list, where) if has_answers else [None] * len(questions)
    if not len(questions) == len(options) == len(answers):
        counts = f"{len(questions)} questions, {len(options)} lists of options, {len(answers)} answers"
        raise UserError(f"{where}: {counts}; valid: as many of each")
    for index, (text, choice, answer) in enumerate(zip(questions, options, answers, strict=True), start=1):
        at = f"{where}: question {index}"
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
        file.records.entries.append(Exam(f"{name}#{index}", article, text, choice, label, group))


def _label(answer: Any, count: int, where: str) -> int:
    letter = checked(answer, str, where, "the answer")
    if letter not in _LETTERS[:count]:
        raise UserError(f'{where}: answer "{letter[:40]}"; valid: {", ".join(_LETTERS[:count])}')
    return _LETTERS.index(letter)

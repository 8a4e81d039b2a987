"""RACE's JSON files: exams, questions about a passage with options to choose from."""

import re
from typing import Any

from megajax.errors import UserError
from megajax.host import reading
from megajax.tasks.records import Exam
from megajax.tasks.registry import TASKS
from megajax.tasks.sources import TaskFile, checked, entry, parsed

_GROUPS = ("middle", "high")
_GROUP = re.compile(r"(middle|high)[0-9]")
_LETTERS = TASKS["race"].labels


def read_race(file: TaskFile) -> None:
    """Read the questions of a file: of one passage, or of one on each line.

    Questions with fewer than 2 options are left out and counted. The group is by the passage's id, or else by the
    folders that the file is in.
    """
    text = file.text()
    if not _is_lines(text):
        _add_questions(parsed(text, file.place, file.task), file, file.place)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{file.place}:{number}"
            _add_questions(parsed(line, place, file.task), file, place)


def _is_lines(text: str) -> bool:
    """Whether a text has one JSON object on each line."""
    first, _, rest = text.lstrip().partition("\n")
    if not rest.strip():
        return False
    try:
        return isinstance(reading.parse_json(first), dict)
    except ValueError:
        return False


def _name(passage: dict[str, Any], file: TaskFile, place: str) -> str:
    """The passage's id, or its place where it has none, or one that another passage has."""
    names, own = file.records.names, place.removeprefix(f"{file.flag}: ")
    name = entry(passage, "id", str, place) if "id" in passage else own
    if name in names:
        file.records.note("passages with an id that another has, named by their file", place, "every id once")
        name = own
    if name in names or not name.isprintable() or not name:
        raise UserError(f"{place}: the id {name[:60]!r} cannot be a name of its own; valid: letters and digits")
    names[name] = place
    return name


def _add_questions(found: Any, file: TaskFile, place: str) -> None:
    passage = checked(found, dict, place, "the record")
    name = _name(passage, file, place)
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

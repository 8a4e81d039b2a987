"""JSON lines of what is asked and answered: `prompt` and `completion`, or the `messages` of a conversation."""

from collections.abc import Sequence
from typing import Any

from megajax import reading
from megajax.errors import UserError
from megajax.tasks.config import TaskConfig
from megajax.tasks.records import Instruction, Records
from megajax.tasks.sources import VALID, check_beginning, checked, decoded, entry, opened, parsed, task_files

_NAME = "instructions"
_SUFFIXES = (".jsonl", ".json", ".ndjson")


def read_instructions(
    paths: Sequence[str], config: TaskConfig, flag: str, *, labelled: bool = True
) -> Records[Instruction]:
    """The records of files, one on each line, in their order. `messages` decide where a line has both forms.

    Records without anything that the model should say are left out and counted.

    Args:
        paths: files, and folders of such files.
        config: whether odd records end the reading.
        flag: that named the paths, for error messages.
        labelled: they always have what the model should say.

    Raises:
        UserError: a file cannot be used, or a record in it; the message has the line.
    """
    records: Records[Instruction] = Records(strict=config.strict)
    for file in task_files(paths, _NAME, flag, _SUFFIXES):
        check_beginning(file, [_NAME], flag)
        with opened(file, flag) as content:
            for number, line in enumerate(reading.lines(content, reading.LINE_BYTES), start=1):
                place = f"{flag}: {file}:{number}"
                text = decoded(line, place).removeprefix("\ufeff")
                if text.strip():
                    _add(parsed(text, place, _NAME), place, records)
    if not records.entries:
        raise UserError(f"{flag}: {paths[0]} has no records; valid: {VALID[_NAME]}")
    return records


def _add(value: Any, place: str, records: Records[Instruction]) -> None:
    found = checked(value, dict, place, "the record")
    if found.get("tools"):
        raise UserError(f'{place}: "tools" are not given to the chat template; valid: messages without them')
    if "messages" not in found:
        prompt, completion = entry(found, "prompt", str, place), entry(found, "completion", str, place)
        if completion:
            records.entries.append(Instruction(place, prompt, completion))
        else:
            records.note("records with an empty completion, skipped", place, "text")
        return
    messages = tuple(
        _message(message, f"{place}: message {number}")
        for number, message in enumerate(entry(found, "messages", list, place), start=1)
    )
    if any(message["role"] == "assistant" for message in messages):
        records.entries.append(Instruction(place, messages=messages))
    else:
        records.note("records without a message of the assistant, skipped", place, 'one with "role": "assistant"')


def _message(value: Any, place: str) -> dict[str, Any]:
    message = checked(value, dict, place, "the message")
    return message | {key: entry(message, key, str, place) for key in ("role", "content")}

"""JSON lines of what is asked and answered: `prompt` and `completion`, or the `messages` of a conversation."""

from typing import Any

from megajax.errors import UserError
from megajax.host import reading
from megajax.tasks.records import Instruction, Records
from megajax.tasks.registry import TASKS
from megajax.tasks.sources import TaskFile, checked, decoded, entry, parsed


def read_instructions(file: TaskFile) -> None:
    """Read the records of a file, one on each line; `messages` decide where a line has both forms.

    Records without anything that the model should say are left out and counted.
    """
    for line, place in file.lines(reading.LINE_BYTES):
        text = decoded(line, place).removeprefix("\ufeff")
        if text.strip():
            _add(parsed(text, place, file.task), place, file.records)


def _add(value: Any, place: str, records: Records) -> None:
    found = checked(value, dict, place, "the record")
    if found.get("tools"):
        raise UserError(f'{place}: "tools" are not given to the chat template; valid: messages without them')
    if "messages" not in found:
        if "prompt" not in found:
            raise UserError(f'{place}: no key "prompt" and none "messages"; valid: {TASKS["instructions"].files}')
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

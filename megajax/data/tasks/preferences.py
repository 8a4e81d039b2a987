"""Preferences: JSON lines with `prompt`, `chosen` and `rejected`, as TRL reads them: texts, or lists of messages.
Without `prompt`, and where it is a text beside two conversations, the prompt is what both answers begin with.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megajax.core.batch import CHOSEN, IGNORED, REJECTED, preferences_form
from megajax.core.errors import UserError
from megajax.data.samples.base import Sample
from megajax.data.tasks.inputs import counted
from megajax.data.tasks.instructions import chat_under, check_no_chat, encoded, is_left_out, trained_answers
from megajax.data.tasks.records import Instruction, Preference, Records
from megajax.data.tasks.registry import TASKS
from megajax.data.tasks.sources import TaskFile, checked, decoded, entry, parsed
from megajax.data.text.chat import Chat
from megajax.data.text.tokenizer import Tokenizer
from megajax.host import reading

_SIDES = ("chosen", "rejected")
_TURN = "\n\nAssistant:"  # begins an answer in conversations that are texts, such as Anthropic's HH-RLHF


def read_preferences(file: TaskFile) -> None:
    """Read the pairs in a file, one per line or in an array. Those with equal answers or weight 0 are skipped and
    counted."""
    for line, where in file.objects(reading.LINE_BYTES):
        text = decoded(line, where).removeprefix("\ufeff")
        if not text.strip():
            continue
        fields = checked(parsed(text, where, file.task), dict, where, "the record")
        if missing := set(_SIDES) - fields.keys():
            raise UserError(f'{where}: no "{min(missing)}"; valid: {TASKS["preferences"].files}')
        is_text = any(isinstance(fields[name], str) for name in _SIDES)
        pair = _texts(fields, where) if is_text else _conversations(fields, where, file.records)
        if is_left_out(fields, where) or any(side.messages and not side.answers for side in pair):
            file.records.note("pairs with weight 0, skipped", where, "")
        elif pair[0] == pair[1]:
            file.records.note("pairs with equal answers, skipped", where, "two different answers")
        else:
            file.records.entries.append(Preference(where, *pair))


def _texts(fields: dict[str, Any], where: str) -> list[Instruction]:
    """Both answers to a prompt, as texts. What texts without `prompt` begin with is cut after their last common
    `_TURN`, or before their last common white space, so that no token is cut."""
    check_no_chat(fields, where)
    sides = [entry(fields, name, str, where) for name in _SIDES]
    if fields.get("prompt") is not None:
        return [Instruction(where, entry(fields, "prompt", str, where), side) for side in sides]
    letters = enumerate(zip(*sides, strict=False))
    same = sides[0][: next((index for index, (one, other) in letters if one != other), min(map(len, sides)))]
    turn = same.rfind(_TURN)
    end = turn + len(_TURN) if turn >= 0 else max(same.rfind(" "), same.rfind("\n"), 0)
    return [Instruction(where, side[:end], side[end:]) for side in sides]


def _conversations(fields: dict[str, Any], where: str, records: Records) -> list[Instruction]:
    """Both answers to a prompt, as messages: all of the assistant's after the prompt, where others may be between
    them."""
    chats, prompt, asked = [chat_under(fields, name, where) for name in _SIDES], fields.get("prompt"), 0
    sides = [list(chat.messages) for chat in chats]
    if isinstance(prompt, str) or prompt is None:
        for index, (one, other) in enumerate(zip(*sides, strict=False)):
            asked = index if one["role"] == other["role"] == "assistant" else asked
            if one != other:
                break
        if prompt and prompt.strip() not in (each["content"].strip() for each in sides[0][:asked]):
            records.note("prompts that their conversations lack, ignored", where, "a prompt that the answers follow")
    else:
        given = list(chat_under(fields, "prompt", where).messages)
        asked = len(given)
        sides = sides if all(side[:asked] == given for side in sides) else [given + side for side in sides]
    for name, side in zip(_SIDES, sides, strict=True):
        if not asked or len(side) == asked or side[asked]["role"] != "assistant":
            valid = "messages of the assistant after others, the same for both answers"
            raise UserError(f'{where}: "{name}" does not answer a prompt; valid: {valid}')
    pairs = [(side, [n for n in trained_answers(Chat(side, where)) if n >= asked]) for side in sides]
    return [Instruction(where, "", "", tuple(side), tuple(numbers), chats[0].template_args) for side, numbers in pairs]


class PreferenceRows:
    """Samples of `preferences_form`, one for each pair. A pair that is longer than a row, or with an answer that has no
    token to predict, is left out.

    Attributes:
        reference: what the reference model thinks of every sample; 0 until it is known.
    """

    def __init__(self, records: Sequence[Preference], tokenizer: Tokenizer, *, sequence_length: int) -> None:
        self.sequence_length, self.form = sequence_length, preferences_form()
        self.records: list[Preference] = []
        self._pairs: list[list[tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]]] = []
        sides = [encoded([getattr(each, name) for each in records], tokenizer) for name in ("chosen", "rejected")]
        for record, *pair in zip(records, *sides, strict=True):
            arrays = [(np.array(ids, np.int32), np.array(says[1:], bool)) for ids, says in pair]
            if sum(len(says) for _, says in arrays) <= sequence_length and all(says.any() for _, says in arrays):
                self.records.append(record)
                self._pairs.append(arrays)
        left_out = len(records) - len(self.records)
        self.counts = counted({f"pairs longer than {sequence_length} tokens together, left out": left_out})
        self.reference = np.zeros(len(self.records), np.float32)

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> Sample:
        sample = {name: array[0] for name, array in self.form.padding(1, tokens=self.sequence_length).items()}
        done = 0
        for side, (ids, says) in zip((CHOSEN, REJECTED), self._pairs[index], strict=True):
            span = slice(done, done + len(says))
            sample["tokens"][span], sample["positions"][span] = ids[:-1], np.arange(len(says))
            sample["targets"][span] = np.where(says, ids[1:], np.int32(IGNORED))
            sample["answer"][span] = side * says
            done = span.stop
        return sample | {"reference": self.reference[index]}

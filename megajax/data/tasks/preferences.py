"""Preferences: JSON lines with `prompt`, `chosen` and `rejected`, as TRL reads them: texts, or lists of messages.
Without `prompt`, it is what two conversations begin with.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megajax.core.batch import CHOSEN, IGNORED, REJECTED, preferences_form
from megajax.core.errors import UserError
from megajax.data.samples.base import Sample
from megajax.data.tasks.inputs import counted
from megajax.data.tasks.instructions import encoded, message
from megajax.data.tasks.records import Instruction, Preference
from megajax.data.tasks.registry import TASKS
from megajax.data.tasks.sources import TaskFile, checked, decoded, entry, parsed
from megajax.data.text.tokenizer import Tokenizer
from megajax.host import reading


def read_preferences(file: TaskFile) -> None:
    """Read the pairs in a file, one per line or in an array. Those with equal answers are skipped and counted."""
    for line, place in file.objects(reading.LINE_BYTES):
        text = decoded(line, place).removeprefix("\ufeff")
        if not text.strip():
            continue
        found = checked(parsed(text, place, file.task), dict, place, "the record")
        if missing := {"chosen", "rejected"} - found.keys():
            raise UserError(f'{place}: no "{min(missing)}"; valid: {TASKS["preferences"].files}')
        record = Preference(place, *(_answered(found, name, place) for name in ("chosen", "rejected")))
        if record.chosen == record.rejected:
            file.records.note("pairs with equal answers, skipped", place, "two different answers")
        else:
            file.records.entries.append(record)


def _answered(found: dict[str, Any], name: str, place: str) -> Instruction:
    """A prompt with one of its answers."""
    if isinstance(found[name], str):
        return Instruction(place, entry(found, "prompt", str, place), entry(found, name, str, place))
    sides = [_messages(found, each, place) for each in ("chosen", "rejected")]
    if "prompt" in found:
        asked = _messages(found, "prompt", place)
    else:
        same = [one == other for one, other in zip(*sides, strict=False)]
        asked = sides[0][: [*same, False].index(False)]
    answer = _messages(found, name, place)
    answer = answer if "prompt" in found else answer[len(asked) :]
    if not asked or not answer or any(each["role"] != "assistant" for each in answer):
        raise UserError(f'{place}: "{name}" does not answer a prompt; valid: messages of the assistant after others')
    said = range(len(asked), len(asked) + len(answer))
    return Instruction(place, messages=(*asked, *answer), answers=tuple(said))


def _messages(found: dict[str, Any], name: str, place: str) -> list[dict[str, Any]]:
    given = entry(found, name, list, place)
    return [message(each, f"{place}: {name}, message {number}") for number, each in enumerate(given, start=1)]


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

    def __getitem__(self, number: int) -> Sample:
        sample = {name: array[0] for name, array in self.form.padding(1, tokens=self.sequence_length).items()}
        done = 0
        for side, (ids, says) in zip((CHOSEN, REJECTED), self._pairs[number], strict=True):
            place = slice(done, done + len(says))
            sample["tokens"][place], sample["positions"][place] = ids[:-1], np.arange(len(says))
            sample["targets"][place] = np.where(says, ids[1:], np.int32(IGNORED))
            sample["answer"][place] = side * says
            done = place.stop
        return sample | {"reference": self.reference[number]}

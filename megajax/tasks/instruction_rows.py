"""Instructions as samples: rows of several records, in which only what the model should say is a target.

N records that are trained on, T the sequence length.
"""

import re
from collections.abc import Iterator, Sequence
from datetime import datetime

import numpy as np

from megajax.batch import IGNORED, text_form
from megajax.data.bits import hashed, key_of
from megajax.data.chat import ChatTemplate
from megajax.data.samples import Sample
from megajax.data.tokenizer import Tokenizer
from megajax.errors import UserError
from megajax.tasks.inputs import counted
from megajax.tasks.records import Instruction

TODAY = datetime(2024, 7, 26)
"""The date that chat templates see, fixed so that the same records always give the same tokens."""

_PACKING = 23  # a random stream of its own
_BATCH = 1024  # records that are encoded at a time

Encoded = tuple[list[int], list[bool]]  # ids, and whether each is what the model should say


def packed(lengths_N: Sequence[int], order: Sequence[int], room: int) -> list[list[int]]:
    """Records packed in rows in the given order; a record that does not fit begins the next row."""
    rows: list[list[int]] = []
    left = 0
    for number in order:
        if not rows or lengths_N[number] > left:
            rows.append([])
            left = room
        rows[-1].append(number)
        left -= lengths_N[number]
    assert left >= 0, "a record that is longer than a row"
    return rows


class InstructionRows:
    """Samples of text (`text_form`), each a row of packed records that do not attend to each other.

    A record is its prompt, from the tokenizer's begin, its completion, and the end of text; or its messages as the chat
    template writes them. Targets are the completion and the end, or what the assistant writes. Of a record with more
    than T + 1 tokens the end is cut off; one that then has no targets is left out.

    `seed` is of the order in which records are packed; None: their own.
    """

    def __init__(
        self, records: Sequence[Instruction], tokenizer: Tokenizer, *, sequence_length: int, seed: int | None
    ) -> None:
        self.sequence_length, self.form = sequence_length, text_form(with_positions=True)
        self.records: list[Instruction] = []
        ids, says, lengths = [np.empty(0, np.int32)], [np.empty(0, bool)], [0]
        cut = 0
        for record, (tokens, of_model) in zip(records, encoded(records, tokenizer), strict=True):
            cut += len(tokens) > sequence_length + 1
            fitting = slice(sequence_length + 1)
            if any(of_model[fitting][1:]):
                ids.append(np.array(tokens[fitting], np.int32))
                says.append(np.array(of_model[fitting], bool))
                lengths.append(len(ids[-1]))
                self.records.append(record)
        self._ids, self._says, self._begins = np.concatenate(ids), np.concatenate(says), np.cumsum(lengths)
        count = len(self.records)
        order = np.arange(count)
        if seed is not None:
            order = np.argsort(hashed(order.astype(np.uint64) + key_of(_PACKING, seed)), kind="stable")
        self._rows = packed((np.diff(self._begins) - 1).tolist(), order.tolist(), sequence_length)
        self.owners = np.zeros(count, np.int64)
        for row, numbers in enumerate(self._rows):
            self.owners[numbers] = row
        most, left_out = sequence_length + 1, len(records) - count
        self.counts = counted(
            {
                f"records cut to {most} tokens": cut,
                f"records without what the model should say in their first {most} tokens, left out": left_out,
                "records whose texts have special tokens, which become tokens": _written_out(self.records, tokenizer),
            }
        )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Sample:
        sample = {name: array[0] for name, array in self.form.padding(1, tokens=self.sequence_length).items()}
        done = 0
        for record in self._rows[number]:
            begin, end = self._begins[record], self._begins[record + 1]
            place = slice(done, done + end - begin - 1)
            sample["tokens"][place] = self._ids[begin : end - 1]
            sample["targets"][place] = np.where(self._says[begin + 1 : end], self._ids[begin + 1 : end], IGNORED)
            sample["positions"][place] = np.arange(end - begin - 1)
            done = place.stop
        return sample


def encoded(records: Sequence[Instruction], tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Every record's tokens."""
    template = None
    if tokenizer.chat_template is not None:
        template = ChatTemplate(tokenizer.chat_template, tokenizer.named_tokens, "the tokenizer", TODAY)
    for start in range(0, len(records), _BATCH):
        batch = records[start : start + _BATCH]
        prompts = iter(_prompts([record for record in batch if not record.messages], tokenizer))
        chats = iter(_chats([record for record in batch if record.messages], tokenizer, template))
        for record in batch:
            yield next(chats if record.messages else prompts)


def _prompts(records: Sequence[Instruction], tokenizer: Tokenizer) -> Iterator[Encoded]:
    before = tokenizer.encode_batch([record.prompt for record in records])
    after = tokenizer.encode_continuations([record.completion for record in records])
    for asked, said in zip(before, after, strict=True):
        asked = tokenizer.with_begin(asked) or [tokenizer.end_of_text]
        said = said if said[-1:] == [tokenizer.end_of_text] else [*said, tokenizer.end_of_text]
        yield asked + said, [False] * len(asked) + [True] * len(said)


def _chats(records: Sequence[Instruction], tokenizer: Tokenizer, template: ChatTemplate | None) -> Iterator[Encoded]:
    if records and template is None:
        raise UserError(
            f"{records[0].place}: messages, and the tokenizer has no chat template; valid: prompt and completion, or a "
            "tokenizer with chat_template in its tokenizer_config.json"
        )
    assert template is not None or not records
    ends = [tokenizer.token(number) for number in tokenizer.ends]
    found = [template.conversation(record.messages, record.place, ends) for record in records] if template else []
    encoding = tokenizer.encode_batch_with_offsets([each.text for each in found])
    for conversation, (ids, offsets) in zip(found, encoding, strict=True):
        says = np.zeros(len(conversation.text) + 1, bool)
        for start, stop in conversation.spans:
            says[start:stop] = True
        yield ids, [bool(says[start : max(stop, start + 1)].any()) for start, stop in offsets]


def _written_out(records: Sequence[Instruction], tokenizer: Tokenizer) -> int:
    """How many records have special tokens in their texts."""
    tokens = tokenizer.special_tokens
    if not tokens:
        return 0
    pattern = re.compile("|".join(map(re.escape, tokens)))
    return sum(any(map(pattern.search, record.texts)) for record in records)

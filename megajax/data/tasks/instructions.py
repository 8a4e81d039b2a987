"""Instructions: JSON lines with `prompt` and `completion`, or with the `messages` of a conversation. Their samples are
rows of several packed records, in which only the model's part is a target.

Letters: N records; T is the sequence length.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from megajax.core.batch import IGNORED, text_form
from megajax.core.errors import UserError
from megajax.data.samples.base import Sample, hashed, key_of
from megajax.data.tasks.inputs import counted
from megajax.data.tasks.records import Instruction, Records
from megajax.data.tasks.registry import TASKS
from megajax.data.tasks.sources import TaskFile, checked, decoded, entry, parsed
from megajax.data.text.chat import Chat, ChatTemplate, checked_args
from megajax.data.text.tokenizer import Tokenizer
from megajax.host import reading

TODAY = datetime(2024, 7, 26)
"""The date that chat templates see; fixed, so that the same records always give the same tokens."""

_PACKING = 23  # a random stream of its own
_BATCH = 1024  # records encoded together

# Fields of messages with which other programs' files say whether a message is trained on.
_TRAINED = ("weight", "train", "training", "trainable", "train_on_turn", "loss", "loss_mask", "loss_weight")
_MASKED = ("masked",)
_PARTLY = ("mask", "train_detail", "training_detail", "loss_scale")  # say it of parts, or not the same everywhere

Encoded = tuple[list[int], list[bool]]  # ids, and whether the model should produce each


def read_instructions(file: TaskFile) -> None:
    """Read the records in a file, one per line or in an array; if one has both forms, `messages` count. Records with
    nothing for the model to say are skipped and counted."""
    for line, where in file.objects(reading.LINE_BYTES):
        text = decoded(line, where).removeprefix("\ufeff")
        if text.strip():
            _add(parsed(text, where, file.task), where, file.records)


def _add(value: Any, where: str, records: Records) -> None:
    fields = checked(value, dict, where, "the record")
    left_out = is_left_out(fields, where)
    if "messages" in fields:
        chat = chat_under(fields, "messages", where)
        answers = tuple(trained_answers(chat))
        left_out |= not answers and any(message["role"] == "assistant" for message in chat.messages)
        record = Instruction(where, "", "", tuple(chat.messages), answers, chat.template_args)
        missing = "" if answers else "without a message of the assistant", 'one with "role": "assistant"'
    elif "prompt" in fields:
        check_no_chat(fields, where)
        record = Instruction(where, entry(fields, "prompt", str, where), entry(fields, "completion", str, where))
        missing = "" if record.completion else "with an empty completion", "text"
    else:
        raise UserError(f'{where}: neither "prompt" nor "messages"; valid: {TASKS["instructions"].files}')
    if left_out:
        records.note("records with weight 0, skipped", where, "")
    elif missing[0]:
        records.note(f"records {missing[0]}, skipped", where, missing[1])
    else:
        records.entries.append(record)


def is_left_out(found: Mapping[str, Any], where: str) -> bool:
    """Whether a record has weight 0."""
    return _is_trained(found, ("weight",), where) is False


def check_no_chat(fields: Mapping[str, Any], where: str) -> None:
    """Check that a record of texts has nothing for a chat template, which it does not go through."""
    if given := [name for name in ("tools", "chat_template_kwargs") if fields.get(name)]:
        raise UserError(f'{where}: "{given[0]}" in a record of texts; valid: messages, or texts without it')


def trained_answers(chat: Chat) -> Iterator[int]:
    """The numbers of the messages of the assistant that are trained on."""
    for index, message in enumerate(chat.messages):
        where = f"{chat.place}: message {index + 1}"
        trained = _is_trained(message, (*_TRAINED, *_MASKED, *_PARTLY), where)
        if message["role"] == "assistant":
            if trained is not False:
                yield index
        elif trained:
            raise UserError(f"{where} is to be trained on; valid: only messages with the role assistant")


def _is_trained(fields: Mapping[str, Any], names: Sequence[str], where: str) -> bool | None:
    """What the fields with these names say; None: nothing."""
    said = {name: fields[name] for name in names if fields.get(name) is not None}
    for name, value in said.items():
        if name in _PARTLY or type(value) not in (bool, int, float) or value not in (0, 1):
            valid = f'no {name}, or "weight" 0 or 1' if name in _PARTLY else "0, 1, false or true"
            raise UserError(f'{where}: "{name}" is {json.dumps(value)[:80]}; valid: {valid}')
    meant = {bool(value) != (name in _MASKED) for name, value in said.items()}
    if len(meant) > 1:
        raise UserError(f"{where}: {' and '.join(said)} contradict each other; valid: one of them")
    return meant.pop() if meant else None


def conversation(text: str, where: str) -> Chat:
    """The conversation in a line of such a file, which the assistant is to answer."""
    fields = checked(parsed(text, where, "instructions"), dict, where, "the conversation")
    chat = chat_under(fields, "messages", where)
    if not chat.messages or chat.messages[-1]["role"] == "assistant":
        last = "ends with a message of the assistant" if chat.messages else "has no message"
        raise UserError(f"{where} {last}; valid: messages that the assistant answers")
    return chat


def chat_under(fields: dict[str, Any], key: str, where: str) -> Chat:
    """The conversation under a key of a record, with the record's variables for the chat template."""
    if fields.get("tools"):
        raise UserError(f'{where}: "tools" are not supported; valid: messages without them')
    prefix = f"{where}: message" if key == "messages" else f"{where}: {key}, message"
    given = entry(fields, key, list, where)
    messages = [_message(value, f"{prefix} {index}") for index, value in enumerate(given, start=1)]
    args = fields.get("chat_template_kwargs")
    return Chat(messages, where, {} if args is None else checked_args(args, f"{where}: chat_template_kwargs"))


def chat_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    """A tokenizer's chat template, if it has one."""
    source = tokenizer.chat_template
    return None if source is None else ChatTemplate(source, tokenizer.named_tokens, "the tokenizer", TODAY)


def _message(value: Any, where: str) -> dict[str, Any]:
    found = checked(value, dict, where, "the message")
    return found | {key: entry(found, key, str, where) for key in ("role", "content")}


def packed(lengths_N: Sequence[int], order: Sequence[int], room: int) -> list[list[int]]:
    """Pack records into rows in the given order; a record that does not fit starts a new row."""
    rows: list[list[int]] = []
    left = 0
    for record in order:
        if not rows or lengths_N[record] > left:
            rows.append([])
            left = room
        rows[-1].append(record)
        left -= lengths_N[record]
    assert left >= 0, "a record that is longer than a row"
    return rows


class InstructionRows:
    """Samples of text (`text_form`), each a row of packed records that do not attend to each other.

    A record is its prompt, after the tokenizer's beginning-of-text token, its completion, and the end-of-text token; or
    its messages in the chat template. Targets are the completion and the end of text, or what the assistant writes.
    Records longer than T + 1 tokens are truncated; one that then has no targets is left out.

    `seed` determines the order in which records are packed; None: their own order.
    """

    def __init__(
        self, records: Sequence[Instruction], tokenizer: Tokenizer, *, sequence_length: int, seed: int | None
    ) -> None:
        self.sequence_length, self.form = sequence_length, text_form(with_positions=True)
        self.records: list[Instruction] = []
        self._texts: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]] = []  # tokens and targets of a record
        most, cut = sequence_length + 1, 0
        for record, (tokens, of_model) in zip(records, encoded(records, tokenizer), strict=True):
            cut += len(tokens) > most
            ids, says = np.array(tokens[:most], np.int32), np.array(of_model[1:most], bool)
            if says.any():
                self.records.append(record)
                self._texts.append((ids[:-1], np.where(says, ids[1:], np.int32(IGNORED))))
        order = np.arange(len(self.records))
        if seed is not None:
            order = np.argsort(hashed(order.astype(np.uint64) + key_of(_PACKING, seed)), kind="stable")
        self._rows = packed([len(tokens) for tokens, _ in self._texts], order.tolist(), sequence_length)
        left_out = len(records) - len(self.records)
        self.counts = counted(
            {
                f"records truncated to {most} tokens": cut,
                f"records whose completion starts after their first {most} tokens, left out": left_out,
                "records whose texts contain special tokens, which are encoded as such": _written_out(
                    self.records, tokenizer
                ),
            }
        )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        sample = {name: array[0] for name, array in self.form.padding(1, tokens=self.sequence_length).items()}
        done = 0
        for record in self._rows[index]:
            tokens, targets = self._texts[record]
            span = slice(done, done + len(tokens))
            sample["tokens"][span], sample["targets"][span] = tokens, targets
            sample["positions"][span] = np.arange(len(tokens))
            done = span.stop
        return sample

    def parts(self, index: int) -> list[tuple[int, slice]]:
        """The records in a row: the number of each, and its targets."""
        ends = [0, *itertools.accumulate(len(self._texts[record][0]) for record in self._rows[index])]
        return [
            (record, slice(*each)) for record, each in zip(self._rows[index], itertools.pairwise(ends), strict=True)
        ]


def encoded(records: Sequence[Instruction], tokenizer: Tokenizer) -> Iterator[Encoded]:
    """The tokens of every record."""
    template = chat_template(tokenizer)
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
    if not records:
        return
    if template is None:
        raise UserError(
            f"{records[0].name}: these records have messages, but the tokenizer has no chat template; "
            "valid: prompt and completion, or a tokenizer with chat_template in its "
            "tokenizer_config.json"
        )
    ends = [tokenizer.token(token_id) for token_id in tokenizer.ends]
    chats = [Chat(record.messages, record.name, record.template_args) for record in records]
    found = list(template.rendered(chats, [record.answers for record in records], ends, tokenizer.special_tokens))
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

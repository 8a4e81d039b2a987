"""Records and samples of any task, their order in training, and a split in which no context is shared."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megajax.core.errors import UserError
from megajax.data.samples.base import Sample, Samples, hashed, held_out, key_of, shuffled
from megajax.data.tasks.glue import read_glue
from megajax.data.tasks.inputs import ExamInputs, JoinedTexts, PairInputs, counted
from megajax.data.tasks.instructions import InstructionRows, read_instructions
from megajax.data.tasks.preferences import PreferenceRows, read_preferences
from megajax.data.tasks.questions import read_race, read_squad
from megajax.data.tasks.records import Record, Records
from megajax.data.tasks.registry import TASKS, TaskConfig
from megajax.data.tasks.sources import TaskFile, check_beginning, task_files
from megajax.data.tasks.windows import SpanWindows
from megajax.data.text.tokenizer import Tokenizer

_ORDER, _HOLD_OUT = 21, 22  # independent random streams of one seed

TaskSamples = JoinedTexts | InstructionRows | PreferenceRows

_READERS: dict[str, Callable[[TaskFile], None]] = {
    "mnli": read_glue,
    "qqp": read_glue,
    "squad1": read_squad,
    "squad2": read_squad,
    "race": read_race,
    "instructions": read_instructions,
    "preferences": read_preferences,
}


def read_records(task_name: str, paths: Sequence[str], config: TaskConfig, flag: str, labelled: bool = True) -> Records:
    """The records in a task's files (and in folders, if the task has `suffixes`), in order. Unless `labelled`, right
    answers may be missing, as in test sets."""
    records: Records = Records(strict=config.strict)
    valid = TASKS[task_name].files
    for path in task_files(paths, task_name, flag):
        before = len(records.entries)
        file = TaskFile(path, flag, task_name, labelled, records)
        check_beginning(file)
        _READERS[task_name](file)
        if len(records.entries) == before and not TASKS[task_name].suffixes:
            raise UserError(f"{file.where} has no records; valid: {valid}")
    if not records.entries:
        odd = "".join(f" ({count} {what})" for what, (count, _) in records.odd.items())
        raise UserError(f"{flag}: {paths[0]} has no records{odd}; valid: {valid}")
    return records


def task_samples(
    task_name: str,
    records: Sequence[Any],
    tokenizer: Tokenizer,
    *,
    sequence_length: int,
    config: TaskConfig,
    training: bool,
    seed: int = 0,
) -> TaskSamples:
    """The samples of a task. When `training`, records without a label are left out, and instructions are packed in an
    order drawn from `seed`."""
    head = TASKS[task_name].head
    samples: TaskSamples
    if task_name == "preferences":
        samples = PreferenceRows(records, tokenizer, sequence_length=sequence_length)
        if not len(samples):
            raise UserError(
                f"none of the {len(records)} pairs has at most {sequence_length} tokens together; valid: at least one, "
                "or a larger --model.sequence-length"
            )
    elif head == "pretraining":
        order = seed if training else None
        samples = InstructionRows(records, tokenizer, sequence_length=sequence_length, seed=order)
        if not training and not len(samples):
            raise UserError(
                f"none of the {len(records)} records to evaluate on has its completion within the first "
                f"{sequence_length} tokens; valid: at least one that does"
            )
    elif head == "span":
        samples = SpanWindows(records, tokenizer, sequence_length=sequence_length, config=config, training=training)
    else:
        usable = [record for record in records if not training or record.label is not None]
        if head == "classes":
            samples = PairInputs(usable, tokenizer, sequence_length=sequence_length)
        else:
            cut = config.option_tokens
            samples = ExamInputs(usable, tokenizer, sequence_length=sequence_length, option_tokens=cut)
        samples.counts |= counted({"records without a label, left out": len(records) - len(usable)})
    if training and not len(samples):
        what = {"span": "an answer at its stated offset", "pretraining": "tokens to train on"}.get(head, "a label")
        raise UserError(f"--data.train: none of its {len(records)} records has {what}; valid: at least one that does")
    return samples


class EpochOrder:
    """Endless samples, in a new random order every epoch; sample i is a pure function of the seed and i."""

    def __init__(self, samples: Samples, seed: int) -> None:
        self.sequence_length, self.epoch_size, self.samples = samples.sequence_length, len(samples), samples
        assert self.epoch_size > 0, "no samples"
        self._order = shuffled(self.epoch_size, _ORDER, seed)

    def __getitem__(self, number: int) -> Sample:
        return self.samples[self.place(number)]

    def place(self, number: int) -> int:
        """The number of a sample in an epoch without an order."""
        return self._order[number]


def split_by_context(entries: Sequence[Any], fraction: float, seed: int) -> tuple[list[Any], list[Any]]:
    """Split records into training and dev, both in order, without a shared context.

    In an order shuffled by the seed, contexts go to dev until it has about the given fraction of the records. A context
    with more records than that is used for training; if all have more, the one with the fewest goes to dev.
    """
    numbers: dict[str, int] = {}
    of_entry = np.array([numbers.setdefault(entry.context, len(numbers)) for entry in entries], np.int64)
    if len(numbers) < 2:
        raise UserError(
            f"--data.train: its {len(entries)} records have {len(numbers)} different texts, contexts or articles; "
            "valid: 2 or more, for training and dev, or --data.dev FILE"
        )
    sizes = np.bincount(of_entry)
    order = np.argsort(hashed(np.arange(len(sizes), dtype=np.uint64) + key_of(_HOLD_OUT, seed)), kind="stable")
    split: tuple[list[Any], list[Any]] = [], []
    for entry, is_dev in zip(entries, np.isin(of_entry, held_out(sizes, order, fraction)).tolist(), strict=True):
        split[is_dev].append(entry)
    return split


def shared_contexts(train: Sequence[Record], dev: Sequence[Record]) -> int:
    """How many dev records have a context that also occurs in training."""
    contexts = {record.context for record in train}
    return sum(record.context in contexts for record in dev)

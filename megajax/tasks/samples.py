"""Samples of any task, the order in which they are trained on, and a split that shares no context."""

from collections.abc import Sequence
from typing import Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from megajax.data.bits import hashed, key_of
from megajax.data.samples import Sample, Samples, held_out, shuffled
from megajax.data.tokenizer import Tokenizer
from megajax.errors import UserError
from megajax.tasks.config import TaskConfig
from megajax.tasks.inputs import ExamInputs, PairInputs
from megajax.tasks.instruction_rows import InstructionRows
from megajax.tasks.records import Exam, Instruction, Pair, Question, Record
from megajax.tasks.registry import TASKS
from megajax.tasks.windows import SpanWindows

R = TypeVar("R", Pair, Question, Exam, Instruction)

_ORDER, _HOLD_OUT = 21, 22  # independent random streams of one seed


class TaskSamples(Samples, Protocol):
    """A finite sequence of samples of a task.

    Attributes:
        records: what they were made of.
        owners: the record of every sample, its place in `records`, int64, ascending; of rows with several records the
            row of every record.
        counts: in words, how many records were cut or left out; only what happened.
    """

    @property
    def records(self) -> Sequence[Record]: ...

    owners: npt.NDArray[np.int64]
    counts: dict[str, int]


def task_samples(
    task_name: str,
    records: Sequence[Record],
    tokenizer: Tokenizer,
    *,
    sequence_length: int,
    config: TaskConfig,
    training: bool,
    seed: int = 0,
) -> TaskSamples:
    """The samples of a task.

    When `training`, records without a label are left out, and instructions are packed in an order drawn from `seed`.
    """
    head = TASKS[task_name].head
    samples: PairInputs | SpanWindows | ExamInputs | InstructionRows
    if head == "pretraining":
        asked, order = cast(Sequence[Instruction], records), seed if training else None
        samples = InstructionRows(asked, tokenizer, sequence_length=sequence_length, seed=order)
        if not training and not len(samples):
            raise UserError(
                f"none of the {len(records)} records to evaluate on has what the model should say in its first "
                f"{sequence_length} tokens; valid: at least one that has"
            )
    elif head == "span":
        questions = cast(Sequence[Question], records)
        samples = SpanWindows(questions, tokenizer, sequence_length=sequence_length, config=config, training=training)
    else:
        labelled = cast(Sequence[Pair | Exam], records)
        usable = [record for record in labelled if not training or record.label is not None]
        if head == "classes":
            samples = PairInputs(cast(Sequence[Pair], usable), tokenizer, sequence_length=sequence_length)
        else:
            exams = cast(Sequence[Exam], usable)
            cut = config.option_tokens
            samples = ExamInputs(exams, tokenizer, sequence_length=sequence_length, option_tokens=cut)
        if len(usable) < len(records):
            samples.counts["records without a label, left out"] = len(records) - len(usable)
    if training and not len(samples):
        what = {"span": "an answer that is at its offset", "pretraining": "tokens to train on"}.get(head, "a label")
        raise UserError(f"--data.train: none of its {len(records)} records has {what}; valid: at least one that has")
    return samples


class EpochOrder:
    """Samples without end, in a new random order every epoch (Grain's index shuffle); sample i is a pure function of
    the seed and i.
    """

    def __init__(self, samples: Samples, seed: int) -> None:
        self.sequence_length, self.epoch_size, self._samples = samples.sequence_length, len(samples), samples
        assert self.epoch_size > 0, "no samples"
        self._order = shuffled(self.epoch_size, _ORDER, seed)

    def __getitem__(self, number: int) -> Sample:
        return self._samples[self._order[number]]


def split_by_context(entries: Sequence[R], fraction: float, seed: int) -> tuple[list[R], list[R]]:
    """Records to train on and records for dev, both in order, without a shared context.

    In an order shuffled by the seed, contexts go to dev until it has about that share of the records. A context with
    more of them than that is trained on; if all have more, the one with the fewest is for dev.
    """
    if not 0 < fraction < 1:
        raise UserError(f"--data.validation-fraction {fraction}; valid: more than 0 and less than 1")
    numbers: dict[str, int] = {}
    of_entry = np.array([numbers.setdefault(entry.context, len(numbers)) for entry in entries], np.int64)
    if len(numbers) < 2:
        raise UserError(
            f"--data.train: its {len(entries)} records have {len(numbers)} different texts, contexts or articles; "
            "valid: 2 or more, for training and dev, or --data.dev FILE"
        )
    sizes = np.bincount(of_entry)
    order = np.argsort(hashed(np.arange(len(sizes), dtype=np.uint64) + key_of(_HOLD_OUT, seed)), kind="stable")
    is_dev = np.isin(of_entry, held_out(sizes, order, fraction)).tolist()
    train = [entry for entry, out in zip(entries, is_dev, strict=True) if not out]
    return train, [entry for entry, out in zip(entries, is_dev, strict=True) if out]


def shared_contexts(train: Sequence[Record], dev: Sequence[Record]) -> int:
    """How many dev records have a context that is also in training."""
    contexts = {record.context for record in train}
    return sum(record.context in contexts for record in dev)

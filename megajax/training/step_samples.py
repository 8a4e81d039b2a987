"""What a step is trained on: its documents or records, where they are from, and the losses of each."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from megajax.core.batch import IGNORED, BatchSpec
from megajax.core.errors import UserError
from megajax.core.models.registry import FAMILIES
from megajax.core.program.train_step import computed_weights
from megajax.data.samples.base import Sample
from megajax.data.samples.blend import BlendedSamples
from megajax.data.samples.gpt import TrainSamples
from megajax.data.tasks.instructions import InstructionRows
from megajax.data.tasks.samples import EpochOrder
from megajax.data.tasks.windows import SpanWindows
from megajax.data.text.records import TextDocuments
from megajax.evaluation.scoring import score_samples
from megajax.host.processes import is_first_process
from megajax.runs.data import RunData
from megajax.runs.task_data import TaskData
from megajax.training.loop import Trainer

_MOST = 100  # lines


class _Rows(list[Sample]):
    """The samples of one step."""

    form: BatchSpec
    sequence_length: int


def losses_of_samples(run: Trainer, step: int) -> Iterator[str]:
    """A line for every document or record of a step, highest mean loss first: the loss before the step's update and
    without dropout, how many targets it has, the row of the batch, and the file and row that it is from."""
    drawn, sizes = run.order.samples(run.data.train), run.order.sizes
    size, first = sizes.at(step - 1).size, sizes.first_sample(step - 1)
    program, rows = run.program.with_batch(size), _Rows(drawn[number] for number in range(first, first + size))
    rows.form, rows.sequence_length = program.form, run.config.model.sequence_length
    found: list[tuple[float, int, int, tuple[int, int]]] = []  # the loss, targets, row and place of each
    name, targets = next(iter(program.form.targets.items()))
    for row, losses in enumerate(score_samples(program, computed_weights(program, run.state), rows)):
        counted = np.flatnonzero(np.atleast_1d(rows[row][targets]) != IGNORED)
        source, parts = _parts(run, drawn.train, drawn.place(first + row))
        for begin, span in parts:
            own = losses[name].loss[(counted >= span.start) & (counted < span.stop)]
            if len(own):
                found.append((float(own.mean()), len(own), row, (source, begin)))
    found.sort(key=lambda each: -each[0])
    if is_first_process():
        names = _names(run, [place for *_, place in found[:_MOST]])
        yield f"the {len(found)} documents of step {step}, highest mean loss before its update first:"
        for (loss, count, row, _), name in zip(found, names, strict=False):
            yield f"  loss {loss:.4f}  {count:,} targets  row {row}  {name}"


def _parts(run: Trainer, train: Any, number: int) -> tuple[int, list[tuple[int, slice]]]:
    """The source of a training sample, and the place there and the targets of each of its documents."""
    source = 0
    if isinstance(train, BlendedSamples):
        source, number = train.place(number)
        train = train.sources[source]
    if isinstance(train, EpochOrder):
        train, number = train.samples, train.place(number)
    if isinstance(train, TrainSamples | InstructionRows):
        return source, train.parts(number)
    number = int(train.owners[number]) if isinstance(train, SpanWindows) else number
    return source, [(number, slice(0, run.config.model.sequence_length))]


def _names(run: Trainer, places: list[tuple[int, int]]) -> list[str]:
    """Where they are from."""
    if isinstance(run.data, TaskData):
        return [run.data.train_samples.records[number].name for _, number in places]
    if not isinstance(run.data, RunData) or FAMILIES[run.config.model.family].samples == "pairs":
        return [f"sample {number:,} of source {source}" for source, number in places]
    names: dict[tuple[int, int], str] = {}
    for source, corpus in enumerate(run.data.corpora):
        offsets, report, wheres = corpus.tokens.document_offsets, corpus.report, {}
        numbers = {begin: int(np.searchsorted(offsets, begin, side="right")) - 1 for s, begin in places if s == source}
        with contextlib.suppress(UserError):  # the source is gone
            if numbers and not report.dataset:  # else only its preparation knows
                wanted = {*numbers.values()}
                texts = itertools.islice(TextDocuments(report.source).placed(), max(wanted) + 1)
                wheres = {number: where for number, (where, _) in enumerate(texts) if number in wanted}
        for begin, number in numbers.items():
            names[source, begin] = wheres.get(number, f"document {number:,} of {report.dataset or report.source}")
    return [names[place] for place in places]

"""Data that a user's code gives a run: batches, or data sets; and data sets that are registered under a name."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from megajax.core.errors import UserError, told
from megajax.core.options import counted, options
from megajax.core.program.loss import loss_of
from megajax.core.program.program import Program
from megajax.data.config import DATA_SETS
from megajax.data.samples.base import Sample
from megajax.data.synthetic import random_batch
from megajax.data.tasks.samples import EpochOrder
from megajax.host.paths import check_path
from megajax.runs.init import named_or_init_tokenizer
from megajax.settings.checks import NEED_VALIDATION
from megajax.settings.config import Config
from megajax.training.batches import Given, batch_of
from megajax.training.given import OwnData

Batches = Iterable[Given] | Callable[[int], Iterable[Given]]
_After = Callable[[int], Iterator[Mapping[str, Any]]]  # the batches after so many steps


class OrderedBatches:
    """An iterator of a run's batches in order; called with a number of finished steps, it goes to those after them."""

    def __init__(self, begin: _After, step: int):
        self._begin, self._left, self._step = begin, begin(step), step

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return self

    def __next__(self) -> Mapping[str, Any]:
        batch = next(self._left)
        self._step += 1
        return batch

    def __call__(self, step: int) -> Iterator[Mapping[str, Any]]:
        if step != self._step:
            self._left, self._step = self._begin(step), step
        return self


@dataclass(frozen=True)
class TaughtBatches:
    """Batches to which a teacher adds arrays, which begin as those that it is given."""

    batches: Batches
    add: Callable[[Given], Mapping[str, Any]]
    tokenizer: Any  # the teacher's

    def __call__(self, step: int, first: int = 0) -> Iterator[Mapping[str, Any]]:
        return map(self.add, batches_after(self.batches, step, first))


def batches_after(batches: Batches, step: int, first: int) -> Iterable[Given]:
    """The batches after so many steps. An iterator begins after the model's `first` and is advanced past the others."""
    if isinstance(batches, TaughtBatches):
        return batches(step, first)
    if callable(batches):
        return batches(step)
    if step < first:
        problem = f"the run goes on after step {step}, but batches of an iterator begin after the model's step {first}"
        raise UserError(f"train: {problem}; valid: a function of the number of finished steps, or another run_dir")
    return islice(batches, step - first, None)


class DataSet:
    """A user's data set as samples: any object with `len` and `[i]`, which is a pure function of i. An entry is ids
    [T + 1], or a dict of a batch's arrays for one row; ids may be fewer, and are padded."""

    def __init__(self, entries: Any, program: Program, what: str):
        if not (hasattr(entries, "__len__") and hasattr(entries, "__getitem__")):
            raise UserError(f"{what}: a {type(entries).__name__}; valid: an object with len() and [i]")
        if not len(entries):
            raise UserError(f"{what}: it is empty; valid: at least one entry")
        self._entries, self._config, self._what = entries, program.config, what
        self.form, self.sequence_length = program.form, program.config.model.sequence_length

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Sample:
        try:
            entry = self._entries[int(index)]
        except Exception as error:
            error.add_note(f"raised by entry {index} of {self._what}")
            raise
        try:
            rows = {k: np.asarray(x)[None] for k, x in entry.items()} if isinstance(entry, Mapping) else [entry]
            batch = batch_of(self._config, self.form, rows)  # type: ignore[arg-type]
        except UserError as error:
            of_entry = str(error).replace("[1, ", "[").replace("[B, ", "[")
            problem, _, valid = of_entry.partition("; valid: ")
            raise UserError(f"{self._what}, entry {index}: {problem}; valid: {valid}") from None
        whole = self.form.padding(1, tokens=self.sequence_length)
        for name, array in batch.items():
            region = tuple(map(slice, array.shape))
            whole[name][region] = array
        return {name: array[0] for name, array in whole.items()}


class _Drawn:
    """Random samples."""

    def __init__(self, config: Config):
        self._batch = random_batch(config, 0)

    def __getitem__(self, index: int) -> Sample:
        return {name: array[index % len(array)] for name, array in self._batch.items()}


def registered_data(config: Config, program: Program) -> OwnData:
    """The data set that `data.set` names, with the tokenizer of `tokenizer.path` or `--init`, if there is one."""
    with told(f"--data.set {config.data.set}", "a function of the configuration that returns a data set"):
        made = DATA_SETS[config.data.set](config)
    data, validation = made if isinstance(made, tuple) else (made, None)
    data_set = own_data(config, program, named_or_init_tokenizer(config), None, data, validation)
    assert data_set is not None
    return data_set


def own_data(
    config: Config, program: Program, tokenizer: Any, batches: Batches | None, data: Any, validation: Any, step: int = 0
) -> OwnData | None:
    """The data that a user gives a model after so many steps: batches, or data sets; None if there are none."""
    if batches is not None and data is not None:
        raise UserError("train: batches and data; valid: one of them")
    taught = getattr(batches, "tokenizer", None)
    if tokenizer is not None and taught is not None and taught != tokenizer:
        raise UserError("train: the teacher has another tokenizer; valid: tokenizer.path with the teacher's")
    if batches is not None and config.train.ramp_start:
        raise UserError("train: batches with train.ramp_start; valid: data, whose entries batches of any size can have")
    held_out = None if validation is None else DataSet(validation, program, "validation")
    if batches is not None:
        passed = _checked(config, program, batches, step)
        return OwnData(passed, _Drawn(config), held_out, tokenizer, "batches of the caller")
    if data is None:
        if validation is not None:
            raise UserError("train: validation without data; valid: data or batches, or data.validation")
        loss = loss_of(config) if config.pretrains and not config.data.set else None
        if loss and loss.arrays:
            names = ", ".join(dict(loss.arrays))
            raise UserError(f"train: a corpus lacks {names} of loss {loss.name}; valid: batches or data with them")
        return None
    samples = DataSet(data, program, "data")
    epoch = counted(len(samples) / config.train.global_batch, "step", ",.4g")
    words = f"{len(samples):,} entries of the caller; an epoch is {epoch}"
    return OwnData(None, EpochOrder(samples, config.seed), held_out, tokenizer, words)


def _checked(config: Config, program: Program, batches: Batches, first: int) -> _After:
    """As `batches_after`, arrays of a whole global batch."""

    def after(step: int) -> Iterator[Mapping[str, Any]]:
        for given in batches_after(batches, step, first):
            yield whole_batch(config, program, given, "train")
        raise UserError("train: there are no more batches; valid: one for each step")

    return after


def whole_batch(config: Config, program: Program, given: Given, what: str) -> Mapping[str, Any]:
    """The arrays of a global batch of the program."""
    arrays = batch_of(config, program.form, given)
    for name, wanted in program.batch_types.items():
        if arrays[name].shape != wanted.shape:
            problem = f"{name} of shape {list(arrays[name].shape)}"
            valid = f"{list(wanted.shape)}, or another train.global_batch or model.sequence_length"
            raise UserError(f"{what}: {problem}; valid: {valid}")
    return arrays


def of_run(config: Config, steps: int | None, run_dir: str | Path | None, data: OwnData | None) -> Config:
    """The configuration of a training up to `steps` in a run directory; without held-out data it is not validated."""
    path = config.run_dir if run_dir is None else str(run_dir)
    if not path:
        raise UserError("train: run_dir missing; valid: a folder, or run_dir in the configuration")
    check_path(path, "run_dir")
    path = os.path.abspath(path)  # which stays the same where a callback changes the working directory
    train = config.train if steps is None else dataclasses.replace(config.train, steps=steps, epochs=0.0)
    return without_validation(dataclasses.replace(config, run_dir=path, train=train), data)


def without_validation(config: Config, data: OwnData | None) -> Config:
    """The configuration, without validation if the data has nothing for that."""
    if data is None or data.validation is not None:
        return config
    for key in NEED_VALIDATION:
        if attrgetter(key)(config):
            valid = "valid: data with a validation set, or without it"
            raise UserError(f"{options(Config)[key].flag}: this data has nothing to validate on; {valid}")
    return dataclasses.replace(config, train=dataclasses.replace(config.train, eval_every=0))

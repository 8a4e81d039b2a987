"""The records of a run's fine-tuning task: read from its files at every start, and always the same."""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megajax.core.errors import UserError
from megajax.core.models.registry import FAMILIES
from megajax.core.options import counted
from megajax.data.samples.masking import WordPieces
from megajax.data.tasks.records import Record
from megajax.data.tasks.registry import TASKS
from megajax.data.tasks.samples import (
    EpochOrder,
    TaskSamples,
    read_records,
    shared_contexts,
    split_by_context,
    task_samples,
)
from megajax.data.text.digests import Digester, root
from megajax.data.text.tokenizer import Tokenizer
from megajax.data.text.tokenizers import is_tokenizer_folder, load_tokenizer, train_tokenizer, training_part
from megajax.host import reading
from megajax.host.files import write_atomically
from megajax.runs.init import named_or_init_tokenizer
from megajax.settings.config import Config

_REPORT = "records.json"  # in a run's data folder; written last
_SPLIT_SEED = 0  # for splitting dev off the training records: the same for all of `--seeds`, which are compared


@dataclass(frozen=True)
class TaskData:
    """Samples of a task, as `RunData` has those of corpora."""

    tokenizer: Tokenizer  # the run's
    train: EpochOrder  # every record once per epoch, endlessly
    validation: TaskSamples  # of the dev records
    train_samples: TaskSamples  # of the training records, in order
    odd: list[str]  # a line for everything unusual in the files
    validation_sets: dict[str, TaskSamples] = field(default_factory=dict)  # empty

    def lines(self, config: Config) -> Iterator[str]:
        """The lines that a run prints about its data before it starts."""
        for name, samples in (("train", self.train_samples), ("dev", self.validation)):
            cut = "".join(f", {count:,} {what}" for what, count in samples.counts.items() if count)
            kind = f"in {len(samples):,} windows" if len(samples) != len(samples.records) else "each a sample"
            if TASKS[config.task.name].continues_text:
                kind = f"packed in {counted(len(samples), 'row')}"
            yield f"{config.task.name} {name}: {counted(len(samples.records), 'record')}, {kind}{cut}"
        full = " of the full batch" if config.train.ramp_start else ""
        yield f"an epoch is {counted(self.train.epoch_size / config.train.global_batch, 'step', ',.4g')}{full}"
        shared = shared_contexts(self.train_samples.records, self.validation.records)
        if shared and TASKS[config.task.name].head != "classes":  # these share single sentences anyway
            yield f"warning: the contexts of {shared:,} dev records also occur in the training records"
        yield from self.odd


def make_task_data(config: Config, folder: Path, *, again: bool = False) -> None:
    """Choose a run's tokenizer and store digests of its records in `folder`; with `again` even if that was done before,
    because files or weights may have changed since. One process calls this, then all may call `open_task_data`."""
    if not again and has_task_data(folder):
        return
    train, dev, _ = _records(config)
    path = folder / "tokenizer"
    tokenizer = load_tokenizer(path) if is_tokenizer_folder(path) and not again else _tokenizer(config, train)
    most = None  # check all instructions, but only the first record of other tasks
    if not TASKS[config.task.name].continues_text:
        WordPieces.of(tokenizer, "the tokenizer")
        most = 1
    _samples(config, train[:most], tokenizer, training=most is None)
    _samples(config, dev[:most], tokenizer, training=False)
    tokenizer.save(path)
    write_atomically(
        folder / _REPORT, json.dumps({"train": records_digest(train), "dev": records_digest(dev)}, indent=2) + "\n"
    )


def has_task_data(folder: Path) -> bool:
    """Whether `make_task_data` has finished in this folder."""
    return bool(reading.kind(folder / _REPORT))


def open_task_data(config: Config, folder: Path) -> TaskData:
    """The records of a run, on any process."""
    train, dev, odd = _records(config)
    before = reading.read_json(folder / _REPORT)
    for name, entries in (("train", train), ("dev", dev)):
        if not isinstance(before, dict) or before.get(name) != records_digest(entries):
            raise UserError(
                f"--data.{name}: the records have changed since the run began (see {folder / _REPORT}); "
                "valid: the same files, or another --run-dir"
            )
    tokenizer = load_tokenizer(folder / "tokenizer")
    _check_size(config, tokenizer)
    samples = _samples(config, train, tokenizer, training=True)
    dev_samples = _samples(config, dev, tokenizer, training=False)
    return TaskData(tokenizer, EpochOrder(samples, config.seed), dev_samples, samples, odd)


def _records(config: Config) -> tuple[list[Record], list[Record], list[str]]:
    """Training records, dev records, and lines about everything unusual in the files."""
    train_records = read_records(config.task.name, config.data.train, config.task, "--data.train")
    if config.data.dev:
        dev = read_records(config.task.name, config.data.dev, config.task, "--data.dev")
        return train_records.entries, dev.entries, [*train_records.lines(), *dev.lines()]
    train, dev_entries = split_by_context(train_records.entries, config.data.validation_fraction, _SPLIT_SEED)
    return list(train), list(dev_entries), list(train_records.lines())


def _samples(config: Config, entries: Sequence[Record], tokenizer: Tokenizer, *, training: bool) -> TaskSamples:
    task, length = config.task, config.model.sequence_length
    return task_samples(
        task.name, entries, tokenizer, sequence_length=length, config=task, training=training, seed=config.seed
    )


def _tokenizer(config: Config, train: Sequence[Record]) -> Tokenizer:
    """The tokenizer of `--init`, else the given one, else a new one trained on the training records."""
    tokenizer = named_or_init_tokenizer(config)
    if tokenizer is None and config.init:
        raise UserError(
            f"--init {config.init} has no tokenizer; valid: --tokenizer.path with the tokenizer of its weights"
        )
    if tokenizer is None:
        texts = list(itertools.chain.from_iterable(map(_texts, train)))
        part = training_part(texts, sum(map(len, texts)))
        tokenizer = train_tokenizer(part, config.model.vocab_size, FAMILIES[config.model.family].tokenizer)
    _check_size(config, tokenizer)
    return tokenizer


def _check_size(config: Config, tokenizer: Tokenizer) -> None:
    if tokenizer.size > config.model.vocab_size:
        raise UserError(
            f"the tokenizer of {config.tokenizer.path or config.init or config.run_dir} has {tokenizer.size} ids; "
            f"valid: at most --model.vocab-size {config.model.vocab_size}, or a larger one"
        )


def _texts(record: Record) -> Iterator[str]:
    """The texts in a record, to train a tokenizer on."""
    for name in ("texts", "text", "context", "options"):
        value = getattr(record, name, ())
        yield from [value] if isinstance(value, str) else value


def records_digest(entries: Sequence[Record]) -> str:
    """A digest of records, independent of which files they are in."""
    digester = Digester()
    for entry in entries:
        args = getattr(entry, "template_args", None) or ""
        digester.update(f"{entry!r}{args}".encode("utf-8", "surrogatepass"))
    return root(digester.finish())

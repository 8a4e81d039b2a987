"""Configuration of corpora and their tokenizer."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from megajax.core.config import PackingConfig
from megajax.core.options import SHARE, OneOf, Range
from megajax.core.traits import IS_PATH, SAMPLES


@dataclass(frozen=True, kw_only=True)
class Source:
    """One of several corpora to train on."""

    path: Annotated[str, "as data.path", IS_PATH]
    weight: Annotated[float, "its share of the samples is proportional to this"]


@dataclass(frozen=True, kw_only=True)
class ValidationSet:
    """A corpus to validate on."""

    name: Annotated[str, "name of its loss"]
    path: Annotated[str, "as data.path", IS_PATH]


NONE = "none"
DATA_SETS: dict[str, Any] = {"": None}
"""By `data.set`: functions of the configuration."""


def _is_range(text: str) -> bool:
    """Whether a text is valid in `skip`."""
    match = re.fullmatch("([0-9]{1,15}):([0-9]{1,15})", text)
    return text == NONE or (match is not None and int(match[1]) <= int(match[2]))


def skipped_samples(texts: Iterable[str]) -> tuple[tuple[int, int], ...]:
    """The first and last number of each range that `skip` names: ascending, without overlaps."""
    ranges: list[tuple[int, int]] = []
    for first, last in sorted(tuple(map(int, text.split(":"))) for text in texts if text != NONE):
        if ranges and first <= ranges[-1][1] + 1:
            ranges[-1] = ranges[-1][0], max(ranges[-1][1], last)
        else:
            ranges.append((first, last))
    return tuple(ranges)


@dataclass(frozen=True, kw_only=True)
class DataConfig(PackingConfig):
    """Training data: a corpus, several corpora, or a task's files."""

    set: Annotated[str, "a data set that --plugins registered, instead of data.path", OneOf(DATA_SETS), SAMPLES] = ""
    path: Annotated[
        str,
        "text, JSONL, Parquet, a folder, also at gs:// or s3://; hf://NAME[/CONFIGURATION][:SPLIT][#COLUMN]; a "
        "prepared prefix; or the word python-stdlib or python-docstrings",
        IS_PATH,
    ] = ""
    sources: Annotated[tuple[Source, ...], "blend of several corpora with weights, instead of data.path"] = ()
    train: Annotated[tuple[str, ...], "training files of the task", IS_PATH] = ()
    dev: Annotated[tuple[str, ...], "validation files of the task; none: hold out part of data.train", IS_PATH] = ()
    validation_fraction: Annotated[
        float,
        "fraction held out for validation, by whole documents, or inside one if all are longer (for a task, by "
        "whole contexts); "
        "0 with train.eval_every 0: none",
        SHARE,
        SAMPLES,
    ] = 0.03
    validation: Annotated[tuple[ValidationSet, ...], "additional validation sets, each reported separately"] = ()
    skip: Annotated[
        tuple[str, ...],
        "training samples to leave out, each FIRST:LAST, both included, by their numbers in the order, from 0; "
        "has no effect on those already drawn; none: leave out none",
        Range(_is_range, "none, or FIRST:LAST, both included, such as 1000:1999"),
    ] = ()

    @property
    def texts(self) -> list[tuple[str, str]]:
        """The path of every corpus, after the flag that names it."""
        texts = [("--data.path", self.path)] if self.path else []
        texts += [("--data.sources", source.path) for source in self.sources]
        return texts + [("--data.validation", entry.path) for entry in self.validation]


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer."""

    path: Annotated[
        str,
        "folder with tokenizer.json, vocab.json and merges.txt, or vocab.txt; or a model on the "
        "Hugging Face hub; empty: train one on the corpus",
        IS_PATH,
    ] = ""

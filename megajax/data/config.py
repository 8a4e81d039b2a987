"""Corpora and their tokenizer, as configuration."""

from dataclasses import dataclass
from typing import Annotated

from megajax.options import SHARE
from megajax.traits import IS_PATH, SAMPLES


@dataclass(frozen=True, kw_only=True)
class Source:
    """One of several corpora to train on."""

    path: Annotated[str, "as data.path", IS_PATH]
    weight: Annotated[float, "its samples are in proportion to this"]


@dataclass(frozen=True, kw_only=True)
class ValidationSet:
    """A corpus to validate on."""

    name: Annotated[str, "what its loss is called"]
    path: Annotated[str, "as data.path", IS_PATH]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The corpus, or several, or a task's files."""

    path: Annotated[
        str,
        "text, JSONL, Parquet, a folder, also at gs:// or s3://; hf://NAME[/CONFIGURATION][:SPLIT][#COLUMN]; a "
        "prepared prefix; or the word python-stdlib or python-docstrings",
        IS_PATH,
    ] = ""
    sources: Annotated[tuple[Source, ...], "several corpora in given shares, instead of data.path"] = ()
    train: Annotated[tuple[str, ...], "files of the task to train on", IS_PATH] = ()
    dev: Annotated[tuple[str, ...], "files of the task to validate on; none: a part of data.train", IS_PATH] = ()
    validation_fraction: Annotated[
        float,
        "share of the tokens held out for validation, document by document; of a task's records, context by context; "
        "0, with train.eval_every 0: none",
        SHARE,
        SAMPLES,
    ] = 0.03
    validation: Annotated[tuple[ValidationSet, ...], "corpora that are validated on besides, each by itself"] = ()
    reset_attention: Annotated[
        bool, "attention and positions start anew with every document, also where several share a sequence"
    ] = False

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
        "folder with vocab.json and merges.txt, vocab.txt, or tokenizer.json; or a model of the Hugging Face hub; "
        "empty: trained on the corpus",
        IS_PATH,
    ] = ""

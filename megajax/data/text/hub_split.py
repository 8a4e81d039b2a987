"""A split of a dataset in the format of the Hugging Face hub, streamed with the package `datasets`."""

import contextlib
import importlib.util
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megajax.core.errors import UserError
from megajax.host.remote import reason

SCHEME = "hf"
FORM = "hf://NAME[/CONFIGURATION][:SPLIT][#COLUMN]"

_FORM = re.compile(r"hf://(?P<name>[^:#]*[^:#/])/*(?::(?P<split>[\w.-]+))?(?:#(?P<column>.+))?")
_NAME = re.compile(r"[\w.-]+(/[\w.-]+){0,2}")


@dataclass(frozen=True)
class HubSplit:
    """A split of a dataset on the hub, or in a local folder."""

    url: str  # as given
    name: str  # of the dataset, or the folder
    configuration: str  # of the dataset, if it has several; otherwise empty
    split: str  # such as train
    column: str  # with the texts; empty: the reader's default
    flag: str  # the flag that names it, for error messages

    @classmethod
    def parse(cls, url: str, flag: str) -> "HubSplit":
        """Parse a URL of the form `FORM`. A local folder takes precedence over a name on the hub."""
        match = _FORM.fullmatch(url)
        if not match:
            raise UserError(f"{flag} {url}; valid: {FORM}")
        name, configuration = match["name"], ""
        if not Path(name).is_dir():
            before, _, last = name.rpartition("/")
            if before and (Path(before).is_dir() or name.count("/") == 2):
                name, configuration = before, last
            elif not _NAME.fullmatch(name):
                raise UserError(f"{flag} {url}: neither a folder nor the name of a dataset; valid: {FORM}")
        if importlib.util.find_spec("datasets") is None:
            raise UserError(
                f"{flag} {url}: the package datasets is not installed; valid: pip install 'megajax[datasets]'"
            )
        return cls(url, name, configuration, match["split"] or "train", match["column"] or "", flag)

    def __str__(self) -> str:
        return self.url

    @cached_property
    def _builder(self) -> Any:
        import datasets

        try:
            with _quiet():
                return datasets.load_dataset_builder(self.name, self.configuration or None)
        except Exception as error:  # of many kinds: no network, no such dataset, a missing configuration
            raise self._refusal(f"the dataset cannot be opened: {reason(error)}") from None

    @property
    def size(self) -> int:
        """Size of the split's texts in bytes, or 0 if the dataset does not say."""
        splits = self._builder.info.splits or {}
        return int(splits[self.split].num_bytes or 0) if self.split in splits else 0

    @property
    def identity(self) -> list[str]:
        """What identifies its files: their addresses (on the hub with the commit) and metadata."""
        found = self._builder.config.data_files or {}
        files = found.get(self.split, [])
        known = getattr(files, "origin_metadata", [])
        return [*map(str, files), *(":".join(map(str, entry)) for entry in known)]

    def rows(self, key: str) -> Iterator[str]:
        """The texts of all rows in order, streamed; empty for rows without one."""
        column = self.column or key
        try:
            with _quiet():
                stream = self._builder.as_streaming_dataset(split=self.split)
            known = stream.column_names
            if known and column in known:
                stream = stream.select_columns([column])
            rows = iter(stream)
        except Exception as error:
            raise self._refusal(f"the dataset cannot be opened: {reason(error)}") from None
        for index in itertools.count(1):
            try:
                row = next(rows, None)
            except Exception as error:
                raise self._refusal(f"row {index} cannot be read: {reason(error)}", "a copy without it") from None
            if row is None:
                return
            if column not in row:
                raise self._refusal(f'no column "{column}"', f"#COLUMN with one of {', '.join(known or row)}")
            text = "" if row[column] is None else row[column]
            if not isinstance(text, str):
                raise self._refusal(f'column "{column}" holds {type(text).__name__}', "#COLUMN with text")
            yield text

    def _refusal(self, problem: str, valid: str = FORM) -> UserError:
        return UserError(f"{self.flag} {self.url}: {problem}; valid: {valid}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """In the block, `datasets` and the hub's library show no progress bars or warnings; we report errors ourselves."""
    import datasets
    from huggingface_hub.utils import logging

    shown, level = datasets.utils.logging.is_progress_bar_enabled(), logging.get_verbosity()
    datasets.disable_progress_bars()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            datasets.enable_progress_bars()

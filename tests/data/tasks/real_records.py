"""Real records, and a tokenizer small enough to reckon with."""

from pathlib import Path
from typing import Any

from megajax.data.tasks.records import Question, Records
from megajax.data.tasks.registry import TaskConfig
from megajax.data.tasks.samples import read_records
from megajax.data.text.tokenizer import Tokenizer
from megajax.data.text.tokenizers import read_wordpiece, wordpiece

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SQUAD1, SQUAD2 = "squad/dev-v1.1.json", "squad/dev-v2.0-2articles.json"


def letters() -> Tokenizer:
    """A vocabulary whose words are single letters and digits."""
    return wordpiece({token: number for number, token in enumerate([*SPECIAL, *"abcdefghijklmnopqrstuvwxyz_"])})


def real_tokenizer(folder: Path) -> Tokenizer:
    return read_wordpiece(folder / "bert-uncased" / "vocab.txt")


def read(task: str, *paths: str | Path, labelled: bool = True, **change: Any) -> Records:
    return read_records(task, list(map(str, paths)), TaskConfig(**change), "--data.dev", labelled=labelled)


def squad(file: Path) -> list[Question]:
    """Of either version."""
    return read("squad2", file).entries

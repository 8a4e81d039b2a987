"""What the readers of tokenizers in Hugging Face's format have in common."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megajax import reading
from megajax.data.saved_tokenizer import SavedTokenizer
from megajax.data.tokenizer import FILE_BYTES
from megajax.errors import UserError

SINGLE = "tokenizer.json"
SETTINGS = "tokenizer_config.json"


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        UserError: there is none.
    """
    content = reading.read_json(file, FILE_BYTES)
    if not isinstance(content, dict):
        raise UserError(f"{file}: not a JSON object; valid: what the library tokenizers wrote")
    return content


def check_plain(file: Path, content: Mapping[str, Any], plain: Mapping[str, tuple[object, ...]], owner: str) -> None:
    """Check a tokenizer's fields, `section.name` or `name`, against their valid values; None: it may be missing.

    Args:
        file: that they are from.
        content: of the file.
        plain: valid values by field.
        owner: whose they are, for error messages, as in "GPT-2's".

    Raises:
        UserError: one has another value.
    """
    for key, valid in plain.items():
        section, _, name = key.rpartition(".")
        part = (content.get(section) or {}) if section else content
        value = part.get(name) if isinstance(part, dict) else part
        if not any(value == known and type(value) is type(known) for known in valid):
            raise UserError(f"{file}: {key} is {json.dumps(value)[:80]}; valid: {json.dumps(valid[0])}, as {owner}")


def write_objects(folder: Path, contents: Mapping[str, Mapping[str, Any]]) -> None:
    """Write JSON files by name."""
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_saved(tokenizer: SavedTokenizer, length: int, folder: Path) -> None:
    """Write the files of a tokenizer as they were read; `length` is that of the model's sequences, for the settings of
    one that came without."""
    for name, text in tokenizer.files.items():
        (folder / name).write_text(text, encoding="utf-8", newline="")
    if SETTINGS not in tokenizer.files:
        end = tokenizer.token(tokenizer.end_of_text)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length, "eos_token": end}
        write_objects(folder, {SETTINGS: settings | tokenizer.named_tokens})

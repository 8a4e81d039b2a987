"""The files next to a `tokenizer.json`: which tokens are special or added, and how messages become text.

They are those of `transformers`: `tokenizer_config.json`, `special_tokens_map.json`, `added_tokens.json`,
`chat_template.jinja`, and for the ids that end generation `generation_config.json`, or else the model's `config.json`.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megajax.core.errors import UserError
from megajax.data.text.added_tokens import ADDED, CONFIG, SPECIAL, Declared, read_declared
from megajax.host import reading

FILE_BYTES = 1 << 26  # of a tokenizer file; a vocabulary with 256,000 tokens has 7 MB
SINGLE, TEMPLATE, GENERATION = "tokenizer.json", "chat_template.jinja", "generation_config.json"
MODEL = "config.json"


@dataclass(frozen=True)
class TokenizerSettings:
    """What is known about a tokenizer besides `tokenizer.json`."""

    files: dict[str, str]  # contents of its files by name, as read
    declared: Declared  # tokens
    ends: list[int]  # ids that end generation, from the model's settings; empty if these do not say
    template: str | None  # the chat template
    splits_special: bool  # special tokens spelled out in a text count as text

    @classmethod
    def of(cls, files: dict[str, str], ends: list[int], folder: Path = Path()) -> "TokenizerSettings":
        """The settings in these files, which messages say are in `folder`."""
        config, special, added = (
            parsed_object(files.get(name, "{}"), folder / name) for name in (CONFIG, SPECIAL, ADDED)
        )
        others = config.get("fast_tokenizer_files") or [SINGLE]
        if others != [SINGLE]:
            named = json.dumps(others)[:80]
            raise UserError(f"{folder / CONFIG}: fast_tokenizer_files is {named}; valid: {SINGLE} alone, or none")
        declared = read_declared(config, special, added, folder)
        template = files.get(TEMPLATE) or _template(config.get("chat_template"), folder / CONFIG)
        return cls(files, declared, ends, template, config.get("split_special_tokens") is True)

    def without(self, tokens: Collection[str]) -> "TokenizerSettings":
        """The settings, with these tokens removed from all roles and lists in their files."""
        listed = {name: self.files[name] for name in (CONFIG, SPECIAL, ADDED) if name in self.files}
        files = {name: json.dumps(_without(json.loads(text), tokens), indent=2) + "\n" for name, text in listed.items()}
        return TokenizerSettings.of({**self.files, **files}, self.ends)


def _without(value: Any, tokens: Collection[str]) -> Any:
    def is_one(entry: Any) -> bool:
        token = entry.get("content") if isinstance(entry, dict) else entry
        return isinstance(token, str) and token in tokens

    if isinstance(value, dict):
        kept = {name: entry for name, entry in value.items() if name not in tokens and not is_one(entry)}
        return {name: _without(entry, tokens) for name, entry in kept.items()}
    return [_without(entry, tokens) for entry in value if not is_one(entry)] if isinstance(value, list) else value


NO_SETTINGS = TokenizerSettings({}, Declared(), [], None, splits_special=False)


def read_settings(folder: Path) -> TokenizerSettings:
    """The settings in a folder, some of whose files may be missing."""
    files = {
        name: reading.read_text(folder / name, FILE_BYTES)
        for name in (CONFIG, SPECIAL, ADDED, TEMPLATE)
        if reading.is_file(folder / name)
    }
    return TokenizerSettings.of(files, _ends(folder), folder)


def parsed_object(text: str, file: Path) -> dict[str, Any]:
    """The JSON object in a file's text."""
    try:
        content = reading.parse_json(text)
    except ValueError as error:
        raise UserError(f"{file}: not JSON: {error}; valid: JSON in UTF-8") from None
    if not isinstance(content, dict):
        raise UserError(f"{file}: not a JSON object; valid: a file written by transformers or tokenizers")
    return content


def _template(value: Any, file: Path) -> str | None:
    """The template, or among several named ones the one called `default`."""
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        value = {str(each.get("name")): each.get("template") for each in value}
    if isinstance(value, dict):
        value = value.get("default")
    if value is not None and not isinstance(value, str):
        raise UserError(
            f"{file}: chat_template is not a template; valid: a text, or a list of objects with name, template"
        )
    return value


def _ends(folder: Path) -> list[int]:
    file = next((folder / name for name in (GENERATION, MODEL) if reading.is_file(folder / name)), None)
    if file is None:
        return []
    value = parsed_object(reading.read_text(file), file).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(number) is int for number in ids):
        raise UserError(f"{file}: eos_token_id is not an id; valid: the id of a token, or a list of ids")
    return list(dict.fromkeys(ids))

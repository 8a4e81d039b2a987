"""The files next to a `tokenizer.json`: which tokens begin and end texts, and how messages become text.

They are those of `transformers`: `tokenizer_config.json`, `special_tokens_map.json`, `chat_template.jinja`, and for the
ids that end generation `generation_config.json`, or else the model's `config.json`.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megajax.errors import UserError
from megajax.host import reading

FILE_BYTES = 1 << 26  # of a tokenizer file; a vocabulary with 256,000 tokens has 7 MB
SINGLE, CONFIG, SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE, GENERATION = "chat_template.jinja", "generation_config.json"

_MODEL = "config.json"
_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


@dataclass(frozen=True)
class TokenizerSettings:
    """What is known about a tokenizer besides `tokenizer.json`."""

    files: dict[str, str]  # contents of its files by name, as read
    named: dict[str, str]  # existing tokens by role (`eos_token`)
    ends: list[int]  # ids that end generation, from the model's settings; empty if these do not say
    template: str | None  # the chat template
    splits_special: bool  # special tokens spelled out in a text count as text

    def without(self, tokens: Collection[str]) -> "TokenizerSettings":
        """The settings, with these tokens removed from all roles and lists in their files."""
        named = {name: self.files[name] for name in (CONFIG, SPECIAL) if name in self.files}
        files = {name: json.dumps(_without(json.loads(text), tokens), indent=2) + "\n" for name, text in named.items()}
        return replace(self, files={**self.files, **files})


def _without(value: Any, tokens: Collection[str]) -> Any:
    def is_one(entry: Any) -> bool:
        token = entry.get("content") if isinstance(entry, dict) else entry
        return isinstance(token, str) and token in tokens

    if isinstance(value, dict):
        return {name: _without(entry, tokens) for name, entry in value.items() if not is_one(entry)}
    return [_without(entry, tokens) for entry in value if not is_one(entry)] if isinstance(value, list) else value


NO_SETTINGS = TokenizerSettings({}, {}, [], None, splits_special=False)


def read_settings(folder: Path) -> TokenizerSettings:
    """The settings in a folder, some of whose files may be missing."""
    files = {
        name: reading.read_text(folder / name, FILE_BYTES)
        for name in (CONFIG, SPECIAL, TEMPLATE)
        if reading.is_file(folder / name)
    }
    config = parsed_object(files.get(CONFIG, "{}"), folder / CONFIG)
    named = _named(config, folder / CONFIG)
    if "added_tokens_decoder" not in config:  # in older files the other one decides
        named |= _named(parsed_object(files.get(SPECIAL, "{}"), folder / SPECIAL), folder / SPECIAL)
    template = files.get(TEMPLATE) or _template(config.get("chat_template"), folder / CONFIG)
    return TokenizerSettings(files, named, _ends(folder), template, config.get("split_special_tokens") is True)


def parsed_object(text: str, file: Path) -> dict[str, Any]:
    """The JSON object in a file's text."""
    try:
        content = reading.parse_json(text)
    except ValueError as error:
        raise UserError(f"{file}: not JSON: {error}; valid: JSON in UTF-8") from None
    if not isinstance(content, dict):
        raise UserError(f"{file}: not a JSON object; valid: a file written by transformers or tokenizers")
    return content


def _named(content: Mapping[str, Any], file: Path) -> dict[str, str]:
    found = {}
    for name in _NAMED:
        value = content.get(name)
        token = value.get("content") if isinstance(value, dict) else value
        if value is None:
            continue
        if not isinstance(token, str) or not token:
            raise UserError(
                f"{file}: {name} is not a token; valid: the text of a token, or an object with it as content"
            )
        found[name] = token
    return found


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
    file = next((folder / name for name in (GENERATION, _MODEL) if reading.is_file(folder / name)), None)
    if file is None:
        return []
    value = parsed_object(reading.read_text(file), file).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(number) is int for number in ids):
        raise UserError(f"{file}: eos_token_id is not an id; valid: the id of a token, or a list of ids")
    return list(dict.fromkeys(ids))

"""Tokenizers of models in the Hugging Face format: read them as for training, check that they fit, and write them."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megajax.convert.tokenizer_classes import MISTRAL, readable
from megajax.core.errors import UserError
from megajax.data.text.added_tokens import CONFIG
from megajax.data.text.tokenizer import END_OF_TEXT, Tokenizer
from megajax.data.text.tokenizer_settings import FILE_BYTES, MODEL, SINGLE
from megajax.data.text.tokenizers import SPECIAL_TOKENS, Kind, is_tokenizer_folder, load_tokenizer
from megajax.host import reading

_OTHERS = (  # ends of the names of other tokenizers' files
    *("tokenizer.model", "tiktoken.model", "spiece.model", "bpe.model", ".tiktoken"),
    *("tekken.json", "vocab.json", "merges.txt"),
)
_LARGE = 100_000  # only of vocabularies above this size does transformers replace the rule
_ROLES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")  # of SPECIAL_TOKENS, in their order
_PIECES = {"continuing_subword_prefix": "##", "unk_token": "[UNK]"}  # required of a BERT's model in tokenizer.json
_DECIDED = {  # fields of tokenizer_config.json that override tokenizer.json in transformers -> their place in that file
    "add_prefix_space": ("pre_tokenizer", "add_prefix_space"),
    "do_lower_case": ("normalizer", "lowercase"),
    "strip_accents": ("normalizer", "strip_accents"),
    "tokenize_chinese_chars": ("normalizer", "handle_chinese_chars"),
}


def read_tokenizer(folder: Path, kind: Kind, vocab_size: int) -> tuple[Tokenizer | None, list[str]]:
    """The tokenizer in a model's folder (None if there is none), and its added tokens that are left out because the
    model, with this `vocab_size`, has no ids for them.

    Raises:
        UserError: it is damaged, is not of the `kind` that its family uses, or has more ids than the model.
    """
    if not is_tokenizer_folder(folder):
        if other := min((name for name in reading.names(folder) if name.endswith(_OTHERS)), default=""):
            valid = f"{SINGLE}, as written by save_pretrained, or no tokenizer"
            raise UserError(f"{folder}: {other} without {SINGLE}; valid: {valid}")
        return None, []
    tokenizer = load_tokenizer(folder, "PATH")
    if kind == "wordpiece":
        check_wordpiece(tokenizer, str(folder))
    _check_settings(folder, tokenizer)
    tokenizer, left_out = tokenizer.without_added_from(vocab_size)
    if tokenizer.size > vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.size} ids, vocab_size in config.json is {vocab_size}; "
            "valid: no more ids than that"
        )
    return tokenizer, left_out


def check_wordpiece(tokenizer: Tokenizer, name: str) -> None:
    """Raises `UserError` unless BERT can use a tokenizer, which messages call `name`."""
    missing = [token for token in SPECIAL_TOKENS if token not in tokenizer.vocabulary]
    if not tokenizer.is_wordpiece or missing:
        what = (
            f"no {', '.join(missing)}" if tokenizer.is_wordpiece else "the tokenizer does not split words into pieces"
        )
        raise UserError(f"{name}: {what}; valid: a WordPiece vocabulary with {', '.join(SPECIAL_TOKENS)}")
    model = json.loads(tokenizer.files[SINGLE])["model"]
    for field, valid in _PIECES.items():
        if model.get(field, valid) != valid:
            raise UserError(f"{name}: {field} of {SINGLE} is {json.dumps(model[field])[:80]}; valid: {valid}")


def _check_settings(folder: Path, tokenizer: Tokenizer) -> None:
    """Refuse settings that contradict `tokenizer.json`, with which texts would get other ids in `transformers`."""
    if not reading.is_file(folder / CONFIG):
        return
    settings = reading.read_object(folder / CONFIG, "a file written by transformers", FILE_BYTES)
    for name, (section, theirs) in _DECIDED.items():
        ours = tokenizer.part(section)
        if theirs not in ours or settings.get(name) is None:
            continue
        decided = ours["lowercase"] if ours[theirs] is None else ours[theirs]  # a null strip_accents follows lowercase
        if settings[name] is not decided:
            given, valid = json.dumps(settings[name])[:80], json.dumps(decided)
            raise UserError(f"{folder / CONFIG}: {name} is {given}; valid: {valid}, as the tokenizer itself")
    model = reading.read_json(folder / MODEL) if reading.is_file(folder / MODEL) else {}
    is_old = not re.match(r"[5-9]|\d\d", str(model.get("transformers_version")))
    if settings.get(MISTRAL) is True and tokenizer.size > _LARGE and is_old and model.get("model_type") == "mistral":
        raise UserError(f"{folder / CONFIG}: {MISTRAL} is true; valid: false, or a tokenizer.json with that rule")


def write_tokenizer(tokenizer: Tokenizer, length: int, folder: Path, model_type: str) -> None:
    """Write a tokenizer's files as they were read, except for settings with which `transformers` would give other ids
    beside a model of this type; `length` is the model's sequence length, for a tokenizer without settings."""
    stored = tokenizer.files.get(CONFIG)
    settings = _settings(tokenizer, length) if stored is None else json.loads(stored)
    readable_settings, more = readable(tokenizer, settings, model_type)
    for name, text in {**tokenizer.files, **more}.items():
        (folder / name).write_text(text, encoding="utf-8", newline="")
    if stored is None or readable_settings != settings:
        write_objects(folder, {CONFIG: readable_settings})


def _settings(tokenizer: Tokenizer, length: int) -> dict[str, Any]:
    """Settings of a tokenizer that has none."""
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length}
    end = tokenizer.token(tokenizer.end_of_text)
    if tokenizer.is_wordpiece:
        named = {role: token for role, token in zip(_ROLES, SPECIAL_TOKENS, strict=True)}
        settings |= {role: token for role, token in named.items() if token in tokenizer.vocabulary}
        normalizer = tokenizer.part("normalizer")
        settings |= {name: normalizer[theirs] for name, (_, theirs) in _DECIDED.items() if theirs in normalizer}
        settings["tokenizer_class"] = "BertTokenizer"
    elif end == END_OF_TEXT:
        settings |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    elif end in tokenizer.special_tokens:
        settings["eos_token"] = end
    return settings | tokenizer.named_tokens


def write_objects(folder: Path, contents: Mapping[str, Mapping[str, Any]]) -> None:
    """Write JSON files by name."""
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

"""Convert text to token ids and back, with any tokenizer of the package `tokenizers`, given as a `tokenizer.json`."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megajax.core.errors import UserError
from megajax.data.text.probing import check_rules, core, package_errors
from megajax.data.text.tokenizer_settings import GENERATION, NO_SETTINGS, SINGLE, TokenizerSettings, parsed_object
from megajax.host.files import write_atomically

END_OF_TEXT = "<|endoftext|>"  # ends documents in GPT-2's vocabulary, and separates documents in a text file
MOST_IDS = 1 << 31  # token ids are int32

_ENDS = (END_OF_TEXT, "[SEP]")  # end documents if no settings say what does: GPT-2's token, and BERT's
_LINE_END = "\n"  # text after it gets no space prepended, as when transformers encodes parts of chats
_UNSET_END = 50256  # the id that transformers writes for a GPT-2 if none was given
_PROBES = ("a", "1", "\n")  # every vocabulary has a token for at least one of them


class Tokenizer:
    """A tokenizer as defined by its files: `text` is the text of `tokenizer.json`, `settings` come from the files next
    to it in `folder`. `save` writes the files as they were read.

    Every text is preceded by what the post-processor in `tokenizer.json` puts before it, as in `transformers`, which
    ignores `add_bos_token` if there is a `tokenizer.json`; what it puts after a text is omitted. BERT's `[CLS]` is
    omitted too, because its samples add that themselves. Documents end with `eos_token`.
    """

    def __init__(self, text: str, settings: TokenizerSettings = NO_SETTINGS, folder: Path = Path()) -> None:
        file = self._file = folder / SINGLE
        self._content = parsed_object(text, file)
        check_rules(self._content, file)
        self._core = core(text, file)
        self._core.encode_special_tokens = settings.splits_special
        own: dict[str, int] = self._core.get_vocab(with_added_tokens=True)
        if not own or max(own.values()) >= MOST_IDS:
            raise UserError(f"{file}: no vocabulary; valid: tokens with ids from 0 to {MOST_IDS - 1}")
        with package_errors(file):  # it normalizes the tokens
            settings.declared.add_to(self._core)
        self.vocabulary: dict[str, int] = self._core.get_vocab(with_added_tokens=True)  # token -> id
        self.size = max(self.vocabulary.values()) + 1  # number of ids that a model needs
        named = settings.declared.named(self._core)
        # Special tokens by role or other name, as chat templates name them (`eos_token`).
        self.named_tokens = {name: token.content for name, token in named.items()}
        end = _end(self.vocabulary, self.named_tokens, settings.ends, folder)
        self.end_of_text = self.vocabulary[end]  # id that ends every document
        self.begin: list[int] = [] if self.is_wordpiece else _begin(self._core)  # before every document and prompt
        known = [token_id for token_id in settings.ends if token_id in self.vocabulary.values()]
        self.ends: list[int] = list(dict.fromkeys([self.end_of_text, *known]))  # ids that end generation
        self.chat_template = settings.template  # turns messages into text (`data/text/chat.py`); None: unknown
        self.files, self._settings = {**settings.files, SINGLE: text}, settings  # contents of its files by name

    def part(self, name: str) -> dict[str, Any]:
        """A part of `tokenizer.json` (`normalizer`, `pre_tokenizer`, `decoder`) with all its settings; empty: none."""
        found = getattr(self._core, name)
        return json.loads(found.__getstate__()) if found else {}

    def with_files(self, files: dict[str, str]) -> "Tokenizer":
        """The tokenizer with these contents of files in the place of its own."""
        files = self.files | files
        return Tokenizer(files[SINGLE], TokenizerSettings.of(files, self._settings.ends))

    def without_added_from(self, size: int) -> tuple["Tokenizer", list[str]]:
        """The tokenizer without added tokens whose ids are `size` or more, and these tokens."""
        added = self._core.get_added_tokens_decoder().items()
        left_out = {token.content for token_id, token in added if token_id >= size}
        if not left_out:
            return self, []
        own = self._content.get("added_tokens") or []
        content = self._content | {"added_tokens": [token for token in own if token["content"] not in left_out]}
        return Tokenizer(json.dumps(content, ensure_ascii=False), self._settings.without(left_out)), sorted(left_out)

    def save(self, folder: str | Path) -> None:
        """Write its files as they were read, and `generation_config.json` with the ids that end generation."""
        files = self.files
        if self.ends != [self.end_of_text]:
            files = {GENERATION: json.dumps({"eos_token_id": self.ends}) + "\n", **files}
        for name, text in files.items():
            write_atomically(Path(folder, name), text)

    @property
    def is_wordpiece(self) -> bool:
        """Whether it splits words into pieces like BERT's."""
        return self._content["model"].get("type") == "WordPiece"

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without begin and end. Special tokens spelled out in it (`<|endoftext|>`) become tokens."""
        with package_errors(self._file):
            return self._core.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a text to continue, after `begin` as in `with_begin`; the end of text if that gives none."""
        return self.with_begin(self.encode(text)) or [self.end_of_text]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts, encoded on all cores."""
        with package_errors(self._file):
            return [encoding.ids for encoding in self._core.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_batch_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Ids of several texts, and the range of characters of every token."""
        with package_errors(self._file):
            found = self._core.encode_batch(list(texts), add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in found]

    def encode_continuations(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts that continue another one: without the space that some tokenizers put before a text."""
        if not self._adds_space:
            return self.encode_batch(texts)
        line_end = self.encode(_LINE_END)
        after = self.encode_batch([_LINE_END + text for text in texts])
        direct = self.encode_batch(texts)
        return [
            both[len(line_end) :] if both[: len(line_end)] == line_end else alone
            for both, alone in zip(after, direct, strict=True)
        ]

    @cached_property
    def _adds_space(self) -> bool:
        """Whether the first word of a text gets a space before it."""
        return self.decode(self.encode("a") * 2) != "aa"

    def with_begin(self, ids: list[int]) -> list[int]:
        """The ids of a text after `begin`, or unchanged if the text spells that out."""
        return ids if self.begin and ids[: len(self.begin)] == self.begin else [*self.begin, *ids]

    def decode(self, ids: Iterable[int]) -> str:
        """Text for ids, including special tokens; bytes that are not UTF-8 become U+FFFD."""
        return self._core.decode([int(token) for token in ids], skip_special_tokens=False)

    def token(self, token_id: int) -> str:
        """The token with an id, as in the vocabulary."""
        return self._core.id_to_token(token_id)

    @property
    def special_tokens(self) -> list[str]:
        """Special tokens, which become one token when they are spelled out in a text."""
        return [token.content for token in self._core.get_added_tokens_decoder().values() if token.special]

    @property
    def has_special_flags(self) -> bool:
        """Whether some special token is not found in every place where a text spells it out, or takes spaces too."""
        special = [token for token in self._core.get_added_tokens_decoder().values() if token.special]
        return any(token.normalized or token.lstrip or token.rstrip or token.single_word for token in special)

    def num_bytes(self, ids: npt.NDArray[np.integer]) -> int | None:
        """UTF-8 bytes of the normalized text of these ids, without special tokens; None if the tokenizer is neither
        byte-level nor has a byte fallback."""
        if self._byte_lengths is not None:
            return int(self._byte_lengths[ids].sum())
        if self._content["model"].get("byte_fallback") is True:
            return len(self._core.decode(ids.tolist(), skip_special_tokens=True).encode())
        return None

    @cached_property
    def _byte_lengths(self) -> npt.NDArray[np.int64] | None:
        """Bytes of each id in a byte-level tokenizer, whose printable tokens have one character per byte."""
        if '"type": "ByteLevel"' not in json.dumps(self._content.get("decoder")):  # possibly inside a sequence
            return None
        lengths = np.zeros(self.size, np.int64)
        for token, token_id in self.vocabulary.items():
            lengths[token_id] = len(token)
        for token_id, token in self._core.get_added_tokens_decoder().items():
            lengths[token_id] = 0 if token.special else len(token.content.encode())
        return lengths

    def __eq__(self, other: object) -> bool:
        """Whether every document gets the same ids."""
        if not isinstance(other, Tokenizer):
            return NotImplemented
        same = (self.begin, self.end_of_text) == (other.begin, other.end_of_text)
        return same and (self.files == other.files or self._rules == other._rules)

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def _rules(self) -> tuple[Any, ...]:
        """Everything that determines ids, without empty settings."""
        content = json.loads(self._core.to_str())
        model = {name: value for name, value in content["model"].items() if value}
        splits = self._settings.splits_special
        return model, content["normalizer"], content["pre_tokenizer"], content["added_tokens"], splits


def _end(vocabulary: Mapping[str, int], named: Mapping[str, str], ends: Sequence[int], folder: Path) -> str:
    """The token that ends documents: the settings' eos_token, else one that ends generation, else the usual one."""
    tokens = {token_id: token for token, token_id in vocabulary.items()}
    valid = "valid: a token of tokenizer.json"
    if unknown := [token_id for token_id in ends if token_id not in tokens and token_id != _UNSET_END]:
        raise UserError(f"{folder}: eos_token_id {unknown[0]} is not the id of a token; {valid}")
    usual = next((token for token in _ENDS if token in vocabulary), "")
    end = named.get("eos_token") or next((tokens[token_id] for token_id in ends if token_id in tokens), usual)
    if not end:
        raise UserError(f"{folder}: no eos_token; {valid} as eos_token in tokenizer_config.json, to end documents with")
    return end


def _begin(core: Any) -> list[int]:
    """What the post-processor puts before a text."""
    for probe in _PROBES:
        encoding = core.encode(probe, add_special_tokens=True)
        if 0 in encoding.special_tokens_mask:
            return encoding.ids[: encoding.special_tokens_mask.index(0)]
    return []

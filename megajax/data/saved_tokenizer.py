"""Any tokenizer of the package `tokenizers`, as its `tokenizer.json` has it: those of Llama, Qwen and Mistral."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megajax import reading
from megajax.data.files import write_atomically
from megajax.data.tokenizer import END_OF_TEXT, FILE_BYTES, MOST_IDS, Tokenizer
from megajax.data.tokenizer_settings import GENERATION, SINGLE, TokenizerSettings, parsed_object, read_settings
from megajax.errors import UserError

_LINE_END = "\n"  # after which a text has no space put before it, as transformers encodes parts of chats
_PROBES = ("a", "1", "\n")  # one of them has a token in every vocabulary


class SavedTokenizer(Tokenizer):
    """A tokenizer as it was saved, whole: its files are kept as they were read.

    Before every text stands what the post-processor of `tokenizer.json` puts there, as in `transformers`, which ignores
    `add_bos_token` where there is a `tokenizer.json`; what it puts after a text is left out. Documents end with
    `eos_token`. Special tokens that are written out in a text become tokens.

    Args:
        text: of `tokenizer.json`.
        settings: what the files beside it say.
        folder: where they are, for error messages.

    Raises:
        UserError: the tokenizer cannot be used.
    """

    def __init__(self, text: str, settings: TokenizerSettings, folder: Path) -> None:
        file = folder / SINGLE
        content = parsed_object(text, file)
        core = _core(text, file)
        vocabulary: dict[str, int] = core.get_vocab(with_added_tokens=True)
        if not vocabulary or max(vocabulary.values()) >= MOST_IDS:
            raise UserError(f"{file}: no vocabulary; valid: tokens with ids from 0 to {MOST_IDS - 1}")
        _add_named(core, vocabulary, settings)
        super().__init__(core, vocabulary, _end(vocabulary, settings, folder))
        self._text, self._settings, self._content = text, settings, content
        self.begin, self.chat_template = _begin(core), settings.template
        self.named_tokens = {name: token for name, token in settings.named.items() if token in vocabulary}
        self.ends = list(dict.fromkeys([self.end_of_text, *settings.ends]))

    @classmethod
    def read(cls, folder: Path) -> "SavedTokenizer":
        """Read a folder's `tokenizer.json` and the files beside it.

        Raises:
            UserError: one cannot be read or is malformed, or they do not fit each other.
        """
        return cls(reading.read_text(folder / SINGLE, FILE_BYTES), read_settings(folder), folder)

    @property
    def files(self) -> dict[str, str]:
        """Texts of its files by name, as they were read."""
        return {**self._settings.files, SINGLE: self._text}

    def encode_continuations(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts that go on with another one: without the space that some tokenizers put before texts."""
        if not self._adds_space:
            return self.encode_batch(texts)
        line_end = self.encode(_LINE_END)
        after = self.encode_batch([_LINE_END + text for text in texts])
        own = self.encode_batch(texts)
        return [
            both[len(line_end) :] if both[: len(line_end)] == line_end else alone
            for both, alone in zip(after, own, strict=True)
        ]

    @cached_property
    def _adds_space(self) -> bool:
        """Whether a text's first word gets a space before it."""
        return self.decode(self.encode("a") * 2) != "aa"

    def num_bytes(self, ids: npt.NDArray[np.integer]) -> int | None:
        """UTF-8 bytes of the text, as it was normalized, that was encoded as these ids, without special tokens; None if
        the tokenizer is neither byte-level nor falls back to bytes."""
        if self._byte_lengths is not None:
            return int(self._byte_lengths[ids].sum())
        if self._content["model"].get("byte_fallback") is True:
            return len(self._core.decode(ids.tolist(), skip_special_tokens=True).encode())
        return None

    @cached_property
    def _byte_lengths(self) -> npt.NDArray[np.int64] | None:
        """Of every id, of a byte-level tokenizer, in whose model a token's printable form has a character a byte."""
        if "ByteLevel" not in _types(self._content.get("decoder")):
            return None
        lengths = np.zeros(self.size, np.int64)
        added = self._core.get_added_tokens_decoder()
        for token, number in self.vocabulary.items():
            lengths[number] = len(token)
        for number, token in added.items():
            lengths[number] = 0 if token.special else len(token.content.encode())
        return lengths

    def to_json(self) -> str:
        """The text of `tokenizer.json`."""
        return self._text

    def save(self, folder: str | Path) -> None:
        """Write its files as they were read, and what ends a generation as `generation_config.json`; each atomically.

        Raises:
            UserError: they cannot be written.
        """
        files = self.files
        if self.ends != [self.end_of_text]:
            files = {GENERATION: json.dumps({"eos_token_id": self.ends}) + "\n", **files}
        for name, text in files.items():
            write_atomically(Path(folder, name), text)


def is_gpt2(folder: Path) -> bool:
    """Whether a `tokenizer.json` says no more than the `vocab.json` and `merges.txt` of a tokenizer like GPT-2's.

    Raises:
        UserError: it cannot be read or is malformed.
    """
    content = parsed_object(reading.read_text(folder / SINGLE, FILE_BYTES), folder / SINGLE)
    added = [token.get("content") for token in content.get("added_tokens") or [] if isinstance(token, dict)]
    before = content.get("pre_tokenizer")
    return (
        content.get("normalizer") is None
        and isinstance(before, dict)
        and before.get("type") == "ByteLevel"
        and before.get("add_prefix_space") is False
        and _types(content.get("post_processor")) <= {"ByteLevel"}
        and set(added) <= {END_OF_TEXT}
    )


def _core(text: str, file: Path) -> Any:
    from tokenizers import Tokenizer as Core

    try:
        core = Core.from_str(text)
        core.no_padding()
        core.no_truncation()
        core.encode("a")
        return core
    except BaseException as error:  # what is wrong inside the package is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{file}: no tokenizer: {reason}; valid: what the package tokenizers wrote") from None


def _add_named(core: Any, vocabulary: Mapping[str, int], settings: TokenizerSettings) -> None:
    """Make tokens of the vocabulary special that only the settings name as such, as `transformers` does."""
    from tokenizers import AddedToken

    known = {token.content for token in core.get_added_tokens_decoder().values()}
    tokens = [token for token in settings.named.values() if token in vocabulary and token not in known]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in dict.fromkeys(tokens)])
    core.encode_special_tokens = settings.splits_special


def _end(vocabulary: Mapping[str, int], settings: TokenizerSettings, folder: Path) -> str:
    """The token that ends documents: the settings' eos_token, or what ends a generation, or `<|endoftext|>`."""
    tokens = {number: token for token, number in vocabulary.items()}
    valid = "valid: a token of tokenizer.json"
    if unknown := [number for number in settings.ends if number not in tokens]:
        raise UserError(f"{folder}: eos_token_id {unknown[0]} is the id of no token; {valid}")
    end = settings.named.get("eos_token") or next((tokens[number] for number in settings.ends), END_OF_TEXT)
    if end not in vocabulary:
        name = f"eos_token {end[:40]!r} is no token" if "eos_token" in settings.named else "no eos_token"
        raise UserError(f"{folder}: {name}; {valid} as eos_token in tokenizer_config.json, to end documents with")
    return end


def _begin(core: Any) -> list[int]:
    """What the post-processor puts before a text."""
    for probe in _PROBES:
        encoding = core.encode(probe, add_special_tokens=True)
        if 0 in encoding.special_tokens_mask:
            return encoding.ids[: encoding.special_tokens_mask.index(0)]
    return []


def _types(part: Any) -> set[str]:
    """The types of a part of `tokenizer.json`, those in a sequence too."""
    if isinstance(part, list):
        return set().union(*map(_types, part)) if part else set()
    if not isinstance(part, dict):
        return set()
    inner = [value for value in part.values() if isinstance(value, list)]
    return {str(part.get("type"))} | set().union(set(), *map(_types, inner))

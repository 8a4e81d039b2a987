"""Text to token ids and back: GPT-2's byte-level byte-pair encoding, BERT's WordPiece, and any `tokenizer.json`."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# The special token that ends every document in GPT-2's vocabulary, and separates documents in a text file.
END_OF_TEXT = "<|endoftext|>"
FILE_BYTES = 1 << 26  # of a tokenizer's file; a vocabulary of 256,000 tokens has 7 MB
MOST_IDS = 1 << 31  # token ids are int32


class Tokenizer(ABC):
    """A vocabulary, and how text is cut in its tokens.

    Args:
        core: the tokenizer of the package `tokenizers` that does the work.
        vocabulary: id of every token.
        end: the token that ends every document.

    Attributes:
        vocabulary: as given.
        size: ids that a model needs: the largest id plus one.
        end_of_text: id of the token that ends every document.
        begin: ids that stand before every document and every prompt.
        ends: ids that end a generation, `end_of_text` the first.
        chat_template: how messages become a text (`megajax.data.chat`); None: that is not known.
        named_tokens: special tokens by their role, as chat templates name them (`eos_token`).
    """

    begin: list[int]
    ends: list[int]
    chat_template: str | None
    named_tokens: dict[str, str]

    def __init__(self, core: Any, vocabulary: dict[str, int], end: str) -> None:
        self._core, self.vocabulary = core, vocabulary
        self.size = max(vocabulary.values()) + 1
        self.end_of_text = vocabulary[end]
        self.begin, self.ends = [], [self.end_of_text]
        self.chat_template, self.named_tokens = None, {}

    def encode(self, text: str) -> list[int]:
        """Ids of a text; neither begin nor end is added. Special tokens that are written out in the text
        (`<|endoftext|>`) become tokens."""
        return self._core.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a text to be continued, at least one: after `begin`, unless the text has that written out; of an empty
        one without a begin the end of text."""
        return self.with_begin(self.encode(text)) or [self.end_of_text]

    def encode_continuations(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts that go on with another one."""
        return self.encode_batch(texts)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts, encoded on all cores."""
        return [encoding.ids for encoding in self._core.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_batch_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Ids of several texts, and of every token its first character in the text and the one after its last."""
        found = self._core.encode_batch(list(texts), add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in found]

    @property
    def special_tokens(self) -> list[str]:
        """What becomes a token of its own where it is written out in a text, as a special token."""
        return [token.content for token in self._core.get_added_tokens_decoder().values() if token.special]

    def with_begin(self, ids: list[int]) -> list[int]:
        """The ids of a text after `begin`, or, where the text has that written out, as they are."""
        return ids if self.begin and ids[: len(self.begin)] == self.begin else [*self.begin, *ids]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens included; bytes that are not UTF-8 become U+FFFD."""
        return self._core.decode([int(token) for token in ids], skip_special_tokens=False)

    def token(self, number: int) -> str:
        """The token of an id, as the vocabulary has it."""
        return self._core.id_to_token(number)

    def num_bytes(self, ids: npt.NDArray[np.integer]) -> int | None:
        """UTF-8 bytes of the text that was encoded as these ids, without ends of text; None if that is unknown."""
        return None

    def to_json(self) -> str:
        """The text of `tokenizer.json`, the one file of the package `tokenizers`."""
        return self._core.to_str(pretty=True)

    def __eq__(self, other: object) -> bool:
        """Whether every document gets the same ids."""
        if not isinstance(other, Tokenizer):
            return NotImplemented
        same = (self.begin, self.end_of_text) == (other.begin, other.end_of_text)
        return same and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]

    @abstractmethod
    def save(self, folder: str | Path) -> None:
        """Write the files that `load` reads, each atomically.

        Raises:
            UserError: they cannot be written.
        """

"""Text to token ids and back: GPT-2's byte-level byte-pair encoding, and BERT's WordPiece."""

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
    """

    def __init__(self, core: Any, vocabulary: dict[str, int], end: str) -> None:
        self._core, self.vocabulary = core, vocabulary
        self.size = max(vocabulary.values()) + 1
        self.end_of_text = vocabulary[end]

    def encode(self, text: str) -> list[int]:
        """Ids of a text; no end is added. The end written out in the text (`<|endoftext|>`) becomes its token."""
        return self._core.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts, encoded on all cores."""
        return [encoding.ids for encoding in self._core.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_batch_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Ids of several texts, and of every token its first character in the text and the one after its last."""
        found = self._core.encode_batch(list(texts), add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in found]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens included; bytes that are not UTF-8 become U+FFFD."""
        return self._core.decode([int(token) for token in ids], skip_special_tokens=False)

    def num_bytes(self, ids: npt.NDArray[np.integer]) -> int | None:
        """UTF-8 bytes of the text that was encoded as these ids, without ends of text; None if that is unknown."""
        return None

    def to_json(self) -> str:
        """The text of `tokenizer.json`, the one file of the package `tokenizers`."""
        return self._core.to_str(pretty=True)

    def __eq__(self, other: object) -> bool:
        """Whether every text gets the same ids."""
        return self.to_json() == other.to_json() if isinstance(other, Tokenizer) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    @abstractmethod
    def save(self, folder: str | Path) -> None:
        """Write the files that `load` reads, each atomically.

        Raises:
            UserError: they cannot be written.
        """

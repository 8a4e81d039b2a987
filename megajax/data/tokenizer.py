"""Text to token ids and back: GPT-2's byte-level byte-pair encoding, and BERT's WordPiece."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megajax.errors import UserError

END_OF_TEXT = "<|endoftext|>"
"""The special token that ends every document in GPT-2's vocabulary, and separates documents in a text file."""

BPE_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))  # ours and Hugging Face's; OpenAI's
WORDPIECE_FILES = (("vocab.txt",),)


class Tokenizer(ABC):
    """A vocabulary with the way to split text.

    Args:
        core: the tokenizer of the package `tokenizers` that does the work.
        vocabulary: id of every token.
        end: the token that ends every document.
    """

    def __init__(self, core: Any, vocabulary: dict[str, int], end: str) -> None:
        self._core, self._vocabulary = core, vocabulary
        self.size = max(vocabulary.values()) + 1
        """Ids that a model needs: the largest id plus one."""
        self.end_of_text = vocabulary[end]
        """Id of the token that ends every document."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without an end. The end written out in the text (`<|endoftext|>`) becomes its token."""
        return self._core.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts, encoded on all cores."""
        return [encoding.ids for encoding in self._core.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens included; bytes that are not UTF-8 become U+FFFD."""
        return self._core.decode([int(token) for token in ids], skip_special_tokens=False)

    def num_bytes(self, ids: npt.NDArray[np.integer]) -> int | None:
        """UTF-8 bytes of the text that was encoded as these ids, without ends of text; None if nobody can tell."""
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

    @staticmethod
    def train(
        documents: Iterable[str],
        vocab_size: int,
        kind: Literal["bpe", "wordpiece"] = "bpe",
        flag: str = "--model.vocab-size",
    ) -> "Tokenizer":
        """Learn a vocabulary from documents; the same documents give the same one, whatever the number of cores.

        Args:
            documents: the texts.
            vocab_size: ids wanted; a small corpus may yield fewer, because only pairs seen twice are merged.
            kind: whose way to split text.
            flag: the flag that gave the size, for error messages.

        Raises:
            UserError: `vocab_size` is too small for what every vocabulary has.
        """
        from megajax.data.bpe import BytePairTokenizer
        from megajax.data.wordpiece import WordPieceTokenizer

        learn = BytePairTokenizer.learn if kind == "bpe" else WordPieceTokenizer.learn
        return learn(documents, vocab_size, flag)

    @staticmethod
    def load(folder: str | Path, flag: str = "--tokenizer.path") -> "Tokenizer":
        """Read `vocab.json` and `merges.txt`, or OpenAI's `encoder.json` and `vocab.bpe`, or BERT's `vocab.txt`.

        Raises:
            UserError: folder or files are missing, unreadable or malformed; a token that must be there is not.
        """
        from megajax.data.bpe import BytePairTokenizer
        from megajax.data.wordpiece import WordPieceTokenizer

        if files := _find(Path(folder), BPE_FILES):
            return BytePairTokenizer.read(*files)
        if files := _find(Path(folder), WORDPIECE_FILES):
            return WordPieceTokenizer.read(*files)
        problem = "does not have" if Path(folder).is_dir() else "is not a folder; give one with"
        raise UserError(
            f"{flag}: {folder} {problem} vocab.json and merges.txt (or encoder.json and vocab.bpe, or vocab.txt)"
        )


def is_tokenizer_folder(folder: str | Path) -> bool:
    """Whether a folder holds the files of a tokenizer."""
    return _find(Path(folder), BPE_FILES + WORDPIECE_FILES) is not None


def read_text(file: Path) -> str:
    """The text of a tokenizer's file.

    Raises:
        UserError: it cannot be read or is not UTF-8.
    """
    try:
        return file.read_bytes().decode()
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 text (at byte {error.start})") from None


def _find(folder: Path, alternatives: tuple[tuple[str, ...], ...]) -> list[Path] | None:
    for names in alternatives:
        if all((folder / name).is_file() for name in names):
            return [folder / name for name in names]
    return None

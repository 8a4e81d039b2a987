"""GPT-2's byte-level byte-pair encoding, loaded from its two files or trained on a corpus."""

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megajax.data.files import write_atomically
from megajax.errors import UserError

END_OF_TEXT = "<|endoftext|>"
"""The special token that ends every document."""

_FILE_NAMES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))  # ours and Hugging Face's; OpenAI's


class Tokenizer:
    """A byte-level BPE with GPT-2's pre-tokenizer: no prefix space, every text can be encoded and comes back unchanged.

    Args:
        vocabulary: id of every token, tokens in GPT-2's printable form of bytes.
        merges: pairs of tokens, the first to be merged first.
    """

    def __init__(self, vocabulary: dict[str, int], merges: Sequence[tuple[str, str]]) -> None:
        from tokenizers import AddedToken, models

        self._vocabulary = vocabulary
        self._merges = list(merges)
        self._core = _byte_level(models.BPE(vocab=vocabulary, merges=self._merges))
        self._core.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])

    @property
    def size(self) -> int:
        """Ids that a model needs: the largest id plus one."""
        return max(self._vocabulary.values()) + 1

    @property
    def end_of_text(self) -> int:
        """Id of `<|endoftext|>`."""
        return self._vocabulary[END_OF_TEXT]

    def encode(self, text: str) -> list[int]:
        """Ids of a text. `<|endoftext|>` in it becomes the special token."""
        return self._core.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts, encoded on all cores."""
        return [encoding.ids for encoding in self._core.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens included; bytes that are not UTF-8 become U+FFFD."""
        return self._core.decode([int(token) for token in ids], skip_special_tokens=False)

    def num_bytes(self, ids: npt.NDArray[np.integer]) -> int:
        """UTF-8 bytes of the text that was encoded as these ids; `<|endoftext|>` has none."""
        return int(self._byte_lengths[ids].sum())

    @cached_property
    def _byte_lengths(self) -> npt.NDArray[np.int64]:
        lengths = np.zeros(self.size, np.int64)
        for token, number in self._vocabulary.items():
            lengths[number] = len(token) if token != END_OF_TEXT else 0  # the printable form has a character a byte
        return lengths

    @classmethod
    def train(cls, documents: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learns merges from documents; the same documents give the same tokenizer, whatever the number of cores.

        Ids are laid out as GPT-2's: 256 bytes, merges, `<|endoftext|>` last.

        Args:
            documents: the texts.
            vocab_size: ids wanted; a small corpus may yield fewer, because only pairs seen twice are merged.

        Raises:
            UserError: `vocab_size` is too small for the 256 bytes and the special token.
        """
        from tokenizers import models, pre_tokenizers, trainers

        if vocab_size < 257:
            raise UserError(f"--model.vocab-size {vocab_size}: must be at least 257, for 256 bytes and {END_OF_TEXT}")
        core = _byte_level(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - 1,
            min_frequency=2,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            special_tokens=[],
            show_progress=False,
        )
        core.train_from_iterator(documents, trainer)
        model = json.loads(core.to_str())["model"]
        vocabulary: dict[str, int] = model["vocab"]
        return cls(vocabulary | {END_OF_TEXT: len(vocabulary)}, [(left, right) for left, right in model["merges"]])

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Reads `vocab.json` and `merges.txt`, or OpenAI's `encoder.json` and `vocab.bpe`.

        Raises:
            UserError: folder or files are missing, unreadable or malformed; there is no `<|endoftext|>`.
        """
        vocabulary_file, merges_file = _find(Path(folder))
        vocabulary = _parse_vocabulary(vocabulary_file)
        return cls(vocabulary, _parse_merges(merges_file, vocabulary))

    def save(self, folder: str | Path) -> None:
        """Writes `vocab.json` and `merges.txt`, each atomically.

        Raises:
            UserError: they cannot be written.
        """
        merges = "".join(f"{left} {right}\n" for left, right in self._merges)
        write_atomically(Path(folder, "merges.txt"), "#version: 0.2\n" + merges)
        write_atomically(Path(folder, "vocab.json"), json.dumps(self._vocabulary, ensure_ascii=False))


def is_tokenizer_folder(folder: str | Path) -> bool:
    """Whether a folder holds both files of a tokenizer."""
    return any(all(Path(folder, name).is_file() for name in names) for names in _FILE_NAMES)


def _byte_level(model: Any) -> Any:
    import tokenizers

    core = tokenizers.Tokenizer(model)
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.decoder = tokenizers.decoders.ByteLevel()
    return core


def _find(folder: Path) -> tuple[Path, Path]:
    for vocabulary, merges in _FILE_NAMES:
        if (folder / vocabulary).is_file() and (folder / merges).is_file():
            return folder / vocabulary, folder / merges
    problem = "does not have" if folder.is_dir() else "is not a folder; give one with"
    raise UserError(f"--tokenizer.path: {folder} {problem} vocab.json and merges.txt (or encoder.json and vocab.bpe)")


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode()
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 text (at byte {error.start})") from None


def _parse_vocabulary(file: Path) -> dict[str, int]:
    from tokenizers import pre_tokenizers

    try:
        vocabulary = json.loads(_read(file))
    except json.JSONDecodeError as error:
        raise UserError(f"{file}: not JSON ({error}); it must be one object of token: id") from None
    if not isinstance(vocabulary, dict) or not all(type(token) is int and token >= 0 for token in vocabulary.values()):
        raise UserError(f"{file}: must be one JSON object of token: id, ids being whole numbers from 0")
    if len(set(vocabulary.values())) < len(vocabulary):
        raise UserError(f"{file}: two tokens have the same id; ids must be distinct")
    missing_bytes = sum(byte not in vocabulary for byte in pre_tokenizers.ByteLevel.alphabet())
    if missing_bytes:
        raise UserError(f"{file}: {missing_bytes} of the 256 bytes have no token; it must be a byte-level vocabulary")
    if END_OF_TEXT not in vocabulary:
        raise UserError(f"{file}: no {END_OF_TEXT} token; it must be there, to end documents with")
    return vocabulary


def _parse_merges(file: Path, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(_read(file).split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or not {pair[0], pair[1], pair[0] + pair[1]} <= vocabulary.keys():
            raise UserError(
                f"{file}:{number}: must be two tokens, a space between, that form a third of the vocabulary"
            )
        merges.append((pair[0], pair[1]))
    return merges

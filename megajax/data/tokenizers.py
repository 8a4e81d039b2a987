"""The tokenizers there are: byte-level BPE and WordPiece, learned from documents or read from a folder."""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from megajax.data.bpe import BytePairTokenizer
from megajax.data.tokenizer import Tokenizer
from megajax.data.wordpiece import WordPieceTokenizer
from megajax.errors import UserError

BPE_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))  # ours and Hugging Face's; OpenAI's
WORDPIECE_FILES = (("vocab.txt",),)


def train_tokenizer(
    documents: Iterable[str],
    vocab_size: int,
    kind: Literal["bpe", "wordpiece"] = "bpe",
    flag: str = "--model.vocab-size",
) -> Tokenizer:
    """Learn a vocabulary from documents; the same documents give the same one, whatever the number of cores.

    Args:
        documents: the texts.
        vocab_size: ids wanted; a small corpus may yield fewer, because only pairs seen twice are merged.
        kind: GPT-2's byte-level BPE, or BERT's WordPiece.
        flag: the flag that gave the size, for error messages.

    Raises:
        UserError: `vocab_size` is too small for what every vocabulary has.
    """
    learn = BytePairTokenizer.learn if kind == "bpe" else WordPieceTokenizer.learn
    return learn(documents, vocab_size, flag)


def load_tokenizer(folder: str | Path, flag: str = "--tokenizer.path") -> Tokenizer:
    """Read `vocab.json` and `merges.txt`, or OpenAI's `encoder.json` and `vocab.bpe`, or BERT's `vocab.txt`.

    Raises:
        UserError: folder or files are missing, unreadable or malformed; a token that must be there is not.
    """
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


def _find(folder: Path, alternatives: tuple[tuple[str, ...], ...]) -> list[Path] | None:
    for names in alternatives:
        if all((folder / name).is_file() for name in names):
            return [folder / name for name in names]
    return None

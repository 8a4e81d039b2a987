"""The tokenizers there are: byte-level BPE and WordPiece, learned from documents or read from a folder, and any other
from a `tokenizer.json`."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

from megajax.data.tokenizer import Tokenizer
from megajax.data.tokenizer_settings import CONFIG, FILE_BYTES, GENERATION, SINGLE, SPECIAL, TEMPLATE, read_settings
from megajax.data.vocabularies import learn_byte_pair, learn_wordpiece, read_byte_pair, read_wordpiece
from megajax.errors import UserError
from megajax.host import hub, reading

Kind = Literal["bpe", "wordpiece"]
TRAINING_BYTES = 64 << 20  # of text that a tokenizer is trained on

_READERS: dict[tuple[str, ...], Callable[..., Tokenizer]] = {
    (SINGLE,): lambda file: Tokenizer(reading.read_text(file, FILE_BYTES), read_settings(file.parent), file.parent),
    ("vocab.json", "merges.txt"): read_byte_pair,  # ours and Hugging Face's
    ("encoder.json", "vocab.bpe"): read_byte_pair,  # OpenAI's
    ("vocab.txt",): read_wordpiece,
}
TOKENIZER_FILES = sorted({CONFIG, SPECIAL, TEMPLATE, GENERATION}.union(*_READERS))
_FILES = "vocab.json and merges.txt (or encoder.json and vocab.bpe, or vocab.txt, or tokenizer.json)"


def train_tokenizer(
    documents: Iterable[str], vocab_size: int, kind: Kind = "bpe", flag: str = "--model.vocab-size"
) -> Tokenizer:
    """Learn a vocabulary from documents; the same documents give the same one, whatever the number of cores.

    Args:
        documents: the texts.
        vocab_size: ids wanted; a small corpus may yield fewer, because only pairs seen twice are merged.
        kind: GPT-2's byte-level BPE, or BERT's WordPiece.
        flag: the flag that gave the size, for error messages.
    """
    learn = learn_byte_pair if kind == "bpe" else learn_wordpiece
    return learn(documents, vocab_size, flag)


def training_part(documents: Iterable[str], size: int) -> Iterator[str]:
    """What a tokenizer is trained on of documents of so many bytes: all, or, of more, some at even distances. Where
    the size is not known, 0, the first ones."""
    share, num_read = TRAINING_BYTES / size if size else 1, 0
    for number, text in enumerate(documents):
        if share >= 1 or int((number + 1) * share) > int(number * share):
            yield text
        num_read += len(text.encode())
        if not size and num_read >= TRAINING_BYTES:
            return


def load_tokenizer(folder: str | Path, flag: str = "--tokenizer.path") -> Tokenizer:
    """Read the tokenizer in a folder, from the first of `_READERS`'s files that are there."""
    if there := _files(folder):
        return _READERS[there](*(Path(folder, name) for name in there))
    found = reading.names(folder)
    for names in _READERS:
        half = found & set(names)
        if half and len(names) > 1:
            missing = min(set(names) - half, default="")
            problem = f"{min(half)} without {missing}" if missing else f"{' and '.join(names)} that are no files"
            raise UserError(f"{flag}: {folder} has {problem}; valid: a folder with {_FILES}")
    problem = "has no tokenizer" if reading.is_folder(folder) else "is not a folder"
    raise UserError(f"{flag}: {folder} {problem}; valid: a folder with {_FILES}")


def named_tokenizer(path: str, flag: str = "--tokenizer.path") -> Tokenizer:
    """The tokenizer that a user names: a folder, as `load_tokenizer` reads it, or, where there is none of that name, a
    model of the Hugging Face hub, whose tokenizer is downloaded."""
    if not is_on_hub(path):
        return load_tokenizer(path, flag)
    valid = f"valid: a folder with {_FILES}, or a model of the hub, as in openai-community/gpt2"
    folder = hub.download(path, TOKENIZER_FILES, f"{flag}: {path} is not a folder", valid)
    if not is_tokenizer_folder(folder):
        raise UserError(f"{flag}: the model {path} of the Hugging Face hub has no tokenizer that is read here; {valid}")
    return load_tokenizer(folder, flag)


def is_on_hub(path: str) -> bool:
    """Whether a tokenizer is named by a model of the hub: nothing of that name is here."""
    return hub.is_name(path) and not reading.kind(path)


def is_tokenizer_folder(folder: str | Path) -> bool:
    """Whether a folder holds the files of a tokenizer."""
    return _files(folder) is not None


def has_only_tokenizer_files(folder: str | Path) -> bool:
    """Whether a folder holds files of a tokenizer and nothing else."""
    return Path(folder).is_dir() and {entry.name for entry in Path(folder).iterdir()} <= set(TOKENIZER_FILES)


def _files(folder: str | Path) -> tuple[str, ...] | None:
    """The first files of a tokenizer that are all in a folder."""
    return next((names for names in _READERS if all(reading.is_file(Path(folder, name)) for name in names)), None)

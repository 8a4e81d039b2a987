"""Kinds of tokenizers: GPT-2's byte-level BPE and BERT's WordPiece, learned from documents or read from a folder, and
any other given as a `tokenizer.json`."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from megajax.core.errors import Damaged, UserError
from megajax.data.text.added_tokens import ADDED, CONFIG, SPECIAL
from megajax.data.text.tokenizer import END_OF_TEXT, MOST_IDS, Tokenizer
from megajax.data.text.tokenizer_settings import FILE_BYTES, GENERATION, MODEL, SINGLE, TEMPLATE, read_settings
from megajax.host import reading, remote

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

_LETTERS = 1000  # in a learned WordPiece vocabulary, at most


def learn_byte_pair(documents: Iterable[str], vocab_size: int, flag: str) -> Tokenizer:
    """Learn a vocabulary (see `train_tokenizer`). Ids are as in GPT-2: 256 bytes, merges, `<|endoftext|>` last."""
    from tokenizers import models, pre_tokenizers, trainers

    if vocab_size < 257:
        raise UserError(f"{flag} {vocab_size}; valid: 257 or more, for 256 bytes and {END_OF_TEXT}")
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
    return _byte_pair(vocabulary | {END_OF_TEXT: len(vocabulary)}, [(left, right) for left, right in model["merges"]])


def read_byte_pair(vocabulary_file: Path, merges_file: Path) -> Tokenizer:
    """Read a tokenizer's two files (see `load_tokenizer`)."""
    vocabulary = _checked(reading.read_json(vocabulary_file, FILE_BYTES), vocabulary_file)
    return _byte_pair(vocabulary, _parse_merges(merges_file, vocabulary))


def _byte_pair(vocabulary: dict[str, int], merges: Sequence[tuple[str, str]]) -> Tokenizer:
    """A tokenizer from tokens in GPT-2's printable form of bytes; earlier `merges` are applied first."""
    from tokenizers import AddedToken, models

    core = _byte_level(models.BPE(vocab=vocabulary, merges=list(merges)))
    core.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return Tokenizer(core.to_str(pretty=True))


def _byte_level(model: Any) -> Any:
    """Without a prefix space, so that decoding an encoded text gives it back unchanged."""
    import tokenizers

    core = tokenizers.Tokenizer(model)
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.decoder = tokenizers.decoders.ByteLevel()
    return core


def _checked(vocabulary: Any, file: Path) -> dict[str, int]:
    """`vocabulary`, read from `file`; it must be one of a byte-level tokenizer."""
    from tokenizers import pre_tokenizers

    needed = {*pre_tokenizers.ByteLevel.alphabet(), END_OF_TEXT}
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [None]
    good = all(type(each) is int and 0 <= each < MOST_IDS for each in ids) and len(set(ids)) == len(ids)
    if not good or not needed <= vocabulary.keys() or not all(map(reading.is_unicode, vocabulary)):
        valid = f"one JSON object of token: id with all bytes and {END_OF_TEXT}, each id once, from 0 to {MOST_IDS - 1}"
        raise Damaged(file, "no byte-level vocabulary", valid)
    return vocabulary


def _parse_merges(file: Path, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for index, line in enumerate(reading.read_text(file, FILE_BYTES).split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line or (index == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or not {pair[0], pair[1], pair[0] + pair[1]} <= vocabulary.keys():
            raise Damaged(f"{file}:{index}", "not a merge", "two tokens with a space between, of which one is made")
        merges.append((pair[0], pair[1]))
    return merges


def learn_wordpiece(documents: Iterable[str], vocab_size: int, flag: str) -> Tokenizer:
    """Learn a vocabulary (see `train_tokenizer`). Special tokens have the first ids; text is lower-cased."""
    from tokenizers import models, trainers

    if vocab_size < 100:
        raise UserError(f"{flag} {vocab_size}; valid: 100 or more, for the special tokens and the letters")
    core = _bert(models.WordPiece(unk_token="[UNK]"), lowercase=True)
    documents = list(documents)
    counts: Counter[str] = Counter()
    for text in documents:
        counts.update(core.normalizer.normalize_str(text))
    common = sorted(counts, key=lambda letter: (-counts[letter], letter))[: min(_LETTERS, vocab_size // 4)]
    letters = sorted(letter for letter in common if not letter.isspace())
    # Otherwise letters inside a word get ids in the order of a hash table, and ties are merged in that order.
    fixed = [*SPECIAL_TOKENS, *(f"##{letter}" for letter in letters)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=fixed,
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        show_progress=False,
    )
    core.train_from_iterator(documents, trainer)
    return wordpiece(core.get_vocab(with_added_tokens=False))


def read_wordpiece(file: Path) -> Tokenizer:
    """Read a vocabulary with one token per line; a token's id is its line number, from 0."""
    tokens = reading.read_text(file, FILE_BYTES).rstrip("\n").replace("\r\n", "\n").split("\n")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens) or not {"[UNK]", "[SEP]"} <= vocabulary.keys():
        raise Damaged(file, "no WordPiece vocabulary", "a different token on every line, among them [UNK] and [SEP]")
    return wordpiece(vocabulary)


def wordpiece(vocabulary: dict[str, int]) -> Tokenizer:
    """A tokenizer whose documents end with `[SEP]`, from the id of every token (with `##` before tokens that continue a
    word). Text is lower-cased unless the vocabulary has upper-case letters."""
    from tokenizers import AddedToken, models
    from tokenizers.processors import TemplateProcessing

    lowercase = all(token in SPECIAL_TOKENS or token == token.lower() for token in vocabulary)
    core = _bert(models.WordPiece(vocabulary, unk_token="[UNK]"), lowercase)
    special = [token for token in SPECIAL_TOKENS if token in vocabulary]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if {"[CLS]", "[SEP]"} <= vocabulary.keys():
        core.post_processor = TemplateProcessing(
            single="[CLS]:0 $A:0 [SEP]:0",
            pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
            special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
        )
    return Tokenizer(core.to_str(pretty=True))


def _bert(model: Any, lowercase: bool) -> Any:
    import tokenizers

    core = tokenizers.Tokenizer(model)
    core.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
    core.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    core.decoder = tokenizers.decoders.WordPiece()
    return core


Kind = Literal["bpe", "wordpiece"]
TRAINING_BYTES = 64 << 20  # of text to train a tokenizer on

_READERS: dict[tuple[str, ...], Callable[..., Tokenizer]] = {
    (SINGLE,): lambda file: Tokenizer(reading.read_text(file, FILE_BYTES), read_settings(file.parent), file.parent),
    ("vocab.json", "merges.txt"): read_byte_pair,  # our names, and Hugging Face's
    ("encoder.json", "vocab.bpe"): read_byte_pair,  # OpenAI's names
    ("vocab.txt",): read_wordpiece,
}
TOKENIZER_FILES = sorted({CONFIG, SPECIAL, ADDED, TEMPLATE, GENERATION}.union(*_READERS))
_FILES = "vocab.json and merges.txt (or encoder.json and vocab.bpe, or vocab.txt, or tokenizer.json)"


def train_tokenizer(
    documents: Iterable[str], vocab_size: int, kind: Kind = "bpe", flag: str = "--model.vocab-size"
) -> Tokenizer:
    """Learn GPT-2's byte-level BPE or BERT's WordPiece from documents; the same documents give the same vocabulary. A
    small corpus may give fewer ids than `vocab_size` (set by `flag`), because only pairs seen twice are merged."""
    learn = learn_byte_pair if kind == "bpe" else learn_wordpiece
    return learn(documents, vocab_size, flag)


def training_part(documents: Iterable[str], size: int) -> Iterator[str]:
    """The part of documents with `size` bytes to train a tokenizer on: all of them, or evenly spaced ones if they are
    too large, or the first ones if the size is unknown (0)."""
    share, num_read = TRAINING_BYTES / size if size else 1, 0
    for number, text in enumerate(documents):
        if is_chosen(number, share):
            yield text
        if not size:
            num_read += len(text.encode())
            if num_read >= TRAINING_BYTES:
                return


def is_chosen(number: int, share: float) -> bool:
    """Whether a text is one of those that are this share of all, at even distances; `number` counts from 0."""
    return share >= 1 or int((number + 1) * share) > int(number * share)


def load_tokenizer(folder: str | Path, flag: str = "--tokenizer.path") -> Tokenizer:
    """Read the tokenizer in a folder, from the first of the sets of files in `_READERS` that exists."""
    if there := _files(folder):
        return _READERS[there](*(Path(folder, name) for name in there))
    found = reading.names(folder)
    for names in _READERS:
        half = found & set(names)
        if half and len(names) > 1:
            missing = min(set(names) - half, default="")
            problem = f"{min(half)} without {missing}" if missing else f"{' and '.join(names)} that are not files"
            raise UserError(f"{flag}: {folder} has {problem}; valid: a folder with {_FILES}")
    problem = "has no tokenizer" if reading.is_folder(folder) else "is not a folder"
    raise UserError(f"{flag}: {folder} {problem}; valid: a folder with {_FILES}")


def named_tokenizer(path: str, flag: str = "--tokenizer.path") -> Tokenizer:
    """The tokenizer that a user names: a folder (see `load_tokenizer`), or, if there is none with that name, a model on
    the Hugging Face hub, whose tokenizer is downloaded."""
    valid = f"valid: a folder with {_FILES}, or a model of the hub, as in openai-community/gpt2"
    if not is_on_hub(path):
        if not reading.is_folder(path):
            raise UserError(f"{flag}: {path} is not a folder; {valid}")
        return load_tokenizer(path, flag)
    folder = remote.download(path, [*TOKENIZER_FILES, MODEL], f"{flag}: {path} is not a folder", valid)
    if not is_tokenizer_folder(folder):
        raise UserError(
            f"{flag}: the model {path} of the Hugging Face hub has no tokenizer that megajax reads; {valid}"
        )
    return load_tokenizer(folder, flag)


def is_on_hub(path: str) -> bool:
    """Whether a tokenizer is named by a model on the hub: nothing local has that name."""
    return remote.is_hub_name(path) and not reading.kind(path)


def is_tokenizer_folder(folder: str | Path) -> bool:
    """Whether a folder holds the files of a tokenizer."""
    return _files(folder) is not None


def has_only_tokenizer_files(folder: str | Path) -> bool:
    """Whether a folder holds only files of a tokenizer."""
    return Path(folder).is_dir() and {entry.name for entry in Path(folder).iterdir()} <= set(TOKENIZER_FILES)


def _files(folder: str | Path) -> tuple[str, ...] | None:
    """The first complete set of tokenizer files in a folder."""
    return next((names for names in _READERS if all(reading.is_file(Path(folder, name)) for name in names)), None)

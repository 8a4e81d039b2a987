"""GPT-2's byte-level byte-pair encoding, read from its two files or learned from a corpus: no prefix space; decoding an
encoded text gives it back unchanged."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megajax.data.tokenizer import END_OF_TEXT, MOST_IDS, Tokenizer
from megajax.data.tokenizer_settings import FILE_BYTES
from megajax.errors import UserError
from megajax.host.reading import read_json, read_text


def byte_pair(vocabulary: dict[str, int], merges: Sequence[tuple[str, str]]) -> Tokenizer:
    """A tokenizer.

    Args:
        vocabulary: id of every token, tokens in GPT-2's printable form of bytes.
        merges: pairs of tokens, the first to be merged first.
    """
    from tokenizers import AddedToken, models

    core = _byte_level(models.BPE(vocab=vocabulary, merges=list(merges)))
    core.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return Tokenizer(core.to_str(pretty=True))


def learn_byte_pair(documents: Iterable[str], vocab_size: int, flag: str) -> Tokenizer:
    """Learn a vocabulary, as `train_tokenizer` describes. Ids are GPT-2's: 256 bytes, merges, `<|endoftext|>` last.

    Raises:
        UserError: `vocab_size` is less than 257.
    """
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
    return byte_pair(vocabulary | {END_OF_TEXT: len(vocabulary)}, [(left, right) for left, right in model["merges"]])


def read_byte_pair(vocabulary_file: Path, merges_file: Path) -> Tokenizer:
    """Read a tokenizer's two files, as `load_tokenizer` describes.

    Raises:
        UserError: a file cannot be read or is malformed.
    """
    vocabulary = _checked(read_json(vocabulary_file, FILE_BYTES), vocabulary_file)
    return byte_pair(vocabulary, _parse_merges(merges_file, vocabulary))


def _byte_level(model: Any) -> Any:
    import tokenizers

    core = tokenizers.Tokenizer(model)
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.decoder = tokenizers.decoders.ByteLevel()
    return core


def _checked(vocabulary: Any, file: Path) -> dict[str, int]:
    """`vocabulary`, read from `file`, as that of a byte-level tokenizer.

    Raises:
        UserError: it is none.
    """
    from tokenizers import pre_tokenizers

    if not isinstance(vocabulary, dict) or not all(
        type(token) is int and 0 <= token < MOST_IDS for token in vocabulary.values()
    ):
        raise UserError(f"{file}: no vocabulary; valid: one JSON object of token: id, ids from 0 to {MOST_IDS - 1}")
    try:
        "".join(vocabulary).encode()
    except UnicodeEncodeError as error:  # escapes such as \ud800 are valid JSON but no text
        raise UserError(f"{file}: a token is no text ({error.reason}); valid: text in Unicode") from None
    if len(set(vocabulary.values())) < len(vocabulary):
        raise UserError(f"{file}: two tokens have the same id; valid: a different id for each")
    missing_bytes = sum(byte not in vocabulary for byte in pre_tokenizers.ByteLevel.alphabet())
    if missing_bytes:
        raise UserError(f"{file}: {missing_bytes} of the 256 bytes have no token; valid: a byte-level vocabulary")
    if END_OF_TEXT not in vocabulary:
        raise UserError(f"{file}: no {END_OF_TEXT} token; valid: a vocabulary with it, to end documents with")
    return vocabulary


def _parse_merges(file: Path, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(read_text(file, FILE_BYTES).split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or not {pair[0], pair[1], pair[0] + pair[1]} <= vocabulary.keys():
            raise UserError(
                f"{file}:{number}: no merge; valid: two tokens, a space between, that form a third of the vocabulary"
            )
        merges.append((pair[0], pair[1]))
    return merges

"""BERT's WordPiece, read from its vocabulary or learned from a corpus."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megajax.data.tokenizer import Tokenizer
from megajax.data.tokenizer_settings import FILE_BYTES
from megajax.errors import UserError
from megajax.host.reading import read_text

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

_LETTERS = 1000  # of a learned vocabulary, at most


def wordpiece(vocabulary: dict[str, int]) -> Tokenizer:
    """A tokenizer whose documents end with `[SEP]`. Text is lower-cased unless the vocabulary has upper-case letters.

    Args:
        vocabulary: id of every token; `##` before those that go on with a word.
    """
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


def learn_wordpiece(documents: Iterable[str], vocab_size: int, flag: str) -> Tokenizer:
    """Learn a vocabulary, as `train_tokenizer` describes. Special tokens have the first ids; text is lower-cased.

    Raises:
        UserError: `vocab_size` is less than 100.
    """
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
    # Else letters inside a word get ids in the order of a hash table, and ties are merged in that order.
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
    """Read a vocabulary, one token a line; its id is the number of the line, from 0.

    Raises:
        UserError: the file cannot be read or is malformed.
    """
    tokens = read_text(file, FILE_BYTES).rstrip("\n").replace("\r\n", "\n").split("\n")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(token for number, token in enumerate(tokens) if vocabulary[token] != number)
        raise UserError(f"{file}: the token {twice!r} stands there twice; valid: another token on every line")
    missing = [token for token in ("[UNK]", "[SEP]") if token not in vocabulary]
    if missing:
        raise UserError(f"{file}: no {' and no '.join(missing)} token; valid: a vocabulary with both")
    return wordpiece(vocabulary)


def _bert(model: Any, lowercase: bool) -> Any:
    import tokenizers

    core = tokenizers.Tokenizer(model)
    core.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
    core.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    core.decoder = tokenizers.decoders.WordPiece()
    return core

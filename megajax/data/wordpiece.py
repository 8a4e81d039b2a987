"""BERT's WordPiece, loaded from its vocabulary or learned from a corpus."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megajax.data.files import write_atomically
from megajax.data.tokenizer import FILE_BYTES, Tokenizer
from megajax.errors import UserError
from megajax.reading import read_text

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

_LETTERS = 1000  # of a learned vocabulary, at most


class WordPieceTokenizer(Tokenizer):
    """BERT's tokenizer. `[SEP]` ends documents. Text is lower-cased unless the vocabulary has upper-case letters.

    Args:
        vocabulary: id of every token; `##` before those that go on with a word.
    """

    def __init__(self, vocabulary: dict[str, int]) -> None:
        from tokenizers import AddedToken, models

        lowercase = all(token in SPECIAL_TOKENS or token == token.lower() for token in vocabulary)
        core = _bert(models.WordPiece(vocabulary, unk_token="[UNK]"), lowercase)
        special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS if token in vocabulary]
        core.add_special_tokens(special)
        super().__init__(core, vocabulary, "[SEP]")

    @classmethod
    def learn(cls, documents: Iterable[str], vocab_size: int, flag: str) -> "WordPieceTokenizer":
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
        return cls(core.get_vocab(with_added_tokens=False))

    @classmethod
    def read(cls, file: Path) -> "WordPieceTokenizer":
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
        return cls(vocabulary)

    def save(self, folder: str | Path) -> None:
        """Write `vocab.txt` atomically.

        Raises:
            UserError: it cannot be written.
        """
        tokens = sorted(self.vocabulary, key=self.vocabulary.__getitem__)
        write_atomically(Path(folder, "vocab.txt"), "".join(f"{token}\n" for token in tokens))


def _bert(model: Any, lowercase: bool) -> Any:
    import tokenizers

    core = tokenizers.Tokenizer(model)
    core.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
    core.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    core.decoder = tokenizers.decoders.WordPiece()
    return core

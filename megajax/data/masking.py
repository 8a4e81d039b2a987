"""Masking as BERT's and Megatron-LM's: whole words, one to three in a row, 15% of a sample's tokens.

N tokens of a sample, W words, V ids of the vocabulary. Raw bits are drawn, which no release of NumPy may change.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megajax.batch import IGNORED
from megajax.data.tokenizer import Tokenizer
from megajax.errors import UserError

SHARE = 0.15  # of a sample's tokens, special ones included, that are chosen

_LENGTHS = (1,) * 6 + (2,) * 3 + (3,) * 2  # in words, in proportion to 1 / n: 6/11, 3/11, 2/11
_TRIES = 20  # for a place for so many words
_SPECIAL = ("[CLS]", "[SEP]", "[MASK]", "[PAD]")


@dataclass(frozen=True, eq=False)
class WordPieces:
    """What samples need to know of a WordPiece vocabulary.

    Attributes:
        cls: id of `[CLS]`.
        sep: id of `[SEP]`.
        mask: id of `[MASK]`.
        pad: id of `[PAD]`.
        continues: bool [V], the pieces that go on with a word.
        replacements: int32, ids that may stand in the place of a chosen one: all but the special tokens'.
    """

    cls: int
    sep: int
    mask: int
    pad: int
    continues: npt.NDArray[np.bool_]
    replacements: npt.NDArray[np.int32]

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, name: str = "the tokenizer") -> "WordPieces":
        """The pieces of a tokenizer; `name` stands for it in messages.

        Raises:
            UserError: there is none, or it lacks a special token or has no others.
        """
        valid = f"valid: a WordPiece vocabulary (vocab.txt) with {', '.join(_SPECIAL)}"
        if tokenizer is None:
            raise UserError(f"{name} is missing, and words are masked as a whole; {valid}, by --tokenizer.path")
        vocabulary = tokenizer.vocabulary
        if missing := [token for token in _SPECIAL if token not in vocabulary]:
            raise UserError(f"{name} has no {' and no '.join(missing)}; {valid}")
        others = sorted(number for token, number in vocabulary.items() if token not in (*_SPECIAL, "[UNK]"))
        if not others:
            raise UserError(f"{name} has special tokens only; {valid}, and words")
        continues = np.zeros(tokenizer.size, bool)
        continues[[number for token, number in vocabulary.items() if token.startswith("##")]] = True
        start, sep, mask, pad = (vocabulary[token] for token in _SPECIAL)
        return cls(start, sep, mask, pad, continues, np.array(others, np.int32))


class Bits:
    """Random bits that are a function of a key.

    Args:
        key: whole numbers from 0.
    """

    def __init__(self, *key: int) -> None:
        self._source = np.random.Philox(np.random.SeedSequence(key))
        self._numbers = self._endless()

    def _endless(self) -> Iterator[int]:
        while True:
            yield from self._source.random_raw(64).tolist()

    def below(self, limit: int) -> int:
        """A whole number from 0, less than `limit` (at most 2^32)."""
        return ((next(self._numbers) >> 32) * limit) >> 32

    def happens(self, probability: float) -> bool:
        """True with this probability."""
        return next(self._numbers) < probability * 2.0**64

    def raw(self, count: int) -> npt.NDArray[np.uint64]:
        """So many numbers of 64 bits."""
        return self._source.random_raw(count)


class Masked(NamedTuple):
    """A masked sample.

    Attributes:
        tokens: as the model sees them, int32 [N].
        targets: what stood at the chosen places, `IGNORED` elsewhere, int32 [N].
        spans: first token, the token after the last, and number of words of what was chosen at a time.
    """

    tokens: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int32]
    spans: list[tuple[int, int, int]]


def masked(
    tokens_N: npt.NDArray[np.int32], special_N: npt.NDArray[np.bool_], vocabulary: WordPieces, bits: Bits
) -> Masked:
    """Choose words of a sample, and mask them.

    Of every chosen piece 80% become `[MASK]`, 10% a random one, 10% stay.

    Args:
        tokens_N: ids; at least one is not special.
        special_N: where nothing is chosen, and what no run of words crosses.
        vocabulary: what the ids are.
        bits: what is drawn.
    """
    spans = _choose(*_words(tokens_N, special_N, vocabulary.continues), SHARE * len(tokens_N), bits)
    chosen = np.concatenate([np.arange(begin, end) for begin, end, _ in spans])
    tokens, targets = tokens_N.copy(), np.full(len(tokens_N), IGNORED, np.int32)
    targets[chosen] = tokens[chosen]
    raw = bits.raw(len(chosen))
    tenth, high = (raw & np.uint64(0xFFFFFFFF)) % np.uint64(10), raw >> np.uint64(32)
    count = np.uint64(len(vocabulary.replacements))
    random = vocabulary.replacements[(high * count) >> np.uint64(32)]
    tokens[chosen] = np.where(tenth < 8, vocabulary.mask, np.where(tenth < 9, random, tokens[chosen]))
    return Masked(tokens, targets, spans)


def _words(
    tokens_N: npt.NDArray[np.int32], special_N: npt.NDArray[np.bool_], continues_V: npt.NDArray[np.bool_]
) -> tuple[list[int], list[int]]:
    """The first token of every word, and the token after its last. What goes on with a word after a special token,
    where its beginning was cut off, is a word."""
    goes_on = continues_V[tokens_N] & ~special_N
    goes_on[1:] &= ~special_N[:-1]
    goes_on[:1] = False
    borders = np.append(np.flatnonzero(~goes_on), len(tokens_N))
    are_words = ~special_N[borders[:-1]]
    return borders[:-1][are_words].tolist(), borders[1:][are_words].tolist()


def _choose(begins_W: list[int], ends_W: list[int], budget: float, bits: Bits) -> list[tuple[int, int, int]]:
    """Runs of words that have no word in common.

    Their number of words is drawn first, then a place where so many words in a row are free; only where there is none
    are they fewer. The last run, which has more tokens than the budget still allows, is taken with the probability that
    makes the expected number of tokens the budget; the first one always, of fewer words if need be.
    """
    free = [True] * len(begins_W)
    spans: list[tuple[int, int, int]] = []
    left = max(1.0, budget)
    while left > 1e-6:
        count = _LENGTHS[bits.below(len(_LENGTHS))]
        if (first := _place(begins_W, ends_W, free, count, bits)) is None:
            while first is None and count > 1:
                count -= 1
                first = _place(begins_W, ends_W, free, count, bits)
            if first is None:
                break
        begin = begins_W[first]
        while not spans and count > 1 and ends_W[first + count - 1] - begin > left:
            count -= 1
        end = ends_W[first + count - 1]
        if spans and end - begin > left and not bits.happens(left / (end - begin)):
            break
        spans.append((begin, end, count))
        free[first : first + count] = [False] * count
        left -= end - begin
    return sorted(spans)


def _place(begins_W: list[int], ends_W: list[int], free: list[bool], count: int, bits: Bits) -> int | None:
    """The first of so many free words in a row, without a special token between them; None if none was found."""
    for _ in range(_TRIES):
        first = bits.below(len(begins_W))
        last = first + count - 1
        if (
            last < len(begins_W)
            and all(free[first : last + 1])
            and all(ends_W[word] == begins_W[word + 1] for word in range(first, last))
        ):
            return first
    return None

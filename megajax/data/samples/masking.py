"""Masking as in BERT and Megatron-LM: runs of one to three whole words, 15% of a sample's tokens.

Letters: N tokens of a sample, W words, V ids in the vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megajax.core.batch import MASKED_SHARE, most_masked
from megajax.core.errors import UserError
from megajax.data.samples.base import Bits
from megajax.data.text.tokenizer import Tokenizer

_LENGTHS = (1,) * 6 + (2,) * 3 + (3,) * 2  # in words, with probabilities proportional to 1 / n: 6/11, 3/11, 2/11
_TRIES = 20  # random attempts to place a run of words
_LOW, _HALF, _TEN = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(10)
_SPECIAL = ("[CLS]", "[SEP]", "[MASK]", "[PAD]")


@dataclass(frozen=True, eq=False)
class WordPieces:
    """What samples need to know about a WordPiece vocabulary."""

    cls: int  # id of [CLS]
    sep: int
    mask: int
    pad: int
    continues: npt.NDArray[np.bool_]  # [V], whether a piece continues a word
    replacements: npt.NDArray[np.int32]  # ids used as random tokens: all except the special ones

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, name: str = "the tokenizer") -> "WordPieces":
        """The pieces of a tokenizer, which error messages call `name`."""
        valid = f"valid: a WordPiece vocabulary (vocab.txt) with {', '.join(_SPECIAL)}"
        if tokenizer is None:
            raise UserError(f"{name} is missing, which whole-word masking needs; {valid}")
        vocabulary = tokenizer.vocabulary
        if missing := [token for token in _SPECIAL if token not in vocabulary]:
            raise UserError(f"{name} has no {' and no '.join(missing)}; {valid}")
        others = sorted(token_id for token, token_id in vocabulary.items() if token not in (*_SPECIAL, "[UNK]"))
        if not others:
            raise UserError(f"{name} has only special tokens; {valid}, and words")
        continues = np.zeros(tokenizer.size, bool)
        continues[[token_id for token, token_id in vocabulary.items() if token.startswith("##")]] = True
        start, sep, mask, pad = (vocabulary[token] for token in _SPECIAL)
        return cls(start, sep, mask, pad, continues, np.array(others, np.int32))


class Masked(NamedTuple):
    """A masked sample."""

    tokens: npt.NDArray[np.int32]  # [N], as the model sees them
    places: npt.NDArray[np.int32]  # positions of the chosen tokens, ascending, at most `most_masked(N)`
    targets: npt.NDArray[np.int32]  # the original tokens
    spans: list[tuple[int, int, int]]  # for each run: first token, one past its last, number of words


def masked(
    tokens_N: npt.NDArray[np.int32], special_N: npt.NDArray[np.bool_], vocabulary: WordPieces, bits: Bits
) -> Masked:
    """Choose words of a sample and mask them: 80% of the chosen pieces become `[MASK]`, 10% a random token, 10% stay.
    Special tokens, by `special_N`, are never chosen, and no run of words crosses one; at least one is not special."""
    begins_N = special_N | ~vocabulary.continues[tokens_N]
    begins_N[0] = True
    begins_N[1:] |= special_N[:-1]
    begins = np.flatnonzero(begins_N)  # of words; the rest of a word whose beginning was cut off counts as a word
    taken = bytearray(special_N[begins].tobytes())
    borders = [*begins.tolist(), len(tokens_N)]
    spans = _choose(borders, taken, MASKED_SHARE * len(tokens_N), most_masked(len(tokens_N)), bits)
    places = np.concatenate(
        [np.empty(0, np.int32), *(np.arange(begin, end) for begin, end, _ in spans)], dtype=np.int32
    )
    targets = tokens_N[places]
    raw = bits.raw(len(targets))
    tenth, high = (raw & _LOW) % _TEN, raw >> _HALF
    random = vocabulary.replacements[(high * np.uint64(len(vocabulary.replacements))) >> _HALF]
    tokens = tokens_N.copy()
    tokens[places] = np.where(tenth < 8, vocabulary.mask, np.where(tenth < 9, random, targets))
    return Masked(tokens, places, targets, spans)


def _choose(borders: list[int], taken: bytearray, budget: float, most: int, bits: Bits) -> list[tuple[int, int, int]]:
    """Choose disjoint runs of words with at most `most` tokens in all; the expected number is `budget`, at least 1.

    First the number of words in a run is drawn, then a place where that many consecutive words are free; only if there
    is none, the run gets shorter. The last run, which has more tokens than the remaining budget, is taken with the
    probability that makes the expected number of tokens equal to the budget; the first run is always taken, if need be
    with fewer words. A run that would exceed `most` is not taken.

    `borders` are the first token of every word and one past the last, [W + 1]; `taken` is 1 for words that cannot be
    chosen, [W], and chosen words are added to it.
    """
    spans: list[tuple[int, int, int]] = []
    left, room = max(1.0, budget), most
    while left > 1e-6:
        count = _LENGTHS[bits.below(len(_LENGTHS))]
        while (first := _free_run(taken, count, bits)) < 0 and count > 1:
            count -= 1
        if first < 0:
            break
        begin = borders[first]
        while not spans and count > 1 and borders[first + count] - begin > left:
            count -= 1
        end = borders[first + count]
        if spans and end - begin > left and not bits.happens(left / (end - begin)):
            break
        taken[first : first + count] = b"\1" * count
        if end - begin > room:
            continue
        spans.append((begin, end, count))
        left, room = left - (end - begin), room - (end - begin)
    return sorted(spans)


def _free_run(taken: bytearray, count: int, bits: Bits) -> int:
    """The first word of a run of `count` free words; negative if there is none."""
    free = bytes(count)
    for _ in range(_TRIES):
        first = bits.below(len(taken))
        if taken.startswith(free, first):
            return first
    return taken.find(free)

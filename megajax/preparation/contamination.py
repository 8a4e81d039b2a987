"""Overlap of a corpus with test sets, by word 8-grams (paper §5.2).

A gram is eight consecutive words of a test document, in lower case, without punctuation and normalised (NFKC). In
scripts without spaces every character counts as a word. G different grams.
"""

import itertools
import re
import unicodedata
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from megajax.preparation.cleaning import parts_to_normalise
from megajax.preparation.shards import opened_arrays

GRAM = 8  # words in a gram
# From GPT-3's appendix C and Megatron-LM's `filter_ngrams.py`.
MARGIN = 200  # characters cut out on both sides of a gram
SHORTEST = 200  # characters; shorter pieces are dropped
MOST_PIECES = 10  # a document cut into more pieces is dropped
_LONG_WORD = 64  # characters; longer words may be cut

# Thai, Lao, Burmese, Khmer, kana, Chinese characters.
_NO_SPACES = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)

_WORD = re.compile(rf"[{_NO_SPACES}]|[^\W{_NO_SPACES}]+")
_FACTORS = np.array([pow(0x9E3779B97F4A7C15, power, 2**64) for power in range(GRAM)], np.uint64)


@dataclass
class TestSets:
    """The grams of one or more test sets."""

    __test__ = False  # not a class of tests for pytest

    words: list[str]  # indexed by word id
    grams: npt.NDArray[np.int32]  # the word ids of each gram, [G, 8]
    members: list[npt.NDArray[np.int64]]  # for each test set, the numbers of its grams, ascending
    too_short: list[int]  # for each test set, the number of its documents without a gram

    def __post_init__(self) -> None:
        self._ids = {word: number for number, word in enumerate(self.words)}
        grams = self.grams
        hashes = _hashes(grams.reshape(-1))[::GRAM] if len(grams) else np.empty(0, np.uint64)
        self._order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._order]

    @classmethod
    def collect(cls, test_sets: Iterable[Iterable[str]]) -> "TestSets":
        """Collect the grams of test sets, each given as its documents."""
        ids: dict[str, int] = {}
        numbers: dict[tuple[int, ...], int] = {}
        members, too_short = [], []
        for documents in test_sets:
            grams, short = set(), 0
            for text in documents:
                words = [ids.setdefault(word, len(ids)) for word in _words(text)]
                short += len(words) < GRAM
                for start in range(len(words) - GRAM + 1):
                    grams.add(numbers.setdefault(tuple(words[start : start + GRAM]), len(numbers)))
            members.append(np.array(sorted(grams), np.int64))
            too_short.append(short)
        return cls(list(ids), np.array(list(numbers), np.int32).reshape(-1, GRAM), members, too_short)

    def found_in(self, text: str) -> npt.NDArray[np.int64]:
        """The numbers of the grams that a text contains, int64, ascending, each once."""
        return np.unique(self._matches(_words(text))[1])

    def spans(self, text: str) -> list[tuple[int, int]]:
        """The ranges of characters in a text where grams of test sets occur."""
        places = list(_placed_words(text))
        starts, _ = self._matches([word for word, _, _ in places])
        return [(places[start][1], places[start + GRAM - 1][2]) for start in starts.tolist()]

    def _matches(self, words: list[str]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The index of the first word of each known gram, ascending, and the gram's number."""
        if not len(self._hashes) or len(words) < GRAM:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        ids = np.array([self._ids.get(word, -1) for word in words], np.int32)
        hashes = _hashes(ids)
        nearest = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        starts = np.flatnonzero(self._hashes[nearest] == hashes)
        numbers = self._order[nearest[starts]]
        same = (ids[starts[:, None] + np.arange(GRAM)] == self.grams[numbers]).all(axis=1)
        return starts[same], numbers[same]

    def save(self, file: IO[bytes]) -> None:
        """Write the test sets as an `.npz` file."""
        sizes = np.array([len(numbers) for numbers in self.members], np.int64)
        words = np.frombuffer("\n".join(self.words).encode(), np.uint8)
        members = np.concatenate([np.empty(0, np.int64), *self.members])
        short = np.array(self.too_short, np.int64)
        np.savez(file, words=words, grams=self.grams, sizes=sizes, members=members, too_short=short)

    @classmethod
    def load(cls, file: Path) -> "TestSets":
        """Read what `save` wrote."""
        with opened_arrays(file) as data:
            words = data["words"].tobytes().decode().split("\n")
            ends = np.cumsum(data["sizes"])
            ranges = zip(ends - data["sizes"], ends, strict=True)
            members = [data["members"][begin:end] for begin, end in ranges]
            return cls(words, data["grams"], members, data["too_short"].tolist())


def decontaminated(text: str, tests: TestSets, how: str) -> tuple[list[str], npt.NDArray[np.int64]]:
    """The pieces of a document that are kept, if any, and the grams it contained. `how`: `--decontaminate-how`."""
    grams = tests.found_in(text)
    if not len(grams) or how == "report":
        return [text], grams
    return without(text, tests.spans(text)) if how == "passage" else [], grams


def without(text: str, spans: Sequence[tuple[int, int]]) -> list[str]:
    """The pieces of a text that remain without these ascending spans and `MARGIN` characters on both sides, rounded to
    whole words. Pieces shorter than `SHORTEST` are dropped, and so are all if there are more than `MOST_PIECES`."""
    pieces, position = list[str](), 0
    for begin, end in spans:
        if (stop := _border(text, max(begin - MARGIN, 0), -1)) > position or not pieces:
            pieces.append(text[position:stop])
        position = max(position, _border(text, min(end + MARGIN, len(text)), 1))
    pieces = [piece.strip() for piece in [*pieces, text[position:]]]
    return [piece for piece in pieces if len(piece) >= SHORTEST] if len(pieces) <= MOST_PIECES else []


def _border(text: str, position: int, step: int) -> int:
    """`position`, moved in direction `step` to the end of its word, but not further than `_LONG_WORD`."""
    last = min(max(position + step * _LONG_WORD, 0), len(text))
    while position != last and 0 < position < len(text) and text[position - 1 : position + 1].isalnum():
        position += step
    return position


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower() if text.isascii() else _normalised(text))


def _normalised(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", part) for part in parts_to_normalise(text)).lower()


def _placed_words(text: str) -> Iterator[tuple[str, int, int]]:
    """The words as in `_words`, with their beginnings and ends in the text."""
    for match in re.finditer(r"\S+", text):
        normal, start = _normalised(match.group()), match.start()
        characters = [_normalised(character) for character in match.group()]
        ends = list(itertools.accumulate(map(len, characters))) if "".join(characters) == normal else []
        for word in _WORD.finditer(normal):
            if ends:
                yield word.group(), start + bisect(ends, word.start()), start + bisect(ends, word.end() - 1) + 1
            else:  # characters combine when normalised: take everything up to white space
                yield word.group(), match.start(), match.end()


def _hashes(words: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
    """A hash of every eight consecutive words, uint64 [words - 7]."""
    values = (words.astype(np.int64) + 2).astype(np.uint64)  # unknown words are -1
    count = len(values) - GRAM + 1
    hashes = np.zeros(count, np.uint64)
    for offset, factor in enumerate(_FACTORS):
        hashes += values[offset : offset + count] * factor
    return hashes

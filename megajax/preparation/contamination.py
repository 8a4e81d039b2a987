"""Overlap of a corpus with test sets, by word 8-grams (paper §5.2).

A gram is eight words in a row of a test document, in lower case, without punctuation and with letters of one form
(NFKC). In scripts without spaces every character counts as a word. G different grams.
"""

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from megajax.preparation.shards import opened

GRAM = 8  # words of a gram

# Thai, Lao, Burmese, Khmer, kana, Chinese characters.
_NO_SPACES = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)

_WORD = re.compile(rf"[{_NO_SPACES}]|[^\W{_NO_SPACES}]+")
_FACTORS = np.array([pow(0x9E3779B97F4A7C15, power, 2**64) for power in range(GRAM)], np.uint64)


@dataclass
class TestSets:
    """The grams of one or more test sets."""

    __test__ = False  # no test of ours

    words: list[str]  # by their ids
    grams: npt.NDArray[np.int32]  # ids of each gram's words, [G, 8]
    members: list[npt.NDArray[np.int64]]  # for each test set the numbers of its grams, ascending
    too_short: list[int]  # for each test set, how many of its documents have no gram

    def __post_init__(self) -> None:
        self._ids = {word: number for number, word in enumerate(self.words)}
        grams = self.grams
        hashes = _hashes(grams.reshape(-1))[::GRAM] if len(grams) else np.empty(0, np.uint64)
        self._order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._order]

    @classmethod
    def collect(cls, test_sets: Iterable[Iterable[str]]) -> "TestSets":
        """The grams of test sets, each given as its documents."""
        ids: dict[str, int] = {}
        numbers: dict[tuple[int, ...], int] = {}
        members, too_short = [], []
        for documents in test_sets:
            found, short = set(), 0
            for text in documents:
                words = [ids.setdefault(word, len(ids)) for word in _words(text)]
                short += len(words) < GRAM
                for start in range(len(words) - GRAM + 1):
                    found.add(numbers.setdefault(tuple(words[start : start + GRAM]), len(numbers)))
            members.append(np.array(sorted(found), np.int64))
            too_short.append(short)
        return cls(list(ids), np.array(list(numbers), np.int32).reshape(-1, GRAM), members, too_short)

    def found_in(self, text: str) -> npt.NDArray[np.int64]:
        """Numbers of the grams that a text contains, int64, ascending, each once."""
        if not len(self._hashes):
            return np.empty(0, np.int64)
        words = np.array([self._ids.get(word, -1) for word in _words(text)], np.int32)
        if len(words) < GRAM:
            return np.empty(0, np.int64)
        hashes = _hashes(words)
        nearest = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        starts = np.flatnonzero(self._hashes[nearest] == hashes)
        numbers = self._order[nearest[starts]]
        same = (words[starts[:, None] + np.arange(GRAM)] == self.grams[numbers]).all(axis=1)
        return np.unique(numbers[same])

    def save(self, file: IO[bytes]) -> None:
        """Write an `.npz` file."""
        sizes = np.array([len(numbers) for numbers in self.members], np.int64)
        words = np.frombuffer("\n".join(self.words).encode(), np.uint8)
        members = np.concatenate([np.empty(0, np.int64), *self.members])
        short = np.array(self.too_short, np.int64)
        np.savez(file, words=words, grams=self.grams, sizes=sizes, members=members, too_short=short)

    @classmethod
    def load(cls, file: Path) -> "TestSets":
        """Read what `save` wrote."""
        with opened(file) as content, np.load(content) as data:
            words = data["words"].tobytes().decode().split("\n")
            ends = np.cumsum(data["sizes"])
            ranges = zip(ends - data["sizes"], ends, strict=True)
            members = [data["members"][begin:end] for begin, end in ranges]
            return cls(words, data["grams"], members, data["too_short"].tolist())


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower() if text.isascii() else unicodedata.normalize("NFKC", text).lower())


def _hashes(words: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
    """A hash of every eight words in a row, uint64 [words - 7]."""
    values = (words.astype(np.int64) + 2).astype(np.uint64)  # unknown words are -1
    count = len(values) - GRAM + 1
    hashes = np.zeros(count, np.uint64)
    for offset, factor in enumerate(_FACTORS):
        hashes += values[offset : offset + count] * factor
    return hashes

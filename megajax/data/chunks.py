"""Sentences joined to chunks of about a target number of tokens, as Megatron-LM does for BERT.

C chunks, D documents, S sentences.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megajax.data.tokens import TokenDocuments

Numbers = npt.NDArray[np.int64]

_BLOCK = 1 << 20  # sentences looked at in one go: bounds the memory, and changes nothing


class SentenceCounts(NamedTuple):
    """How many sentences documents have; those without a token do not count."""

    documents: int  # with at least one sentence
    sentences: int  # of all documents
    single: int  # documents of one sentence, which make no pair


def count_sentences(documents: TokenDocuments) -> SentenceCounts:
    """Count the sentences of all documents."""
    counts = np.zeros(3, np.int64)
    for block in _blocks(documents, np.arange(documents.num_documents)):
        sizes = block.ends - block.begins
        counts += [(sizes > 0).sum(), sizes.sum(), (sizes == 1).sum()]
    return SentenceCounts(*counts.tolist())


@dataclass(frozen=True)
class Chunks:
    """Chunks of neighbouring sentences, in the order of the text."""

    begins: Numbers  # int64 [C], the first sentence of each, as a number of the dataset
    sizes: npt.NDArray[np.int32]  # int32 [C], how many sentences it has, empty ones among them included
    targets: npt.NDArray[np.int32]  # int32 [C], tokens wanted

    def __len__(self) -> int:
        return len(self.begins)


def join(documents: TokenDocuments, numbers: Numbers, target: Callable[[Numbers], Numbers]) -> Chunks:
    """Join the sentences of each document to chunks: a chunk ends when it reaches its target and has at least two. One
    that would be left alone at the end of a document joins those before it.

    `numbers` are those of the documents, ascending; `target` goes from the first sentences of chunks to the tokens
    wanted.
    """
    found = [_joined(block, target) for block in _blocks(documents, numbers)]
    return Chunks(
        np.concatenate([np.empty(0, np.int64), *(block.begins for block in found)]),
        np.concatenate([np.empty(0, np.int32), *(block.sizes for block in found)]),
        np.concatenate([np.empty(0, np.int32), *(block.targets for block in found)]),
    )


@dataclass(frozen=True)
class _Block:
    """Sentences of some documents, those without a token left out."""

    ids: Numbers  # [S], numbers in the dataset
    totals: Numbers  # [S + 1], tokens before each
    begins: Numbers  # [D], the first sentence of each document, as a place in `ids`
    ends: Numbers  # [D], the one after its last


def _blocks(documents: TokenDocuments, numbers: Numbers) -> Iterator[_Block]:
    begun = 0
    totals = np.cumsum(documents.document_index[numbers + 1] - documents.document_index[numbers])
    while begun < len(numbers):
        done = int(totals[begun - 1]) if begun else 0
        end = max(begun + 1, int(np.searchsorted(totals, done + _BLOCK, side="right")))
        yield _block(documents, numbers[begun:end])
        begun = end


def _block(documents: TokenDocuments, numbers: Numbers) -> _Block:
    firsts, lasts = documents.document_index[numbers], documents.document_index[numbers + 1]
    ends = np.cumsum(lasts - firsts)
    shifts = firsts - np.concatenate([[0], ends[:-1]])
    ids = np.arange(ends[-1]) + np.repeat(shifts, lasts - firsts)
    lengths = documents.sequence_lengths[int(firsts[0]) : int(lasts[-1])][ids - firsts[0]]
    filled = lengths > 0
    num_filled = np.concatenate([[0], np.cumsum(filled)])
    begins, ends = num_filled[np.concatenate([[0], ends[:-1]])], num_filled[ends]
    totals = np.concatenate([[0], np.cumsum(lengths[filled], dtype=np.int64)])
    return _Block(ids[filled], totals, begins, ends)


def _joined(block: _Block, target: Callable[[Numbers], Numbers]) -> Chunks:
    """Chunks of a block: one of every document at a time."""
    open_ = block.begins < block.ends
    place, end = block.begins[open_], block.ends[open_]
    found = [(np.empty(0, np.int64),) * 3]
    while len(place):
        wanted = target(block.ids[place])
        stop = np.searchsorted(block.totals, block.totals[place] + wanted)
        stop = np.maximum(stop, place + 2)
        stop = np.where(end - stop <= 1, end, stop)
        found.append((place, stop, wanted))
        goes_on = stop < end
        place, end = stop[goes_on], end[goes_on]
    places, stops, targets = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    order = np.argsort(places)
    begins, lasts = block.ids[places[order]], block.ids[stops[order] - 1]
    return Chunks(begins, (lasts + 1 - begins).astype(np.int32), targets[order].astype(np.int32))

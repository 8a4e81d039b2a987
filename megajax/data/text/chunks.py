"""Join sentences into chunks of about a target number of tokens, as Megatron-LM does for BERT.

Letters: C chunks, D documents, S sentences.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megajax.data.text.tokens import TokenDocuments

Numbers = npt.NDArray[np.int64]

_BLOCK = 1 << 20  # sentences processed together; limits memory without changing the result


class SentenceCounts(NamedTuple):
    """How many sentences documents have; sentences without tokens do not count."""

    documents: int  # documents with at least one sentence
    sentences: int  # in all documents
    single: int  # documents with one sentence, which cannot make a pair


def count_sentences(documents: TokenDocuments) -> SentenceCounts:
    """Count the sentences of all documents."""
    counts = np.zeros(3, np.int64)
    for block in _blocks(documents, np.arange(documents.num_documents)):
        sizes = block.ends - block.begins
        counts += [(sizes > 0).sum(), sizes.sum(), (sizes == 1).sum()]
    return SentenceCounts(*counts.tolist())


@dataclass(frozen=True)
class Chunks:
    """Chunks of consecutive sentences, in the order of the text."""

    begins: Numbers  # int64 [C], the number in the dataset of each chunk's first sentence
    sizes: npt.NDArray[np.int32]  # int32 [C], how many sentences it has, including empty ones
    targets: npt.NDArray[np.int32]  # int32 [C], wanted number of tokens

    def __len__(self) -> int:
        return len(self.begins)


def join(documents: TokenDocuments, numbers: Numbers, target: Callable[[Numbers], Numbers]) -> Chunks:
    """Join each document's sentences into chunks: a chunk ends when it has reached its target and has at least two
    sentences. A sentence that would be left alone at the end of a document joins the previous chunk.

    `numbers` are the documents, ascending; `target` maps the first sentences of chunks to their wanted numbers of
    tokens.
    """
    joined = [_joined(block, target) for block in _blocks(documents, numbers)]
    return Chunks(
        np.concatenate([np.empty(0, np.int64), *(block.begins for block in joined)]),
        np.concatenate([np.empty(0, np.int32), *(block.sizes for block in joined)]),
        np.concatenate([np.empty(0, np.int32), *(block.targets for block in joined)]),
    )


@dataclass(frozen=True)
class _Block:
    """Sentences of some documents, except those without tokens."""

    ids: Numbers  # [S], numbers in the dataset
    totals: Numbers  # [S + 1], number of tokens before each
    begins: Numbers  # [D], the index in `ids` of each document's first sentence
    ends: Numbers  # [D], one past its last sentence


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
    """The chunks of a block; each iteration makes one chunk of every document."""
    open_ = block.begins < block.ends
    begin, end = block.begins[open_], block.ends[open_]
    chunks = [(np.empty(0, np.int64),) * 3]
    while len(begin):
        wanted = target(block.ids[begin])
        stop = np.searchsorted(block.totals, block.totals[begin] + wanted)
        stop = np.maximum(stop, begin + 2)
        stop = np.where(end - stop <= 1, end, stop)
        chunks.append((begin, stop, wanted))
        goes_on = stop < end
        begin, end = stop[goes_on], end[goes_on]
    starts, stops, targets = (np.concatenate(arrays) for arrays in zip(*chunks, strict=True))
    order = np.argsort(starts)
    begins, lasts = block.ids[starts[order]], block.ids[stops[order] - 1]
    return Chunks(begins, (lasts + 1 - begins).astype(np.int32), targets[order].astype(np.int32))

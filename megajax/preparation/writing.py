"""Write the dataset's two files. Workers write parts of them in the work folder; a part is a whole number of the blocks
that have digests.

`Layout` knows how many documents, sequences and tokens precede each shard, which determines the place of every byte.
"""

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megajax.data.text.digests import BLOCK_BYTES, Digester, as_blocks
from megajax.data.text.indexed import index_header, token_type
from megajax.preparation.corpus import CleanedShards
from megajax.preparation.deciding import dropped_in
from megajax.preparation.prepare_options import PrepareOptions
from megajax.preparation.shards import CONTAMINATED, EXACT, KEPT, NEAR, SHORT, WorkFolder

PART_BYTES = 128 * BLOCK_BYTES
TOKENS, INDEX = "dataset.bin", "dataset.idx"  # in the work folder
_RULES = {"exact": ("exact",), "near": ("exact", "near"), "keep": ()}
_Segment = tuple[int, int, Callable[[], bytes]]  # first byte in the file, number of bytes, function that makes them


def final_rules(work: WorkFolder, group: int, options: PrepareOptions) -> dict[str, Any]:
    """Write for each shard of a group which documents are `kept`, [D], the `lengths` in tokens of their sequences, and
    how many `sequences` each kept document has. Write for the group which grams of test sets occur `everywhere` in its
    text, and which in `kept` documents.

    The summary has for each shard the kept `documents`, `sequences`, `tokens` and `text_bytes`, and how many documents
    are a `single` sequence; and for the group the number of `dropped` copies.
    """
    if done := work.summary("final", group):
        return done
    corpus = CleanedShards.load(work)
    names = ("documents", "sequences", "tokens", "text_bytes", "single")
    summary: dict[str, Any] = {name: [] for name in names}
    copies = {rule: dropped_in(work, rule, group)[0] for rule in _RULES[options.duplicates]}
    summary["dropped"] = {rule: len(documents) for rule, documents in copies.items()}
    everywhere, in_kept = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for shard in corpus.shards_of(group):
        rule, ends = work.load("tokens", shard, "rule", "ends")
        for name, documents in copies.items():
            begin, end = corpus.starts[shard : shard + 2]
            inside = documents[np.searchsorted(documents, begin) : np.searchsorted(documents, end)]
            rule[inside - begin] = EXACT if name == "exact" else NEAR
        kept = rule == KEPT
        sizes = np.diff(ends, prepend=0)
        if options.split_sentences:
            (of_sentences,) = work.load("tokens", shard, "lengths")
            borders = np.searchsorted(
                np.cumsum(of_sentences), ends, side="right"
            )  # sequences up to each document's end
            counts = np.diff(borders, prepend=0)
            lengths, sequences = of_sentences[np.repeat(kept, counts)], counts[kept]
        else:
            lengths, sequences = sizes[kept], np.ones(kept.sum(), np.int64)
        starts, hits = work.load("clean", shard, "starts", "hits")
        of_hits = np.append(rule, CONTAMINATED)[hits[:, 0]]  # document -1: cut out
        everywhere.append(np.unique(hits[of_hits != SHORT, 1]))
        in_kept.append(np.unique(hits[of_hits == KEPT, 1]))
        arrays = {"kept": kept, "lengths": lengths.astype("<i4"), "sequences": sequences.astype(np.int64)}
        work.save("kept", shard, arrays)
        of_shard = kept.sum(), len(lengths), lengths.sum(), np.diff(starts)[kept].sum(), (sequences == 1).sum()
        for name, value in zip(names, of_shard, strict=True):
            summary[name].append(int(value))
    hits_of = {"everywhere": np.unique(np.concatenate(everywhere)), "kept": np.unique(np.concatenate(in_kept))}
    return work.save("final", group, hits_of, summary)


@dataclass(frozen=True, eq=False)
class Layout:
    """The first document, sequence and token of each shard in the dataset, then their total numbers, each [S + 1]."""

    vocab_size: int
    documents: npt.NDArray[np.int64]
    sequences: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]

    @classmethod
    def combined(cls, summaries: Iterable[Mapping[str, Any]], vocab_size: int) -> "Layout":
        """The layout of shards with these summaries of their groups."""
        names = "documents", "sequences", "tokens"
        counts: dict[str, list[int]] = {name: [0] for name in names}
        for summary in summaries:
            for name in names:
                counts[name] += summary[name]
        return cls(vocab_size, *(np.cumsum(counts[name], dtype=np.int64) for name in names))

    def save(self, work: WorkFolder) -> None:
        """Write the layout for the workers."""
        arrays = {"documents": self.documents, "sequences": self.sequences, "tokens": self.tokens}
        work.save("layout", 0, arrays, {"vocab_size": self.vocab_size})

    @property
    def dtype(self) -> np.dtype[Any]:
        return token_type(self.vocab_size)[1]

    def size(self, name: str) -> int:
        """A file's size in bytes."""
        if name == TOKENS:
            return int(self.tokens[-1]) * self.dtype.itemsize
        return len(self._header) + 12 * int(self.sequences[-1]) + 8 * (int(self.documents[-1]) + 1)

    @property
    def _header(self) -> bytes:
        return index_header(self.vocab_size, int(self.sequences[-1]), int(self.documents[-1]))

    def segments(self, work: WorkFolder, name: str, begin: int, end: int) -> Iterator[_Segment]:
        """The segments of a file that overlap a range of bytes, in order."""
        if name == TOKENS:
            yield from self._segments(0, self.tokens, self.dtype.itemsize, begin, end, self._tokens_of(work))
            return
        header, num_sequences = self._header, int(self.sequences[-1])
        if begin < len(header):
            yield 0, len(header), lambda: header
        offset = len(header)
        yield from self._segments(offset, self.sequences, 4, begin, end, lambda shard: _kept(work, shard, "lengths"))
        offset += 4 * num_sequences
        yield from self._segments(offset, self.sequences, 8, begin, end, self._pointers_of(work))
        offset += 8 * num_sequences
        yield from self._segments(offset, self.documents, 8, begin, end, self._firsts_of(work))
        offset += 8 * int(self.documents[-1])
        if end > offset:
            yield offset, 8, lambda: np.array(num_sequences, "<i8").tobytes()

    @staticmethod
    def _segments(
        offset: int, starts: npt.NDArray[np.int64], size: int, begin: int, end: int, make: Callable[[int], Any]
    ) -> Iterator[_Segment]:
        """Segments of an array that begins at byte `offset`, with entries of `size` bytes; `make` gives a shard's."""
        offsets = offset + size * starts
        first = max(int(np.searchsorted(offsets, begin, side="right")) - 1, 0)
        for shard in range(first, min(int(np.searchsorted(offsets, end)), len(starts) - 1)):
            count = int(starts[shard + 1] - starts[shard])
            if count:
                yield int(offsets[shard]), size * count, functools.partial(lambda shard: make(shard).tobytes(), shard)

    def _tokens_of(self, work: WorkFolder) -> Callable[[int], Any]:
        def make(shard: int) -> Any:
            tokens, ends = work.load("tokens", shard, "tokens", "ends")
            kept = tokens[np.repeat(_kept(work, shard, "kept"), np.diff(ends, prepend=0))]
            assert len(kept) == 0 or kept.max() < self.vocab_size
            return kept.astype(self.dtype)

        return make

    def _pointers_of(self, work: WorkFolder) -> Callable[[int], Any]:
        def make(shard: int) -> Any:
            ends = np.cumsum(_kept(work, shard, "lengths"), dtype="<i8")
            return (self.tokens[shard] + np.concatenate([[0], ends[:-1]]).astype("<i8")) * self.dtype.itemsize

        return make

    def _firsts_of(self, work: WorkFolder) -> Callable[[int], Any]:
        def make(shard: int) -> Any:
            ends = np.cumsum(_kept(work, shard, "sequences"), dtype="<i8")
            return self.sequences[shard] + np.concatenate([[0], ends[:-1]]).astype("<i8")

        return make


def _kept(work: WorkFolder, shard: int, name: str) -> npt.NDArray[Any]:
    return work.load("kept", shard, name)[0]


@functools.lru_cache(maxsize=2)
def _layout(work: WorkFolder) -> Layout:
    arrays = work.load("layout", 0, "documents", "sequences", "tokens")
    return Layout(work.read_summary("layout", 0)["vocab_size"], *arrays)


def write_part(work: WorkFolder, name: str, index: int) -> None:
    """Write a part of a file in place, and the `digests` of its blocks."""
    if work.has(f"digests-{name}", index):
        return
    layout = _layout(work)
    begin = index * PART_BYTES
    end = min(begin + PART_BYTES, layout.size(name))
    content = bytearray(end - begin)
    filled = 0
    for offset, size, make in layout.segments(work, name, begin, end):
        data = make()
        assert len(data) == size
        inside = data[max(begin - offset, 0) : end - offset]
        content[max(offset - begin, 0) : max(offset - begin, 0) + len(inside)] = inside
        filled += len(inside)
    assert filled == len(content) == end - begin
    digester = Digester()
    digester.update(bytes(content))
    with work.writable(work / name), os.fdopen(os.open(work / name, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
        file.seek(begin)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    work.save(f"digests-{name}", index, {"digests": digester.finish()})


def blocks(work: WorkFolder, name: str, parts: int) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the digests of a file's blocks, one part at a time."""
    return (as_blocks(work.load(f"digests-{name}", part, "digests")[0].tobytes()) for part in range(parts))


def publish(work: WorkFolder, index_file: Path, tokens_file: Path) -> None:
    """Move the files to their places, the index last, so that it exists only beside a complete .bin file."""
    with work.writable(tokens_file):
        if work.wait_for(INDEX).exists():  # otherwise both were moved before an interruption
            if (work / TOKENS).exists():
                index_file.unlink(missing_ok=True)  # an older index must never be beside new tokens
                (work / TOKENS).replace(tokens_file)
            (work / INDEX).replace(index_file)

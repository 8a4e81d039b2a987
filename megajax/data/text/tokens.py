"""Documents of token ids, concatenated in one array: the basis of every dataset."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megajax.core.errors import UserError
from megajax.data.text.digests import CheckedTokens, check_ids

_SCAN_TOKENS = 1 << 24  # tokens scanned together; limits memory


@dataclass(eq=False)
class TokenDocuments:
    """D documents with N tokens in all, concatenated. Each is one sequence, or several if split into sentences."""

    tokens: npt.NDArray[np.integer]  # ids [N], possibly memory-mapped; `read` and `document` check them
    document_offsets: npt.NDArray[np.int64]  # [D + 1]; where every document begins in `tokens`, and N
    sequence_lengths: npt.NDArray[np.int32]  # of the S sequences, in tokens
    document_index: npt.NDArray[np.int64]  # [D + 1]; the first sequence of every document, and S
    name: str  # file or path, for error messages
    checked: CheckedTokens | None = None  # checks the tokens before they are used

    def __post_init__(self) -> None:
        assert self.tokens.ndim == 1 and self.document_offsets[[0, -1]].tolist() == [0, len(self.tokens)]

    @classmethod
    def from_sequences(cls, documents: Iterable[Sequence[npt.NDArray[np.int32]]], name: str) -> "TokenDocuments":
        """Documents in memory, each a list of sequences."""
        documents = list(documents)
        sequences = [sequence for document in documents for sequence in document]
        lengths = np.array([len(sequence) for sequence in sequences], np.int32)
        index = np.cumsum([0, *map(len, documents)], dtype=np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[index]
        return cls(np.concatenate([np.empty(0, np.int32), *sequences]), offsets, lengths, index, name)

    @property
    def num_documents(self) -> int:
        """D, the number of documents, including empty ones."""
        return len(self.document_offsets) - 1

    @property
    def num_tokens(self) -> int:
        """N, the number of tokens."""
        return len(self.tokens)

    def document(self, number: int) -> npt.NDArray[np.integer]:
        """The tokens of one document, a view [length]; see `read`."""
        return self.read(int(self.document_offsets[number]), int(self.document_offsets[number + 1]))

    def read(self, start: int, stop: int) -> npt.NDArray[np.integer]:
        """The tokens from `start` to `stop`, a view [stop - start]."""
        if self.checked:
            self.checked.check(start, stop)
        return self.tokens[start:stop]

    def sequence_offsets(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Where the sequences `first` to `last - 1` begin in `tokens`, and where the last of them ends; int64
        [last - first + 1]."""
        document = int(np.searchsorted(self.document_index, first, side="right")) - 1
        before = self.sequence_lengths[int(self.document_index[document]) : first]
        begin = int(self.document_offsets[document]) + int(before.sum(dtype=np.int64))
        return begin + np.concatenate([[0], np.cumsum(self.sequence_lengths[first:last], dtype=np.int64)])

    def cut(self, document: int, offset: int) -> "TokenDocuments":
        """The same tokens, but this document ends at `offset` in `tokens`, where a new one begins; a document of
        several sequences ends at the nearest end of a sequence."""
        first, last = self.document_index[document : document + 2].tolist()
        lengths, index = self.sequence_lengths, self.document_index
        if last - first > 1:
            ends = self.sequence_offsets(first, last)[1:-1]
            nearest = int(np.argmin(np.abs(ends - offset)))
            offset, begin = int(ends[nearest]), first + 1 + nearest
        else:
            own = offset - int(self.document_offsets[document])
            lengths = np.concatenate([lengths[:first], [own, lengths[first] - own], lengths[last:]]).astype(np.int32)
            index, begin = index + (np.arange(len(index)) > document), first + 1
        offsets, index = (
            np.insert(*each) for each in ((self.document_offsets, document + 1, offset), (index, document + 1, begin))
        )
        return TokenDocuments(self.tokens, offsets, lengths, index, self.name, self.checked)

    def check_vocabulary(self, size: int) -> None:
        """Check that every id is one of 0 … size - 1. Reads all tokens, block by block."""
        if np.iinfo(self.tokens.dtype).min == 0 and np.iinfo(self.tokens.dtype).max < size:
            return
        starts = range(0, self.num_tokens, _SCAN_TOKENS)
        try:
            for start in starts:
                check_ids(self.tokens[start : start + _SCAN_TOKENS], start, size, self.name)
        except UserError as invalid:
            largest = max(self.tokens[start : start + _SCAN_TOKENS].max() for start in starts)
            raise UserError(f"{invalid}; the largest id here is {largest}") from None

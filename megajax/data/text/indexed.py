"""Prepared datasets, either Megatron-LM's or from `megajax prepare`, which also writes a report with digests,
PREFIX.report.json. PREFIX.bin holds token ids, PREFIX.idx (MMIDIDX, version 1) their documents.

All little-endian. The index: 9 bytes magic, uint64 version, uint8 type of the tokens, uint64 S (number of sequences),
uint64 D + 1 (D documents), int32 [S] lengths in tokens, int64 [S] byte offsets in the .bin, int64 [D + 1] the first
sequence of each document and, at the end, S.
"""

import array
import contextlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from megajax.core.errors import Damaged, UserError
from megajax.data.text.digests import (
    CHANGED,
    TOKENS,
    Digester,
    are_digests,
    block_digests,
    check_index,
    check_tokenizer,
    root,
)
from megajax.data.text.tokens import TokenDocuments
from megajax.host import reading
from megajax.host.files import scratch, writable
from megajax.host.paths import scheme

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TOKEN_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CHECK_SEQUENCES = 1 << 20  # sequences checked together; limits memory
_COMPLETE = "both PREFIX.idx and PREFIX.bin of one dataset, complete"


class IndexedDataset(TokenDocuments):
    """A dataset on disk, memory-mapped and checked."""

    def __init__(self, prefix: str | Path) -> None:
        index_file, tokens_file = dataset_files(prefix)
        index = _map(index_file, "<u1")
        token_type, num_sequences, num_entries = _read_header(index, index_file)
        lengths = np.frombuffer(index, "<i4", num_sequences, _HEADER.size)
        pointers = np.frombuffer(index, "<i8", num_sequences, _HEADER.size + 4 * num_sequences)
        document_index = np.frombuffer(index, "<i8", num_entries, _HEADER.size + 12 * num_sequences)
        tokens = _map(tokens_file, token_type)
        _check_sequences(lengths, pointers, tokens, index_file, tokens_file)
        rises = (document_index[1:] >= document_index[:-1]).all()
        if not (num_entries and rises and document_index[0] == 0 and document_index[-1] == num_sequences):
            raise Damaged(index_file, f"its documents do not go from sequence 0 to {num_sequences}", _COMPLETE)
        offsets = np.full(num_entries, len(tokens), np.int64)
        not_at_end = document_index < num_sequences
        offsets[not_at_end] = pointers[document_index[not_at_end]] // tokens.itemsize
        super().__init__(tokens, offsets, lengths, document_index, str(tokens_file))


class IndexedWriter:
    """A dataset that is written, document by document, in a `with` block.

    Only if the block ends without an exception are the files moved from a temporary folder to their places, the index
    last, so PREFIX.idx exists only next to a complete PREFIX.bin. Tokens take two bytes if `vocab_size` is less than
    65500, otherwise four, as in Megatron-LM. After the block, `digests` has those of the .bin file's blocks, [B, 16].
    """

    def __init__(self, prefix: str | Path, vocab_size: int) -> None:
        self._prefix = Path(prefix)
        self._index_file, self._tokens_file = dataset_files(prefix)
        self._vocab_size = vocab_size
        self._dtype = token_type(vocab_size)[1]
        self._lengths, self._firsts = array.array("i"), array.array("q", [0])
        self._digester = Digester()

    def __enter__(self) -> "IndexedWriter":
        with writable(self._tokens_file), contextlib.ExitStack() as stack:
            self._tokens_file.parent.mkdir(parents=True, exist_ok=True)
            self._place = stack.enter_context(scratch(self._prefix))
            self._file = stack.enter_context((self._place / self._tokens_file.name).open("wb"))
            self._stack = stack.pop_all()
        return self

    def add_document(self, *sequences: Sequence[int] | npt.NDArray[np.integer]) -> None:
        """Append one document: its ids [length] as one sequence, or one sequence per sentence."""
        for sequence in sequences:
            ids = np.asarray(sequence, dtype=np.int64)
            assert ids.ndim == 1 and (len(ids) == 0 or (ids.min() >= 0 and ids.max() < self._vocab_size))
            content = ids.astype(self._dtype).tobytes()
            self._digester.update(content)
            with writable(self._tokens_file):
                self._file.write(content)
            self._lengths.append(len(ids))
        self._firsts.append(len(self._lengths))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                with writable(self._tokens_file):
                    self._finish()
        finally:
            with contextlib.suppress(OSError):
                self._stack.close()

    def _finish(self) -> None:
        self.digests = self._digester.finish()
        _sync(self._file)
        self._file.close()
        lengths = np.array(self._lengths, dtype="<i4")
        ends = np.cumsum(lengths, dtype="<i8") * self._dtype.itemsize
        pointers = np.concatenate([np.zeros(1, "<i8"), ends])[:-1]
        with (self._place / self._index_file.name).open("wb") as index:
            index.write(index_header(self._vocab_size, len(lengths), len(self._firsts) - 1))
            for part in lengths, pointers, np.array(self._firsts, dtype="<i8"):
                index.write(part.tobytes())
            _sync(index)
        self._index_file.unlink(missing_ok=True)  # an old index must never be next to the new tokens
        for file in self._tokens_file, self._index_file:
            (self._place / file.name).replace(file)


def token_type(vocab_size: int) -> tuple[int, np.dtype[Any]]:
    """The code and the type of the tokens in a dataset."""
    code = 8 if vocab_size < 65500 else 4
    return code, np.dtype(_TOKEN_TYPES[code])


def index_header(vocab_size: int, num_sequences: int, num_documents: int) -> bytes:
    """How an index begins."""
    return _HEADER.pack(_MAGIC, 1, token_type(vocab_size)[0], num_sequences, num_documents + 1)


def open_dataset(prefix: Path, advice: str) -> IndexedDataset:
    """Open a dataset; `advice` says what else is valid if it is damaged."""
    try:
        return IndexedDataset(prefix)
    except UserError as error:
        raise UserError(f"{error}, or {advice}") from None


def dataset_files(prefix: str | Path) -> tuple[Path, Path]:
    """PREFIX.idx and PREFIX.bin."""
    return Path(f"{prefix}.idx"), Path(f"{prefix}.bin")


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _map(file: Path, dtype: str) -> npt.NDArray[Any]:
    try:
        with reading.open_file(file) as opened:
            size = os.fstat(opened.fileno()).st_size
        if size < np.dtype(dtype).itemsize:  # an empty file cannot be mapped
            return np.empty(0, dtype)
        return np.memmap(file, dtype, mode="r", shape=(size // np.dtype(dtype).itemsize,)).view(np.ndarray)
    except OSError as error:
        raise Damaged(file, f"cannot be read: {error.strerror}", _COMPLETE) from None


def _read_header(index: npt.NDArray[Any], file: Path) -> tuple[str, int, int]:
    header = bytes(index[: _HEADER.size]).ljust(_HEADER.size, b"\0")
    magic, version, code, num_sequences, num_entries = _HEADER.unpack(header)
    if magic != _MAGIC or version != 1 or code not in _TOKEN_TYPES:
        why = "not an index of Megatron-LM (MMIDIDX, version 1) with whole numbers"
        raise Damaged(file, why, "PREFIX.idx of a dataset of text")
    if len(index) != _HEADER.size + 12 * num_sequences + 8 * num_entries:
        contents = f"{num_sequences} sequences and {num_entries} document boundaries of a text"
        raise Damaged(file, f"{len(index)} bytes are not those of {contents}", _COMPLETE)
    return _TOKEN_TYPES[code], num_sequences, num_entries


def _check_sequences(
    lengths: npt.NDArray[Any], pointers: npt.NDArray[Any], tokens: npt.NDArray[Any], index_file: Path, tokens_file: Path
) -> None:
    """Check that sequences follow each other without gaps and fill the .bin exactly."""
    num_bytes = tokens_file.stat().st_size
    reached = 0  # bytes
    for start in range(0, len(lengths), _CHECK_SEQUENCES):
        chunk = lengths[start : start + _CHECK_SEQUENCES]
        ends = reached + np.cumsum(chunk, dtype=np.int64) * tokens.itemsize
        wrong = (chunk < 0) | (pointers[start : start + len(chunk)] != np.concatenate([[reached], ends[:-1]]))
        if wrong.any():
            problem = f"sequence {start + int(np.argmax(wrong))} does not begin where the one before it ends"
            raise Damaged(index_file, problem, _COMPLETE)
        reached = int(ends[-1])
        if reached > num_bytes:
            break
    if reached != num_bytes:
        raise Damaged(tokens_file, f"{num_bytes} bytes are not those that {index_file.name} describes", _COMPLETE)


_REPORT_BYTES = 1 << 28  # of a report, which lists its input files


def prepared_prefix(path: str, *, flag: str = "--data.path") -> Path | None:
    """The dataset PREFIX that a path names as PREFIX, PREFIX.bin or PREFIX.idx; None if it names none."""
    if scheme(path):  # remote paths are text, because a dataset must be memory-mapped
        return None
    named = Path(path)
    prefix = named.with_suffix("") if named.suffix in (".bin", ".idx") else named
    index_file, tokens_file = dataset_files(prefix)
    exist = reading.is_file(index_file), reading.is_file(tokens_file)
    if all(exist):
        return prefix
    if (named == prefix and reading.kind(named)) or not any(exist):
        return None
    raise UserError(
        f"{flag}: only one of {tokens_file} and {index_file} exists; valid: both files of a prepared dataset"
    )


def tokenizer_folder(prefix: str | Path) -> Path:
    """PREFIX.tokenizer, where `megajax prepare` writes a dataset's tokenizer."""
    return Path(f"{prefix}.tokenizer")


def open_given(
    prefix: Path, vocab_size: int, *, sentences: bool, flag: str
) -> tuple[IndexedDataset, npt.NDArray[np.uint8] | None]:
    """`open_prepared` with additional checks: ids are less than `vocab_size`, and documents are split into `sentences`
    or not, as wanted; a document with several sequences shows that they are."""
    tokens, blocks = open_prepared(prefix)
    cut = bool((np.diff(tokens.document_index) > 1).any())
    if sentences and not cut:
        raise UserError(
            f"{flag}: every document of {prefix} is a single sequence; valid: documents split into "
            "sentences by megajax prepare --split-sentences"
        )
    if cut and not sentences:
        raise UserError(
            f"{flag}: the documents of {prefix} are split into sentences, which only BERT reads; "
            "valid: a dataset made without --split-sentences"
        )
    tokens.check_vocabulary(vocab_size)
    return tokens, blocks


def open_prepared(prefix: Path) -> tuple[IndexedDataset, npt.NDArray[np.uint8] | None]:
    """Open a dataset, checked against the digests that `megajax prepare` wrote. Also returns the digests of its blocks,
    [B, 16], or None if there are none because the dataset is Megatron-LM's own."""
    expected = _digests(prefix)
    if not expected:
        return IndexedDataset(prefix), None
    index_file, tokens_file = dataset_files(prefix)
    advice = (
        "the files that megajax prepare wrote (--overwrite makes them again); other files "
        f"are accepted without {prefix}.report.json"
    )
    check_index(index_file, expected, advice)
    if reading.is_folder(tokenizer_folder(prefix)):
        check_tokenizer(tokenizer_folder(prefix), expected, advice)
    tokens = open_dataset(prefix, advice)
    blocks = block_digests(tokens.tokens)
    if root(blocks) != expected.get(TOKENS):
        raise Damaged(tokens_file, CHANGED, advice)
    return tokens, blocks


def _digests(prefix: Path) -> dict[str, str]:
    """The digests in the PREFIX.report.json of `megajax prepare`; empty if there is no such report."""
    file = Path(f"{prefix}.report.json")
    if not reading.kind(file):
        return {}
    report = reading.read_json(file, _REPORT_BYTES)
    digests = report.get("digests", {}) if isinstance(report, dict) and "plan" in report else {}
    if not are_digests(digests):
        raise Damaged(file, "its digests are damaged", "the report that megajax prepare wrote, or none")
    return digests

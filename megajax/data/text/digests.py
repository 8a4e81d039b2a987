"""Digests of files, and their names in reports: for a run's corpus, and for the output of `megajax prepare`.

Tokens have a digest per block, so that a block can be verified without reading the rest: B blocks of 256 KiB, each with
the first 16 bytes of its SHA-256. The digest of a whole file, its root, is that of its block digests.
"""

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megajax.core.errors import Damaged, UserError
from megajax.data.text.tokenizers import TOKENIZER_FILES
from megajax.host import reading

BLOCK_BYTES = 1 << 18
TOKENS, INDEX = "tokens", "index"  # the names of their roots

_TOKENIZER = "tokenizer/"  # before a file's name
_BYTES = 16  # of a digest
_THREADS = 4  # hashing lets other threads run
_AT_ONCE = 1 << 28  # bytes; files up to this size are checked completely when they are opened


def _digest(block: Any) -> bytes:
    return hashlib.sha256(block).digest()[:_BYTES]


class Digester:
    """Computes block digests of data while it is written."""

    def __init__(self) -> None:
        self._done, self._rest = bytearray(), bytearray()

    def update(self, content: bytes) -> None:
        """Add the next bytes written."""
        self._rest += content
        while len(self._rest) >= BLOCK_BYTES:
            self._done += _digest(self._rest[:BLOCK_BYTES])
            del self._rest[:BLOCK_BYTES]

    def finish(self) -> npt.NDArray[np.uint8]:
        """The digests of all blocks, [B, 16]."""
        last = _digest(self._rest) if self._rest else b""
        return as_blocks(bytes(self._done) + last)


def as_blocks(content: bytes) -> npt.NDArray[np.uint8]:
    """Concatenated digests as an array [B, 16]."""
    return np.frombuffer(content, np.uint8).reshape(-1, _BYTES)


def block_digests(content: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The digests of all blocks of an array's bytes, [B, 16]."""
    size = BLOCK_BYTES // content.itemsize
    with ThreadPoolExecutor(_THREADS) as pool:
        done = pool.map(lambda start: _digest(content[start : start + size]), range(0, len(content), size))
        return as_blocks(b"".join(done))


def root(digests: npt.NDArray[np.uint8]) -> str:
    """The digest of a whole file, computed from those of its blocks."""
    return root_of_parts([digests])


def root_of_parts(parts: Iterable[npt.NDArray[np.uint8]]) -> str:
    """The digest of a whole file, computed from those of its blocks, which come in parts."""
    hasher = hashlib.sha256()
    for digests in parts:
        hasher.update(digests.tobytes())
    return hasher.digest()[:_BYTES].hex()


def file_digest(file: Path) -> str:
    """The root of a file; raises `OSError` if it cannot be read."""
    digester = Digester()
    with reading.open_file(file) as content:
        while block := content.read(BLOCK_BYTES):
            digester.update(block)
    return root(digester.finish())


def digests_of(index_file: Path, blocks: npt.NDArray[np.uint8] | None, tokenizer_folder: Path) -> dict[str, str]:
    """The digests for a report: of tokens and index, unless the tokens' blocks have none, and of the tokenizer."""
    found = {} if blocks is None else {TOKENS: root(blocks), INDEX: file_digest(index_file)}
    return found | tokenizer_digests(tokenizer_folder)


def tokenizer_digests(tokenizer_folder: Path) -> dict[str, str]:
    """The digests for a report of a tokenizer."""
    return {_TOKENIZER + file.name: file_digest(file) for file in _tokenizer_files(tokenizer_folder)}


CHANGED = "missing, or changed since it was written"


def are_digests(value: Any) -> bool:
    """Whether a value has the form of the digests of a report."""
    known = {TOKENS, INDEX, *(_TOKENIZER + name for name in TOKENIZER_FILES)}
    return isinstance(value, dict) and value.keys() <= known and all(isinstance(each, str) for each in value.values())


def check_index(file: Path, digests: Mapping[str, str], advice: str) -> None:
    """Compare an index with the digests of a report, if it is in them; `advice` says what to do if it has changed."""
    if INDEX in digests:
        _check_files({file: digests[INDEX]}, advice)


def check_tokenizer(folder: Path, digests: Mapping[str, str], advice: str) -> None:
    """Compare a tokenizer's files with a report's digests, if they include any; `advice` says what to do if a file is
    missing, has changed, or is new."""
    files = {folder / name.removeprefix(_TOKENIZER): digests[name] for name in digests if name.startswith(_TOKENIZER)}
    _check_files(files, advice)
    others = set(_tokenizer_files(folder)) - files.keys()
    if files and others:
        raise Damaged(min(others), "did not exist when the tokenizer was written", advice)


def _tokenizer_files(folder: Path) -> list[Path]:
    return [folder / name for name in TOKENIZER_FILES if reading.is_file(folder / name)]


def _check_files(files: Mapping[Path, str], advice: str) -> None:
    for file, expected in files.items():
        try:
            same = file_digest(file) == expected
        except OSError:
            same = False
        if not same:
            raise Damaged(file, CHANGED, advice)


@dataclass(eq=False)
class CheckedTokens:
    """Token ids. Each block is checked when it is first read (all blocks of a small file at once): its digest, and
    that its ids are in the vocabulary."""

    tokens: npt.NDArray[np.integer]
    digests: npt.NDArray[np.uint8] | None  # of the blocks, [B, 16]
    vocab_size: int
    file: str  # for error messages
    advice: str  # for error messages: what to do about a difference

    def __post_init__(self) -> None:
        self._size = BLOCK_BYTES // self.tokens.itemsize  # tokens per block
        num_blocks = -(-len(self.tokens) // self._size)
        if self.digests is not None and len(self.digests) != num_blocks:
            raise Damaged(self.file, CHANGED, self.advice)
        self._unknown = bytearray(b"\1") * num_blocks  # if two threads check the same block, it only takes longer
        if self.tokens.nbytes <= _AT_ONCE:
            self.check(0, len(self.tokens))

    def check(self, start: int, stop: int) -> None:
        """Check the blocks with the tokens from `start` to `stop` that have not been checked yet."""
        first, last = start // self._size, -(-stop // self._size)
        while (block := self._unknown.find(1, first, last)) >= 0:
            begin = block * self._size
            content = self.tokens[begin : begin + self._size]
            if self.digests is not None and _digest(content) != self.digests[block].tobytes():
                raise Damaged(self.file, f"{CHANGED} (from token {begin})", self.advice)
            check_ids(content, begin, self.vocab_size, self.file)
            self._unknown[block] = 0


def check_ids(tokens: npt.NDArray[np.integer], start: int, vocab_size: int, name: str) -> None:
    """Check that tokens, which begin at position `start` of the file `name`, are in the vocabulary."""
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        first = int(np.argmax((tokens < 0) | (tokens >= vocab_size)))
        raise UserError(
            f"{name}: token id {tokens[first]} at position {start + first} is beyond the vocabulary; "
            f"valid: 0 to {vocab_size - 1}, with --model.vocab-size {vocab_size}"
        )

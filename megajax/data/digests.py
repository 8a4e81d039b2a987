"""Digests of files. Tokens have one for every block, so that a block can be trusted without reading the rest.

B blocks of 256 KiB, each with the first 16 bytes of its SHA-256. A file's one digest, its root, is that of its blocks'.
"""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megajax.errors import UserError
from megajax.host import reading

BLOCK_BYTES = 1 << 18

_BYTES = 16  # of a digest
_THREADS = 4  # hashing lets other threads run
_AT_ONCE = 1 << 28  # bytes: a file up to this is checked as a whole when it is opened


def _digest(block: Any) -> bytes:
    return hashlib.sha256(block).digest()[:_BYTES]


class Digester:
    """Computes block digests of content as it is written."""

    def __init__(self) -> None:
        self._done, self._hash, self._room = bytearray(), hashlib.sha256(), BLOCK_BYTES

    def update(self, content: bytes) -> None:
        """Add what is written next."""
        rest = memoryview(content)
        while len(rest):
            part, rest = rest[: self._room], rest[self._room :]
            self._hash.update(part)
            self._room -= len(part)
            if not self._room:
                self._end_block()

    def finish(self) -> npt.NDArray[np.uint8]:
        """The digests of all blocks, [B, 16]."""
        if self._room < BLOCK_BYTES:
            self._end_block()
        return np.frombuffer(bytes(self._done), np.uint8).reshape(-1, _BYTES)

    def _end_block(self) -> None:
        self._done += self._hash.digest()[:_BYTES]
        self._hash, self._room = hashlib.sha256(), BLOCK_BYTES


def block_digests(content: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The digests of all blocks of an array's bytes, [B, 16]."""
    size = BLOCK_BYTES // content.itemsize
    with ThreadPoolExecutor(_THREADS) as pool:
        done = b"".join(pool.map(lambda start: _digest(content[start : start + size]), range(0, len(content), size)))
    return np.frombuffer(done, np.uint8).reshape(-1, _BYTES)


def root(digests: npt.NDArray[np.uint8]) -> str:
    """The digest of a whole file, computed from those of its blocks."""
    return _digest(digests.tobytes()).hex()


def file_digest(file: Path) -> str:
    """The root of a file.

    Raises:
        OSError: it cannot be read.
    """
    found = Digester()
    with reading.open_file(file) as content:
        while block := content.read(BLOCK_BYTES):
            found.update(block)
    return root(found.finish())


def check_files(files: Mapping[Path, str], advice: str) -> None:
    """Compare files with their digests."""
    for file, expected in files.items():
        try:
            same = file_digest(file) == expected
        except OSError as error:
            raise UserError(f"{file}: cannot be read: {error.strerror}; {advice}") from None
        if not same:
            raise UserError(f"{file}: not what was written; {advice}")


class CheckedTokens:
    """Token ids. Each block is checked when it is first read: its digest, and that its ids are in the vocabulary.

    A small file is checked as a whole at once.

    `advice` says what to do about a difference, for error messages.
    """

    def __init__(
        self,
        tokens: npt.NDArray[np.integer],
        digests: npt.NDArray[np.uint8] | None,
        vocab_size: int,
        file: str,
        advice: str,
    ) -> None:
        self._tokens, self._digests, self._vocab_size = tokens, digests, vocab_size
        self._file, self._advice = file, advice
        self._size = BLOCK_BYTES // tokens.itemsize  # tokens of a block
        num_blocks = -(-len(tokens) // self._size)
        if digests is not None and len(digests) != num_blocks:
            raise UserError(f"{file}: has {num_blocks} blocks, it had {len(digests)} when it was written; {advice}")
        self._unknown = bytearray(b"\1") * num_blocks  # two threads may check a block both: it costs nothing else
        if tokens.nbytes <= _AT_ONCE:
            self.check(0, len(tokens))

    def check(self, start: int, stop: int) -> None:
        """Check those blocks of the tokens from `start` to `stop` that have not been checked yet."""
        first, last = start // self._size, -(-stop // self._size)
        while (block := self._unknown.find(1, first, last)) >= 0:
            self._check_block(block)
            self._unknown[block] = 0

    def _check_block(self, block: int) -> None:
        begin = block * self._size
        content = self._tokens[begin : begin + self._size]
        if self._digests is not None and _digest(content) != self._digests[block].tobytes():
            raise UserError(
                f"{self._file}: not what was written (tokens {begin} to {begin + len(content) - 1}); {self._advice}"
            )
        if content.min() < 0 or content.max() >= self._vocab_size:
            first = int(np.argmax((content < 0) | (content >= self._vocab_size)))
            raise UserError(
                f"{self._file}: token id {content[first]} at position {begin + first} is beyond the vocabulary; valid: "
                f"0 to {self._vocab_size - 1}, with --model.vocab-size {self._vocab_size}"
            )

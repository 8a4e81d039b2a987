"""Digests of tokens: block by block, as they are first looked at."""

import hashlib
import random

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.data.text import digests
from megajax.data.text.digests import BLOCK_BYTES, CheckedTokens, Digester, block_digests, root

SIZE = BLOCK_BYTES // 2  # tokens of two bytes in a block
TOKENS = np.random.default_rng(0).integers(0, 1000, 3 * SIZE + 5).astype(np.uint16)


def checked(tokens: np.ndarray, vocab_size: int = 1000, expected: np.ndarray | None = TOKENS) -> CheckedTokens:
    found = None if expected is None else block_digests(expected)
    return CheckedTokens(tokens, found, vocab_size, "a.bin", "valid: another")


def test_digests_are_those_of_the_blocks() -> None:
    """However the content is cut; by definition."""
    content, rng = TOKENS.tobytes(), random.Random(0)
    digester, rest = Digester(), content
    while rest:
        size = rng.choice([1, 100, BLOCK_BYTES, 2 * BLOCK_BYTES + 1])
        digester.update(rest[:size])
        rest = rest[size:]
    blocks = [content[start : start + BLOCK_BYTES] for start in range(0, len(content), BLOCK_BYTES)]
    expected = b"".join(hashlib.sha256(block).digest()[:16] for block in blocks)
    assert digester.finish().tobytes() == block_digests(TOKENS).tobytes() == expected
    assert root(block_digests(TOKENS)) == hashlib.sha256(expected).digest()[:16].hex()
    assert len(Digester().finish()) == len(block_digests(TOKENS[:0])) == 0


def test_a_small_file_is_checked_at_once() -> None:
    checked(TOKENS)
    for place in (0, SIZE - 1, SIZE, 3 * SIZE + 4):
        other = TOKENS.copy()
        other[place] ^= 1
        with pytest.raises(
            UserError, match=rf"a\.bin: missing, or changed since .*token {place // SIZE * SIZE}\).*valid"
        ):
            checked(other)
    with pytest.raises(UserError, match="changed since it was written"):
        checked(TOKENS[: 3 * SIZE])


def test_blocks_of_a_large_file_are_checked_when_they_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once."""
    monkeypatch.setattr(digests, "_AT_ONCE", 0)
    other = TOKENS.copy()
    other[2 * SIZE + 7] ^= 1
    tokens = checked(other)
    tokens.check(0, 2 * SIZE)
    tokens.check(3 * SIZE, 3 * SIZE + 5)
    tokens.check(2 * SIZE, 2 * SIZE)
    with pytest.raises(UserError, match="changed since it was written"):
        tokens.check(2 * SIZE - 1, 2 * SIZE + 1)
    other[0] ^= 1
    tokens.check(0, 10)


def test_ids_beyond_the_vocabulary() -> None:
    """Also where there are no digests, as of Megatron-LM's own datasets."""
    largest = int(TOKENS.max())
    with pytest.raises(UserError, match=rf"id {largest} at position {TOKENS.argmax()} .*--model\.vocab-size {largest}"):
        checked(TOKENS, largest, None)
    with pytest.raises(UserError, match="token id -1 at position 1"):
        checked(np.array([0, -1], np.int32), 10, None)
    checked(TOKENS, largest + 1, None)

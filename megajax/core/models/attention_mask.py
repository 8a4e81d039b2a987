"""The positions of queries and keys, and which keys a query sees: all that attention knows about the task.

Letters: B batch, T queries, S keys, P pieces, H heads, N heads of all samples, sample by sample.
"""

import functools
import operator
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pieces:
    """The positions in the sequence of an array's tokens: the array consists of equal pieces, each with consecutive
    positions.
    """

    starts: tuple[int, ...] | None = field(default=(0,), metadata={"static": True})  # position where each piece starts
    start_P: Array | None = None  # the same, int32, if it is known only on the device; replaces `starts`

    @property
    def count(self) -> int:
        """The number of pieces."""
        if self.starts is not None:
            return len(self.starts)
        assert self.start_P is not None
        return self.start_P.shape[0]

    def blocks(self, length: int, size: int) -> list[tuple[int, int]]:
        """Cut an array of `length` tokens into blocks of at most `size`, none of which spans two pieces."""
        piece = length // self.count
        starts = [(first, first + piece) for first in range(0, length, piece)]
        return [(start, min(start + size, end)) for first, end in starts for start in range(first, end, size)]

    def shift(self, start: int, length: int) -> int | None:
        """How far the positions of the piece that contains index `start` are ahead of the indices in the array of
        `length` tokens; None if it is not known while tracing."""
        piece = length // self.count
        return None if self.starts is None else self.starts[start // piece] - start // piece * piece

    def at(self, start: int, end: int, length: int) -> Array:
        """Positions of the tokens with indices `start` to `end`, possibly in several pieces, int32."""
        if self.starts == (0,):
            return jnp.arange(start, end, dtype=jnp.int32)
        piece = length // self.count
        start_P = jnp.asarray(self.starts, jnp.int32) if self.start_P is None else self.start_P
        return (start_P[:, None] + jnp.arange(piece, dtype=jnp.int32)[None]).reshape(-1)[start:end]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMask:
    """Limits on what queries see, in positions of the sequence; a key must satisfy all of them."""

    # A query sees the keys up to its own position; otherwise all.
    causal: bool = field(default=False, metadata={"static": True})
    # A query sees its own position and at most `window - 1` keys on either side; None: any distance.
    window: int | None = field(default=None, metadata={"static": True})
    first_key_BT: Array | None = None  # the first key that each query sees, int32; None: key 0
    num_keys_B: Array | None = None  # number of keys in each sample, int32, the rest being padding; None: all

    @classmethod
    def of_documents(cls, positions_BT: Array, window: int | None = None) -> "AttentionMask":
        """Causal attention within documents; `positions` are those of the tokens in their documents."""
        place_T = jnp.arange(positions_BT.shape[1], dtype=jnp.int32)
        return cls(causal=True, window=window, first_key_BT=place_T[None, :] - positions_BT)

    @classmethod
    def of_padded(cls, num_keys_B: Array) -> "AttentionMask":
        """Attention to the first `num_keys` keys of each sample; 0 (a sample that nobody looks at) counts as 1."""
        return cls(num_keys_B=jnp.maximum(num_keys_B, 1))

    def of_heads(self, num_heads: int) -> "AttentionMask":
        """The same mask repeated for every head of every sample, with N in place of B."""
        return jax.tree.map(lambda x: jnp.repeat(x, num_heads, axis=0), self)

    def key_range(self, start: int, end: int, num_keys: int) -> tuple[int, int]:
        """The range of keys that queries at positions `start` to `end` may see, whatever the sample. Positions are
        relative to the first key."""
        first = 0 if self.window is None else max(0, start - self.window + 1)
        last = num_keys if self.window is None else min(num_keys, end + self.window - 1)
        return first, min(last, end) if self.causal else last

    def mask(self, query_T: Array, key_S: Array, queries: slice) -> Array | None:
        """Which keys at positions `key_S` are visible to the queries at positions `query_T`, bool, [B, T, S] or
        [1, T, S]; None if all are. `queries` selects these queries from all that the mask has entries for."""
        behind_TS = query_T[:, None] - key_S[None, :]
        limits = []
        if self.causal:
            limits.append((key_S[None, :] <= query_T[:, None])[None])
        if self.window is not None:
            limits.append((jnp.abs(behind_TS) < self.window)[None])
        if self.first_key_BT is not None:
            limits.append(self.first_key_BT[:, queries, None] <= key_S[None, None, :])
        if self.num_keys_B is not None:
            limits.append(key_S[None, None, :] < self.num_keys_B[:, None, None])
        return functools.reduce(operator.and_, limits) if limits else None


CAUSAL = AttentionMask(causal=True)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Places:
    """The positions of queries and keys."""

    queries: Pieces = Pieces()
    keys: Pieces = Pieces()
    # How far queries are ahead of keys, if that is known although `starts` are not.
    ahead: int | None = field(default=None, metadata={"static": True})

    def key_range(self, visible: AttentionMask, start: int, end: int, num_queries: int, num_keys: int) -> slice:
        """The keys that the queries `start` to `end` may see, whatever the sample; all of them if positions are not
        known while tracing, or if keys are in several pieces."""
        shifts, ahead = (self.queries.shift(start, num_queries), self.keys.shift(0, num_keys)), self.ahead
        if ahead is None:
            if shifts[0] is None or shifts[1] is None or self.keys.count > 1:
                return slice(0, num_keys)
            ahead = shifts[0] - shifts[1]
        first, last = visible.key_range(start + ahead, end + ahead, num_keys)
        return slice(min(first, num_keys), min(last, num_keys))


FROM_START = Places()  # queries and keys both start at the first token

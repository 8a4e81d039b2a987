"""Which keys a query of attention may see: all that attention knows of the task.

Letters: B batch, T queries, S keys, N heads of all samples, one after the other.
"""

import functools
import operator
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMask:
    """All of these limits at once, of positions in the sequence."""

    # A query sees the keys up to its own position; else all.
    causal: bool = field(default=False, metadata={"static": True})
    # It sees its own position and `window - 1` keys on either side at most; None: any distance.
    window: int | None = field(default=None, metadata={"static": True})
    first_key_BT: Array | None = None  # the first key that each query sees, int32; None: key 0
    num_keys_B: Array | None = None  # how many keys a sample has, int32, the rest being padding; None: all

    @classmethod
    def of_documents(cls, positions_BT: Array, window: int | None = None) -> "AttentionMask":
        """Causal, and no further back than the document that a token belongs to; its place there is given."""
        place_T = jnp.arange(positions_BT.shape[1], dtype=jnp.int32)
        return cls(causal=True, window=window, first_key_BT=place_T[None, :] - positions_BT)

    @classmethod
    def of_padded(cls, num_keys_B: Array) -> "AttentionMask":
        """All keys of samples that have so many; one of none, which nobody looks at, counts as having one."""
        return cls(num_keys_B=jnp.maximum(num_keys_B, 1))

    def of_heads(self, num_heads: int) -> "AttentionMask":
        """The same for every head of every sample, N in place of B."""
        return jax.tree.map(lambda x: jnp.repeat(x, num_heads, axis=0), self)

    def key_range(self, start: int, end: int, num_keys: int) -> tuple[int, int]:
        """Which of the keys the queries `start` to `end` may see, whatever the sample."""
        first = 0 if self.window is None else max(0, start - self.window + 1)
        last = num_keys if self.window is None else min(num_keys, end + self.window - 1)
        return first, min(last, end) if self.causal else last

    def mask(self, queries: slice, keys: slice) -> Array | None:
        """Which of these keys these queries see, bool, [B, T, S] or [1, T, S]. None: all of them."""
        query_T, key_S = (jnp.arange(part.start, part.stop, dtype=jnp.int32) for part in (queries, keys))
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

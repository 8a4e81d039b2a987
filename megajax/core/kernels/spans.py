"""Which blocks of keys each block of queries sees, and the reverse, so that the kernels skip the others.

Each query sees a range of keys. A block is seen fully if all its queries see all its keys: it needs no mask.

Letters: B batch, T queries, I blocks of queries, J blocks of keys, P pieces of queries.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax


class BlockTurns:
    """The blocks that a kernel takes in turn: in each span those from `first` to `end`, of which those from `full` to
    `full_end` are seen fully and come first; all of it `times` times. Scalars in a kernel."""

    def __init__(self, spans: list[Any], times: int = 1):
        """`spans` are in the GPU's memory, each [4]."""
        self._spans = [[span[number] for number in range(4)] for span in spans]
        self._once = [sum(full_end - full for _, full, full_end, _ in self._spans)]
        self._once.append(sum(end - first for first, _, _, end in self._spans) - self._once[0])
        self.full_count, self.count = times * self._once[0], times * (self._once[0] + self._once[1])

    def place(self, turn: Array) -> tuple[Array, Array]:
        """A turn's repetition and block."""
        partly = turn >= self.full_count
        once = jnp.maximum(jnp.where(partly, self._once[1], self._once[0]), 1)
        turn = jnp.where(partly, turn - self.full_count, turn)
        time, rest = lax.div(turn, once), lax.rem(turn, once)
        block = rest
        for first, full, full_end, end in self._spans:
            before, fully = full - first, full_end - full
            of_partly = jnp.where(rest < before, first + rest, full_end + rest - before)
            block = jnp.where(rest >= 0, jnp.where(partly, of_partly, full + rest), block)
            rest = rest - jnp.where(partly, end - first - fully, fully)
        return time, block


def spans_of_queries(limits_B2T: Array, queries: int, keys: int, num_keys: int) -> Array:
    """The blocks of `keys` keys that each block of `queries` queries sees, int32 [B, I, 4]."""
    some, fully = _seen(limits_B2T, queries, keys, num_keys)
    return _spans(some, fully)


def spans_of_keys(limits_B2T: Array, queries: int, keys: int, num_keys: int, pieces: int) -> Array:
    """The blocks of queries that see each block of keys, by piece of the queries, int32 [B, J, P, 4]."""
    some_BJI, fully_BJI = (x.swapaxes(1, 2) for x in _seen(limits_B2T, queries, keys, num_keys))
    shape = (*some_BJI.shape[:2], pieces, -1)
    spans = _spans(some_BJI.reshape(shape), fully_BJI.reshape(shape))
    piece_P1 = jnp.arange(pieces, dtype=jnp.int32)[:, None] * (some_BJI.shape[2] // pieces)
    return spans + piece_P1[None, None]


def _seen(limits_B2T: Array, queries: int, keys: int, num_keys: int) -> tuple[Array, Array]:
    """Whether any query of a block sees any key of another, and whether all see all, bool [B, I, J]."""
    first, last = (limits_B2T[:, n].reshape(limits_B2T.shape[0], -1, queries) for n in range(2))
    key_11J = jnp.arange(num_keys // keys, dtype=jnp.int32)[None, None] * keys
    far = jnp.iinfo(jnp.int32).max
    sees = first < last
    earliest, latest = jnp.where(sees, first, far).min(2), jnp.where(sees, last, 0).max(2)
    some = (earliest[..., None] < key_11J + keys) & (latest[..., None] > key_11J)
    fully = (first.max(2)[..., None] <= key_11J) & (last.min(2)[..., None] >= key_11J + keys)
    return some, some & fully


def _spans(some: Array, fully: Array) -> Array:
    """Spans along the last dim: from the first to the last block that is seen, and the first run of blocks that are
    seen fully."""
    index = lax.broadcasted_iota(jnp.int32, some.shape, some.ndim - 1)
    length = some.shape[-1]

    def least(where: Array) -> Array:
        return jnp.where(where, index, length).min(-1)

    end = jnp.where(some, index + 1, 0).max(-1)
    first = jnp.minimum(least(some), end)
    full = jnp.clip(least(fully), first, end)
    full_end = jnp.clip(least(~fully & (index >= full[..., None])), full, end)
    return lax.stop_gradient(jnp.stack([first, full, full_end, end], axis=-1))

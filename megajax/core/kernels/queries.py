"""A warpgroup's queries and the blocks of keys they see, for the forward pass and the gradient of queries.

Letters: B batch, T queries, S keys, H heads, N heads of keys, K head size.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from megajax.core.kernels import tiles
from megajax.core.kernels.spans import BlockTurns
from megajax.core.kernels.tiles import GROUPS, ROWS, Ring

Copied = Sequence[tuple[Any, Any]]  # arrays in the GPU's memory, and where they go in shared memory


class Queries:
    """Queries of one head, loaded at once, and their blocks of keys, loaded in turn.

    Attributes:
        place: sample, head and rows of the queries.
        own: the same, as an index of [B, T, H, K].
        turns: the blocks of keys.
    """

    def __init__(self, queries: Copied, keys: Copied, known: list[Any], rows_s: list[Any], ready: Any, ring: Ring):
        """`known` are the spans, then what is copied to `rows_s`."""
        self._keys, self._ring, self._columns = keys, ring, keys[0][1].shape[1]
        (_, length, heads, _), (spans_g, *rows_g) = queries[0][0].shape, known
        sample, head, turn, self.worker = (lax.axis_index(name) for name in ("sample", "head", "block", "worker"))
        block = length // (GROUPS * ROWS) - 1 - turn  # late queries, which see most where attention is causal, first
        self.turns = BlockTurns([spans_g.at[sample, block]])
        self._kv_head = lax.div(head, heads // keys[0][0].shape[2])
        rows = pl.ds((block * GROUPS + self.worker) * ROWS, ROWS)
        self.place, self.own = (sample, head, rows), (sample, rows, head)
        for there, here in queries:
            plgpu.copy_gmem_to_smem(there.at[self.own], here.at[self.worker], ready.at[self.worker])
        tiles.load_rows(rows_g, rows_s, self.place, self.worker, ready.at[self.worker])
        self.load(jnp.int32(0))
        plgpu.barrier_wait(ready.at[self.worker])

    def load(self, turn: Array) -> None:
        """Start to load a turn's keys."""
        block = self.place[0], pl.ds(self.first_key(turn), self._columns), self._kv_head

        def copy(slot: Array, filled: Any) -> None:
            for there, here in self._keys:
                plgpu.copy_gmem_to_smem(there.at[block], here.at[slot], filled)

        self._ring.fill(turn, turn < self.turns.count, copy)

    def first_key(self, turn: Array) -> Array:
        """The index of the first key of a turn's block."""
        return self.turns.place(turn)[1] * self._columns

    def key_numbers(self, turn: Array) -> Array:
        """The indices of the keys of a turn's block, in every row."""
        return tiles.columns_from(self.first_key(turn), self._columns)

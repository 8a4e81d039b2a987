"""What is done differently on CPUs and on GPUs, all of it; docs/benchmarks says what was measured."""

import math
from dataclasses import dataclass

from jax.sharding import Mesh

_MOST_BLOCKS = 32


@dataclass(frozen=True)
class Backend:
    """The forms that suit a kind of device. They change speed and memory, never the result beyond rounding."""

    unroll_layers: float  # `--model.scan-layers auto` unrolls up to this many layers of a chunk; more are one scan
    fused_attention: bool  # attention without dropout in half precision is cuDNN's
    query_block: int  # our own attention takes the queries in blocks of this many (`block_of`)
    scores_bytes: int | None  # and so many heads at once that a block's scores take at most this; None: all heads
    transposed_copies: bool  # the input of a weight gradient's product is transposed by a copy, not by the product
    expert_block: int = 128  # dropless experts multiply so many rows at a time (`parallel/grouped.py`)

    def block_of(self, length: int) -> int:
        """Queries of a block of our own attention: half of the sequence, since keys after a block are left out; within
        128 and `query_block`, but so many that there are at most 32 blocks, each of which is compiled."""
        return max(min(self.query_block, max(128, length // 2)), -(-length // _MOST_BLOCKS))


# Scores of 16 MiB stay in the cache. XLA's fast products (YNNPACK) do not take a transposed left operand.
CPU = Backend(
    unroll_layers=8, fused_attention=False, query_block=256, scores_bytes=2**24, transposed_copies=True, expert_block=64
)
GPU = Backend(unroll_layers=math.inf, fused_attention=True, query_block=128, scores_bytes=None, transposed_copies=False)


def backend_of(mesh: Mesh) -> Backend:
    """The backend of a mesh's devices."""
    return CPU if mesh.devices.flat[0].platform == "cpu" else GPU

"""Which layers live on which stage, and the two layouts of the stacked layers: canonical `[L, …]`, as in checkpoints,
and pipelined `[chunks, stages, n, …]`.

Layers keep their order through the virtual stages `k = chunk · stages + stage`, Megatron-LM's interleaved placement. If
their number is not divisible, the first virtual stages hold one layer more, and the others are padded with a layer that
never runs.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array


@dataclass(frozen=True)
class Placement:
    """Placement of `num_layers` on `num_stages` stages with `num_chunks` chunks each."""

    num_layers: int
    num_stages: int
    num_chunks: int = 1

    @property
    def num_virtual(self) -> int:
        return self.num_chunks * self.num_stages

    @property
    def layers_per_chunk(self) -> int:
        """Slots per virtual stage: the number of layers on the fullest one."""
        return -(-self.num_layers // self.num_virtual)

    @property
    def padded(self) -> bool:
        return self.num_layers % self.num_virtual != 0

    @property
    def divides_evenly(self) -> bool:
        """Whether stages could have equally many layers."""
        return self.num_layers % self.num_stages == 0

    @property
    def layer_index(self) -> np.ndarray:
        """Canonical index of the layer in each slot, -1 in a padded one; int32 [chunks, stages, layers per chunk]."""
        base, extra = divmod(self.num_layers, self.num_virtual)
        index, first = np.full((self.num_virtual, self.layers_per_chunk), -1, np.int32), 0
        for k in range(self.num_virtual):
            count = base + (k < extra)
            index[k, :count] = np.arange(first, first + count)
            first += count
        return index.reshape(self.num_chunks, self.num_stages, self.layers_per_chunk)

    def to_stages(self, canonical: Array) -> Array:
        """`[L, …]` to `[chunks, stages, n, …]`, zeros in padded slots."""
        index = self.layer_index
        if not self.padded:
            return canonical.reshape(*index.shape, *canonical.shape[1:])
        outside = np.where(index < 0, self.num_layers, index)  # a negative index would count from the end
        return jnp.take(canonical, outside, axis=0, mode="fill", fill_value=0)

    def to_canonical(self, pipelined: Array) -> Array:
        """`[chunks, stages, n, …]` back to `[L, …]`."""
        flat = pipelined.reshape(-1, *pipelined.shape[3:])
        if not self.padded:
            return flat
        return jnp.take(flat, np.flatnonzero(self.layer_index.ravel() >= 0), axis=0)

"""Which layers live on which stage, and the two layouts of the stacked layers: canonical `[L, …]`, as in checkpoints,
and pipelined `[chunks, stages, n, …]`.

Layers keep their order through the virtual stages `k = chunk · stages + stage`, Megatron-LM's interleaved placement. By
default, the first virtual stages hold one layer more if their number is not divisible. All are padded to the fullest
with layers that never run.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.core.pipeline.config import PipelineConfig


@dataclass(frozen=True)
class Placement:
    """Placement of `num_layers` on `num_stages` stages with `num_chunks` chunks each."""

    num_layers: int
    num_stages: int
    num_chunks: int = 1
    given: tuple[int, ...] = ()  # layers of every virtual stage; empty: as even as possible

    @classmethod
    @lru_cache(maxsize=4096)  # a search asks for the same ones again and again
    def of(cls, num_layers: int, num_stages: int, pipeline: PipelineConfig) -> "Placement":
        """Their placement in a pipeline, of which `auto` has become numbers (`plan/placing.py`)."""
        assert pipeline.layers != "auto"
        return cls(num_layers, num_stages, pipeline.chunks, pipeline.counts)

    @property
    def num_virtual(self) -> int:
        return self.num_chunks * self.num_stages

    @cached_property
    def counts(self) -> np.ndarray:
        """How many layers every chunk of every stage has, [chunks, stages]."""
        base, extra = divmod(self.num_layers, self.num_virtual)
        counts = self.given or [base + (k < extra) for k in range(self.num_virtual)]
        assert (len(counts), sum(counts)) == (self.num_virtual, self.num_layers), self
        return np.asarray(counts, np.int32).reshape(self.num_chunks, self.num_stages)

    @cached_property
    def layers_per_chunk(self) -> int:
        """Slots per virtual stage: the number of layers on the fullest one."""
        return int(self.counts.max())

    @property
    def padded(self) -> bool:
        return bool(self.counts.min() < self.layers_per_chunk)

    @property
    def divides_evenly(self) -> bool:
        """Whether stages could have equally many layers."""
        return self.num_layers % self.num_stages == 0

    @property
    def layer_index(self) -> np.ndarray:
        """Canonical index of the layer in each slot, -1 in a padded one; int32 [chunks, stages, layers per chunk]."""
        first = np.cumsum(self.counts).reshape(self.counts.shape) - self.counts
        slots = np.arange(self.layers_per_chunk)
        return np.where(slots < self.counts[..., None], first[..., None] + slots, -1).astype(np.int32)

    def __str__(self) -> str:
        """The layers of the stages, such as `9,9,8,6`, with chunks `5,4 | 4,3`."""
        return " | ".join(",".join(map(str, chunk)) for chunk in self.counts.tolist())

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

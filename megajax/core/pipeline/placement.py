"""Which layers live on which stage, and the two layouts of the stacked layers: canonical `[L, …]`, as in checkpoints,
and pipelined `[chunks, stages, n, …]`.

Layers keep their order through the virtual stages `k = chunk · stages + stage`, Megatron-LM's interleaved placement. By
default, the first virtual stages hold one layer more if their number is not divisible. All are padded to the fullest
with layers that never run.

If a model has layers of two kinds, what is placed are periods: a run of layers of one kind, then one of the other. Each
kind has a stack of its own, in which all periods have as many slots as the longest run.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.core.pipeline.config import PipelineConfig


@dataclass(frozen=True)
class Placement:
    """Placement of `num_layers`, or as many periods, on `num_stages` stages with `num_chunks` chunks each."""

    num_layers: int
    num_stages: int
    num_chunks: int = 1
    given: tuple[int, ...] = ()  # layers of every virtual stage; empty: as even as possible
    runs: tuple[int, ...] = ()  # of periods: how many layers of the stack's kind each has; empty: layers are placed

    @classmethod
    @lru_cache(maxsize=4096)  # a search asks for the same ones again and again
    def of(cls, periods: int | tuple[int, ...], num_stages: int, pipeline: PipelineConfig) -> "Placement":
        """The placement of layers, or of periods with so many layers each, in a pipeline, of which `auto` has become
        numbers (`plan/placing.py`)."""
        assert pipeline.layers != "auto"
        if isinstance(periods, int):
            return cls(periods, num_stages, pipeline.chunks, pipeline.counts)
        ends = [0, *accumulate(periods)]
        given = (ends.index(end) for end in (0, *accumulate(pipeline.counts))) if pipeline.counts else ()
        return cls(len(periods), num_stages, pipeline.chunks, tuple(np.diff([*given]).tolist()))

    @property
    def size(self) -> int:
        """Layers in the stack."""
        return sum(self.runs) if self.runs else self.num_layers

    @property
    def run(self) -> int:
        """Slots for the layers of a period."""
        return max(self.runs, default=1)

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
        """Slots per virtual stage: as many as the fullest one needs."""
        return int(self.counts.max()) * self.run

    @property
    def padded(self) -> bool:
        return bool(self.counts.min() < self.counts.max()) or len({*self.runs}) > 1

    @property
    def divides_evenly(self) -> bool:
        """Whether stages could have equally many layers."""
        return self.size % self.num_stages == 0

    @property
    def layer_index(self) -> np.ndarray:
        """Canonical index of the layer in each slot, -1 in a padded one; int32 [chunks, stages, layers per chunk]."""
        first = np.cumsum(self.counts).reshape(self.counts.shape) - self.counts
        index = _numbered(first, self.counts, int(self.counts.max()))
        if not self.runs:
            return index
        runs = np.where(index < 0, 0, np.asarray(self.runs)[index])
        first = (np.cumsum(self.runs) - self.runs)[index]
        return _numbered(first, runs, self.run).reshape(*self.counts.shape, -1)

    def __str__(self) -> str:
        """The layers of the stages, such as `9,9,8,6`, with chunks `5,4 | 4,3`."""
        return " | ".join(",".join(map(str, chunk)) for chunk in self.counts.tolist())

    def to_stages(self, canonical: Array) -> Array:
        """`[L, …]` to `[chunks, stages, n, …]`, zeros in padded slots."""
        index = self.layer_index
        if not self.padded:
            return canonical.reshape(*index.shape, *canonical.shape[1:])
        outside = np.where(index < 0, self.size, index)  # a negative index would count from the end
        return jnp.take(canonical, outside, axis=0, mode="fill", fill_value=0)

    def to_canonical(self, pipelined: Array) -> Array:
        """`[chunks, stages, n, …]` back to `[L, …]`."""
        flat = pipelined.reshape(-1, *pipelined.shape[3:])
        if not self.padded:
            return flat
        return jnp.take(flat, np.flatnonzero(self.layer_index.ravel() >= 0), axis=0)


def _numbered(first: np.ndarray, counts: np.ndarray, slots: int) -> np.ndarray:
    """The numbers from `first` on in the first of some slots, in a dim after the others, and -1 in the rest; int32."""
    number = np.arange(slots)
    return np.where(number < counts[..., None], first[..., None] + number, -1).astype(np.int32)

"""How a model is split over a tensor group: what stands at the borders of the split regions, and where the vocabulary
goes.

Between the regions activations are the same on all devices of the group, and the borders are the paper's `f` and `g`.
With sequence parallelism (Korthikanti et al., arXiv 2205.05198) they are split there along the sequence: LayerNorm,
dropout and the residual path work on a device's own tokens, and the borders become another conjugate pair, all-gather
and reduce-scatter, which together move the bytes of the one all-reduce they replace.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from megajax.parallel.collectives import TENSOR, Axes, axis_index, f, g, gather_shards, own_shard, scatter_sum

TOKENS = 1  # the dim of x_BTD that is split


@dataclass(frozen=True)
class Split:
    """The borders of regions split over `tensor`, or over several axes with `tensor` the last of them.

    Attributes:
        vocabulary: axes that the rows of the embedding table are split over.
        sequence: activations between the regions are split along the sequence, over `tensor`.
        regather: what was gathered of a split sequence for a matrix product is not kept for the backward pass, but
            gathered again. Without need where the layer as a whole is recomputed.
    """

    vocabulary: Axes = TENSOR
    sequence: bool = False
    regather: bool = True

    def enter(self, x_BTD: Array, axes: Axes = TENSOR) -> Array:
        """Into a region: `f`; of a split sequence all tokens are gathered, and the gradient is reduce-scattered."""
        if not self.sequence:
            return f(x_BTD, axes)
        return self._over_others(f, gather_shards(x_BTD, TOKENS, TENSOR), axes)

    def leave(self, y_BTD: Array, axes: Axes = TENSOR) -> Array:
        """Out of a region: `g`; a split sequence is reduce-scattered, and its gradient gathered."""
        if not self.sequence:
            return g(y_BTD, axes)
        return self._over_others(g, scatter_sum(y_BTD, TOKENS, TENSOR), axes)

    def _over_others(self, function, x_BTD: Array, axes: Axes) -> Array:
        others = () if axes == TENSOR else tuple(axis for axis in axes if axis != TENSOR)
        return function(x_BTD, others) if others else x_BTD

    def tokens(self, x_BTD: Array) -> Array:
        """Global positions of the tokens of an activation between the regions, int32 [T]."""
        size = x_BTD.shape[TOKENS]
        first = axis_index(TENSOR) * size if self.sequence else 0
        return first + jnp.arange(size, dtype=jnp.int32)

    def own(self, x: Array, dim: int = TOKENS) -> Array:
        """Of an array with an entry for every token along `dim`, those of this device's tokens."""
        return own_shard(x, dim, TENSOR) if self.sequence else x


PAPER = Split()  # `f` and `g`

"""What stands at the boundary of a tensor-parallel region: `f` and `g`, or the pair that takes their place.

Between the regions activations are duplicated on the devices of a tensor group, and its boundary is the paper's `f`
and `g`. With sequence parallelism (Korthikanti et al., arXiv 2205.05198) they are sharded there along the sequence:
LayerNorm, dropout and the residual path work on a device's own tokens, and the boundary becomes another conjugate pair,
all-gather and reduce-scatter, which together move the bytes of the one all-reduce they replace.
"""

from dataclasses import dataclass, replace

from jax import Array

from megajax.parallel.collectives import TENSOR, Axes, f, g, gather_shards, scatter_sum, vary
from megajax.parallel.tokens import TOKENS, TokenShares


@dataclass(frozen=True)
class RegionBoundary(TokenShares):
    """The boundary of regions sharded over `tensor`, or over several axes with `tensor` the last of them."""

    vocabulary: Axes = TENSOR  # axes that the rows of the embedding table are sharded over
    # What sequence parallelism gathered for a matrix product is not kept for the backward pass, but gathered again.
    # Without need where the layer as a whole is recomputed.
    regather: bool = True
    chosen: bool = False  # activations between the regions are those of chosen tokens (`of_chosen`)
    together: bool = False  # all devices of the mesh come to a layer together, as they do without a pipe

    @property
    def split(self) -> int | None:
        """The dim of activations between the regions that devices of a tensor group share."""
        return TOKENS if self.sequence_parallel else None

    @property
    def regathers(self) -> bool:
        """Whether a product keeps this device's tokens alone, and gathers the others where it needs them."""
        return self.sequence_parallel and self.regather

    def enter(self, x_BTD: Array, axes: Axes = TENSOR) -> Array:
        """Into a region: `f`; with sequence parallelism all tokens are gathered, and the gradient scattered."""
        if self.chosen:  # counts as varying where a weight has touched it, and the gradient is summed behind that
            return vary(x_BTD, (axes,) if isinstance(axes, str) else axes)
        if not self.sequence_parallel:
            return f(x_BTD, axes)
        return self._over_others(f, gather_shards(x_BTD, TOKENS, TENSOR), axes)

    def leave(self, y_BTD: Array, axes: Axes = TENSOR) -> Array:
        """Out of a region: `g`; with sequence parallelism the sum is reduce-scattered, and its gradient gathered."""
        if not self.sequence_parallel:
            return g(y_BTD, axes)
        return self._over_others(g, scatter_sum(y_BTD, TOKENS, TENSOR), axes)

    def _over_others(self, function, x_BTD: Array, axes: Axes) -> Array:
        others = () if axes == TENSOR else tuple(axis for axis in axes if axis != TENSOR)
        return function(x_BTD, others) if others else x_BTD

    @property
    def of_chosen(self) -> "RegionBoundary":
        """That of what follows `at_places`, which is not sharded along the sequence, although the weights between the
        regions count as varying over `tensor` with sequence parallelism."""
        return replace(self, sequence_parallel=False, chosen=True) if self.sequence_parallel else self


F_AND_G = RegionBoundary()  # the paper's

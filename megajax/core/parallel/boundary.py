"""The boundary of a tensor-parallel region: the paper's `f` and `g`, or their sequence-parallel counterparts.

Between the regions activations are replicated over `tensor`, and `f` and `g` of the paper stand at the boundary. With
sequence parallelism (Korthikanti et al., arXiv 2205.05198) they are sharded there along the sequence: LayerNorm,
dropout and the residual path work on a device's own tokens. The boundary then becomes another conjugate pair,
all-gather and reduce-scatter, which together move as many bytes as the one all-reduce they replace.
"""

from dataclasses import dataclass, replace

from jax import Array

from megajax.core.parallel.collectives import TENSOR, Axes, f, g, gather_shards, scatter_sum, vary
from megajax.core.parallel.tokens import TOKENS, TokenShares


@dataclass(frozen=True)
class RegionBoundary(TokenShares):
    """The boundary of regions sharded over `tensor`, or over several axes with `tensor` the last of them."""

    vocabulary: Axes = TENSOR  # axes over which the rows of the embedding table are sharded
    # The backward pass gathers the input of a matrix product again, instead of saving the gathered one. Not needed
    # where the whole layer is recomputed.
    regather: bool = True
    chosen: bool = False  # the activations were picked by `at_places`; see `of_chosen`
    together: bool = False  # all devices of the mesh run a layer at the same time, as they do without a pipe

    @property
    def split(self) -> int | None:
        """The dim along which activations between the regions are sharded over `tensor`, if any."""
        return TOKENS if self.sequence_parallel else None

    @property
    def regathers(self) -> bool:
        """Whether products save only this device's tokens and gather the others again in the backward pass."""
        return self.sequence_parallel and self.regather

    def enter(self, x_BTD: Array, axes: Axes = TENSOR) -> Array:
        """Enter a region: `f`; with sequence parallelism an all-gather of the tokens, which scatters the gradient."""
        if self.chosen:  # `x` may vary already, where a weight has touched it; its gradient is summed further back
            return vary(x_BTD, (axes,) if isinstance(axes, str) else axes)
        if not self.sequence_parallel:
            return f(x_BTD, axes)
        return self._over_others(f, gather_shards(x_BTD, TOKENS, TENSOR), axes)

    def leave(self, y_BTD: Array, axes: Axes = TENSOR) -> Array:
        """Leave a region: `g`; with sequence parallelism a reduce-scatter, which gathers the gradient."""
        if not self.sequence_parallel:
            return g(y_BTD, axes)
        return self._over_others(g, scatter_sum(y_BTD, TOKENS, TENSOR), axes)

    def _over_others(self, function, x_BTD: Array, axes: Axes) -> Array:
        others = () if axes == TENSOR else tuple(axis for axis in axes if axis != TENSOR)
        return function(x_BTD, others) if others else x_BTD

    @property
    def of_chosen(self) -> "RegionBoundary":
        """The boundary for activations picked by `at_places`: not sharded along the sequence, although with sequence
        parallelism the weights between the regions still count as varying over `tensor`."""
        return replace(self, sequence_parallel=False, chosen=True) if self.sequence_parallel else self


F_AND_G = RegionBoundary()  # the paper's


class _NoBoundary(RegionBoundary):
    """Of products that do not enter a region, because they are between regions or inside one already."""

    def enter(self, x_BTD: Array, axes: Axes = TENSOR) -> Array:
        return x_BTD


NO_BOUNDARY = _NoBoundary()

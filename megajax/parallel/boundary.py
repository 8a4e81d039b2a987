"""What stands at the boundary of a tensor-parallel region: `f` and `g`, or the pair that takes their place.

Between the regions activations are duplicated on the devices of a tensor group, and its boundary is the paper's `f`
and `g`. With sequence parallelism (Korthikanti et al., arXiv 2205.05198) they are sharded there along the sequence:
LayerNorm, dropout and the residual path work on a device's own tokens, and the boundary becomes another conjugate pair,
all-gather and reduce-scatter, which together move the bytes of the one all-reduce they replace.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from megajax.parallel.collectives import (
    TENSOR,
    Axes,
    axis_index,
    axis_size,
    f,
    g,
    gather_shards,
    own_shard,
    scatter_sum,
    vary,
)

TOKENS = 1  # the dim of x_BTD that sequence parallelism shards


@dataclass(frozen=True)
class RegionBoundary:
    """The boundary of regions sharded over `tensor`, or over several axes with `tensor` the last of them."""

    vocabulary: Axes = TENSOR  # axes that the rows of the embedding table are sharded over
    sequence_parallel: bool = False  # activations between the regions are sharded along the sequence, over `tensor`
    # What sequence parallelism gathered for a matrix product is not kept for the backward pass, but gathered again.
    # Without need where the layer as a whole is recomputed.
    regather: bool = True
    chosen: bool = False  # activations between the regions are those of chosen tokens (`of_chosen`)

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

    def token_index(self, x_BTD: Array) -> Array:
        """Places in the sequence of the tokens of an activation between the regions, int32 [T]."""
        size = x_BTD.shape[TOKENS]
        first = axis_index(TENSOR) * size if self.sequence_parallel else 0
        return first + jnp.arange(size, dtype=jnp.int32)

    def own_tokens(self, x: Array, dim: int = TOKENS) -> Array:
        """Of an array with an entry for every token along `dim`, the entries of this device's tokens."""
        return own_shard(x, dim, TENSOR) if self.sequence_parallel else x

    def at_places(self, x_BTD: Array, places_BM: Array) -> Array:
        """An activation between the regions at these places of the sequence, [B, M, D], on every device of a tensor
        group; with sequence parallelism each looks up those that it has, and `g` adds them up."""
        if not self.sequence_parallel:
            return _rows_at(x_BTD, places_BM)
        size = x_BTD.shape[TOKENS]
        own_BM = places_BM - axis_index(TENSOR) * size
        here_BM = (own_BM >= 0) & (own_BM < size)
        found_BMD = _rows_at(x_BTD, jnp.clip(own_BM, 0, size - 1))
        return g(jnp.where(here_BM[..., None], found_BMD, jnp.zeros((), x_BTD.dtype)), TENSOR)

    def of_all_tokens(self, x_BTK: Array) -> Array:
        """Numbers of every token, few of each, on every device of a tensor group; with sequence parallelism each puts
        its own in their places, and `g` adds them up."""
        if not self.sequence_parallel:
            return x_BTK
        size, devices = x_BTK.shape[TOKENS], axis_size(TENSOR)
        here = jnp.arange(devices, dtype=jnp.int32) == axis_index(TENSOR)
        parts_BPTK = jnp.where(here[None, :, None, None], x_BTK[:, None], jnp.zeros((), x_BTK.dtype))
        return g(parts_BPTK.reshape(x_BTK.shape[0], devices * size, -1), TENSOR)

    @property
    def of_chosen(self) -> "RegionBoundary":
        """That of what follows `at_places`, which is not sharded along the sequence, although the weights between the
        regions count as varying over `tensor` with sequence parallelism."""
        return replace(self, sequence_parallel=False, chosen=True) if self.sequence_parallel else self

    def of_first_token(self, values: Any) -> Any:
        """Numbers that each device computed of the first token it has, as they are of the sequence's first token."""
        if not self.sequence_parallel:
            return values
        here = axis_index(TENSOR) == 0
        return g(jax.tree.map(lambda x: jnp.where(here, x, jnp.zeros((), x.dtype)), values), TENSOR)


def _rows_at(x_BTD: Array, places_BM: Array) -> Array:
    return jnp.take_along_axis(x_BTD, places_BM[..., None], axis=1, mode="clip")


F_AND_G = RegionBoundary()  # the paper's

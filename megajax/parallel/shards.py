"""ZeRO: state sharded over the axes that divide a batch (Rajbhandari et al., arXiv 1910.02054).

A weight's shard is its part along one of its own dims (`mesh.zero_spec`), so that its logical shape, and with it
every checkpoint, stays what it is. Weights without a dim that these axes divide are not sharded; experts are sharded
over those that do not divide them already.

- ZeRO-1: gradients leave the loop of microbatches as local sums and are reduce-scattered to the owner of each shard,
  once a step, leaf by leaf; the owner updates; the weights are all-gathered for the next step.
- ZeRO-3: the weights that layers compute with are kept in shards too, gathered just before use, forward and backward,
  and their gradients are scattered at once. No gathered weight outlives its layer, if layers are scanned or in a pipe.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from megajax.parallel.collectives import (
    axis_index,
    axis_size,
    gather_shards,
    own_shard,
    scatter_sum,
    sum_over,
    zeros_like_type,
)
from megajax.parallel.sites import checked
from megajax.precision import at_least_fp32

Tree = Any


@dataclass(frozen=True)
class Sharding:
    """How a weight is sharded: by default not at all."""

    dim: int = 0  # counted from the last, negative, so that it holds with and without the dims of stacked layers
    axes: tuple[str, ...] = ()
    type_only: bool = False  # of the gathered weight only the type is needed; zeros stand in its place


NOT_SHARDED = Sharding()


@dataclass(frozen=True)
class Shards:
    """How every weight is sharded, in a tree of the weights' structure."""

    shardings: Tree

    def __getitem__(self, name: str) -> "Shards":
        """Those of a part of the weights."""
        return Shards(self.shardings[name])

    def take(self, weights: Tree) -> Tree:
        """This device's shards of gathered weights."""
        return self._map(own_shard, weights)

    def gather(self, shards: Tree, *, invariant: bool = False) -> Tree:
        """All of the weights. They count as varying over these axes, so that their gradients are local sums, or,
        `invariant`, as the same on all of their devices."""

        def gather(shard: Array, dim: int, axes: tuple[str, ...]) -> Array:
            return gather_shards(shard, dim, axes, invariant=invariant)

        gathered, names = self._gathered(gather, shards), self._names("all-gather over {} of")
        return checked(gathered, lambda: self._gathered(_gathered_by_sum, shards), names)

    def _gathered(self, function: Callable[[Array, int, tuple[str, ...]], Array], shards: Tree) -> Tree:
        def apply(shard: Array, sharding: Sharding) -> Array:
            if sharding == NOT_SHARDED:
                return shard
            if sharding.type_only:
                return zeros_like_type(jax.eval_shape(lambda: function(shard, sharding.dim, sharding.axes)))
            return function(shard, sharding.dim, sharding.axes)

        return jax.tree.map(apply, shards, self.shardings)

    def scatter(self, grads: Tree, dtype: DTypeLike) -> Tree:
        """Local sums of the gradients to the global sums of this device's shards, summed in `dtype`."""
        grads = jax.tree.map(lambda grad: grad.astype(dtype), grads)
        scattered, names = self._map(scatter_sum, grads), self._names("reduce-scatter over {} of the gradient of")
        return checked(scattered, lambda: self._map(_scattered_by_gather, grads), names)

    def _map(self, function: Callable[[Array, int, tuple[str, ...]], Array], tree: Tree) -> Tree:
        def apply(x: Array, sharding: Sharding) -> Array:
            return x if sharding == NOT_SHARDED else function(x, sharding.dim, sharding.axes)

        return jax.tree.map(apply, tree, self.shardings)

    def _names(self, words: str) -> Tree:
        return jax.tree.map(lambda sharding: words.format(" and ".join(sharding.axes)), self.shardings)


def _scattered_by_gather(x: Array, dim: int, axes: tuple[str, ...]) -> Array:
    """`scatter_sum` in another way, to check it."""
    total = gather_shards(x[None], 0, axes).sum(0)
    parts = jnp.split(total, axis_size(axes), dim)
    return jnp.stack(parts)[axis_index(axes)]


def _gathered_by_sum(shard: Array, dim: int, axes: tuple[str, ...]) -> Array:
    """`gather_shards` in another way, to check it."""
    wide = shard.astype(at_least_fp32(shard.dtype))  # not all sums of 8 bits are supported
    mine = [jnp.where(axis_index(axes) == i, wide, 0) for i in range(axis_size(axes))]
    return sum_over(jnp.concatenate(mine, dim), axes).astype(shard.dtype)

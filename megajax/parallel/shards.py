"""ZeRO: state sharded over the axes that divide a batch (Rajbhandari et al., arXiv 1910.02054).

A weight's shard is its part along one of its own dims (`mesh.zero_spec`), so that its logical shape, and with it
every checkpoint, stays what it is. Weights without a dim that these axes divide are not sharded.

- ZeRO-1: gradients leave the loop of microbatches as local sums and are reduce-scattered to the owner of each shard,
  once a step, leaf by leaf; the owner updates; the weights are all-gathered for the next step.
- ZeRO-3: the weights that layers compute with are kept in shards too, gathered just before use, forward and backward,
  and their gradients are scattered at once. No gathered weight outlives its layer, if layers are scanned or in a pipe.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from megajax.axes import BATCH_AXES
from megajax.parallel.collectives import axis_index, axis_size, gather_shards, own_shard, scatter_sum, sum_over
from megajax.parallel.sites import checked

Tree = Any
NOT_SHARDED = 0  # in place of a dim
_AXES = " and ".join(BATCH_AXES)


@dataclass(frozen=True)
class Shards:
    """Which dim of every weight is sharded over the axes that divide a batch, in a tree of the weights' structure:
    negative, so that it holds with and without the dims of stacked layers. `NOT_SHARDED` where there is none."""

    dims: Tree

    def __getitem__(self, name: str) -> "Shards":
        """Those of a part of the weights."""
        return Shards(self.dims[name])

    def take(self, weights: Tree) -> Tree:
        """This device's shards of gathered weights."""
        return self._map(own_shard, weights)

    def gather(self, shards: Tree, *, invariant: bool = False) -> Tree:
        """All of the weights. They count as varying over these axes, so that their gradients are local sums, or,
        `invariant`, as the same on all of their devices."""
        gathered = self._map(lambda shard, dim: gather_shards(shard, dim, invariant=invariant), shards)
        names = jax.tree.map(lambda _: f"all-gather over {_AXES} of", shards)
        return checked(gathered, lambda: self._map(_gathered_by_sum, shards), names)

    def scatter(self, grads: Tree, dtype: DTypeLike) -> Tree:
        """Local sums of the gradients to the global sums of this device's shards, summed in `dtype`."""
        grads = jax.tree.map(lambda grad: grad.astype(dtype), grads)
        names = jax.tree.map(lambda _: f"reduce-scatter over {_AXES} of the gradient of", grads)
        return checked(self._map(scatter_sum, grads), lambda: self._map(_scattered_by_gather, grads), names)

    def _map(self, function, tree: Tree) -> Tree:
        return jax.tree.map(lambda x, dim: x if dim == NOT_SHARDED else function(x, dim), tree, self.dims)


def _scattered_by_gather(x: Array, dim: int) -> Array:
    """`scatter_sum` in another way, to check it."""
    total = gather_shards(x[None], 0).sum(0)
    parts = jnp.split(total, axis_size(BATCH_AXES), dim)
    return jnp.stack(parts)[axis_index(BATCH_AXES)]


def _gathered_by_sum(shard: Array, dim: int) -> Array:
    """`gather_shards` in another way, to check it."""
    mine = [jnp.where(axis_index(BATCH_AXES) == i, shard, 0) for i in range(axis_size(BATCH_AXES))]
    return sum_over(jnp.concatenate(mine, dim), BATCH_AXES)

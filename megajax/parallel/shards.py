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
from jax.typing import DTypeLike

from megajax.parallel.collectives import gather_shards, own_shard, scatter_sum

Tree = Any
NOT_SHARDED = 0  # in place of a dim


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
        return self._map(lambda shard, dim: gather_shards(shard, dim, invariant=invariant), shards)

    def scatter(self, grads: Tree, dtype: DTypeLike) -> Tree:
        """Local sums of the gradients to the global sums of this device's shards, summed in `dtype`."""
        return self._map(scatter_sum, jax.tree.map(lambda grad: grad.astype(dtype), grads))

    def _map(self, function, tree: Tree) -> Tree:
        return jax.tree.map(lambda x, dim: x if dim == NOT_SHARDED else function(x, dim), tree, self.dims)

"""ZeRO: state sharded over the axes that divide a batch (Rajbhandari et al., arXiv 1910.02054).

A weight is sharded along one of its own dims, or two neighbours joined to one (`mesh.zero_sharding`). If its size is
not divisible, that dim ends with zeros wherever it is sharded: as stored, and in a reduced gradient. They have no
effect: they add nothing to a norm, the optimizer leaves them zero, and a gathered weight and the canonical form do not
have them. Experts are sharded over those of the axes that do not divide them already. With `--optimizer.zero-ranks`,
the devices of the axis `replica` have equal shards; once a step, reduced gradients are summed over it
(`train_step._completed`).

- ZeRO-1: gradients are summed locally over microbatches. Once a step they are reduce-scattered to the owner of each
  shard, after the loop or layer by layer in its last backward pass (`--optimizer.overlap-reductions`). The owner
  updates it, and the weights are all-gathered, at its end or layer by layer in the next one's first forward pass
  (`--optimizer.overlap-gathers`).
- ZeRO-3: compute weights are stored sharded too. A layer's weights are gathered just before use, forward and backward,
  and its gradients are scattered at once. If layers are scanned or pipelined, no gathered weight outlives its layer.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax import Array, lax

from megajax.core.parallel.collectives import (
    axis_index,
    axis_size,
    gather_shards,
    own_shard,
    scatter_sum,
    sum_over,
    zeros_like_type,
)
from megajax.core.parallel.sites import checked
from megajax.core.precision import at_least_fp32
from megajax.core.trees import Path, Tree


@dataclass(frozen=True)
class Sharding:
    """How a weight is sharded; not at all by default."""

    dim: int = 0  # negative, counted from the last dim, so that it holds with and without dims of stacked layers
    axes: tuple[str, ...] = ()
    padding: int = 0  # zeros at the end of the dim, which no other axes shard then
    joined: tuple[int, ...] = ()  # sizes of two dims that this one is; they are two again in a gathered weight
    type_only: bool = False  # only the gathered weight's type is needed, so zeros take its place

    def along(self, dims: Sequence[int], ndim: int) -> "Sharding":
        """The sharding of an array that has, in this order, these dims of the sharded one with `ndim` dims."""
        place = self.dim + ndim
        sharded = self.axes and place in dims
        return Sharding(dims.index(place) - len(dims), self.axes, self.padding) if sharded else NOT_SHARDED

    @property
    def if_even(self) -> "Sharding":
        """The sharding of canonical arrays, which are never padded."""
        return NOT_SHARDED if self.padding or self.joined else self

    def padded(self, x: Any) -> Any:
        """An array of the whole size with this sharding's zeros."""
        x = x.reshape(self._reshaped(x.shape, (math.prod(self.joined),))) if self.joined else x
        widths = [(0, self.padding * (dim - x.ndim == self.dim)) for dim in range(x.ndim)]
        return jnp.pad(x, widths) if self.padding else x

    def without_padding(self, x: Array) -> Array:
        """The inverse of `padded`."""
        x = lax.slice_in_dim(x, 0, x.shape[self.dim] - self.padding, axis=self.dim) if self.padding else x
        return x.reshape(self._reshaped(x.shape, self.joined)) if self.joined else x

    def padded_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of `padded` arrays."""
        shape = self._reshaped(shape, (math.prod(self.joined),)) if self.joined else shape
        return tuple(size + self.padding * (dim - len(shape) == self.dim) for dim, size in enumerate(shape))

    def _reshaped(self, shape: Sequence[int], sizes: tuple[int, ...]) -> tuple[int, ...]:
        """A shape with these sizes in place of the joined dims, or of the one that they are."""
        place = self.dim + len(shape)
        return (*shape[: place + len(sizes) - len(self.joined)], *sizes, *shape[place + 1 :])


NOT_SHARDED = Sharding()


@dataclass(frozen=True)
class Shards:
    """How every weight is sharded, as a tree with the structure of the weights."""

    shardings: Tree

    def __getitem__(self, name: str) -> "Shards":
        """The shardings of one subtree of the weights."""
        return Shards(self.shardings[name])

    def take(self, weights: Tree) -> Tree:
        """This device's shards of full weights."""
        return self._map(own_shard, weights)

    def gather(self, shards: Tree, *, invariant: bool = False) -> Tree:
        """The full weights. They are typed as varying over the sharding axes, so that their gradients are local sums,
        or, if `invariant`, as identical on all devices."""

        def gather(shard: Array, dim: int, axes: tuple[str, ...]) -> Array:
            return gather_shards(shard, dim, axes, invariant=invariant)

        gathered, names = self._gathered(gather, shards), self._names("all-gather over {} of")
        return checked(gathered, lambda: self._gathered(_gathered_by_sum, shards), names)

    def _gathered(self, function: Callable[[Array, int, tuple[str, ...]], Array], shards: Tree) -> Tree:
        def apply(shard: Array, sharding: Sharding) -> Array:
            if sharding == NOT_SHARDED:
                return shard

            def whole() -> Array:
                return sharding.without_padding(function(shard, sharding.dim, sharding.axes))

            return zeros_like_type(jax.eval_shape(whole)) if sharding.type_only else whole()

        return jax.tree.map(apply, shards, self.shardings)

    def some(self, paths: Iterable[Path], first: str) -> "Shards":
        """Those of some weights and of other arrays, which are not sharded, by path; the paths begin with `first`."""
        flat = {(first, *path): sharding for path, sharding in flatten_dict(self.shardings).items()}
        return Shards({path: flat.get(path, NOT_SHARDED) for path in paths})

    def scatter(self, grads: Tree) -> Tree:
        """Reduce local gradient sums to this device's shards of the global sums."""
        scattered, names = self._map(scatter_sum, grads), self._names("reduce-scatter over {} of the gradient of")
        return checked(scattered, lambda: self._map(_scattered_by_gather, grads), names)

    def _map(self, function: Callable[[Array, int, tuple[str, ...]], Array], tree: Tree) -> Tree:
        def apply(x: Array, sharding: Sharding) -> Array:
            return x if sharding == NOT_SHARDED else function(sharding.padded(x), sharding.dim, sharding.axes)

        return jax.tree.map(apply, tree, self.shardings)

    def _names(self, words: str) -> Tree:
        return jax.tree.map(lambda sharding: words.format(" and ".join(sharding.axes)), self.shardings)


def _scattered_by_gather(x: Array, dim: int, axes: tuple[str, ...]) -> Array:
    """The result of `scatter_sum`, computed differently to check it."""
    total = gather_shards(x[None], 0, axes).sum(0)
    parts = jnp.split(total, axis_size(axes), dim)
    return jnp.stack(parts)[axis_index(axes)]


def _gathered_by_sum(shard: Array, dim: int, axes: tuple[str, ...]) -> Array:
    """The result of `gather_shards`, computed differently to check it."""
    wide = shard.astype(at_least_fp32(shard.dtype))  # not every float8 sum is supported
    mine = [jnp.where(axis_index(axes) == i, wide, 0) for i in range(axis_size(axes))]
    return sum_over(jnp.concatenate(mine, dim), axes).astype(shard.dtype)

"""LoRA in a step, inside the `shard_map` region: layers compute with merged weights, so that the pipeline is that of
any training, and what it finds of their gradients is pulled back to the adapters at the step's end.

The adapters have the dims of their products: of one by columns A is whole on every device of a tensor group and B is
sharded, of one by rows the other way round. So each device merges and pulls back its own shards, and only the gradients
of what is whole, and those of all rows of the batch, are summed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array
from jax.typing import DTypeLike

from megajax.models.lora import LORA, Adapters
from megajax.parallel.collectives import complete, own_shard, vary, varying_axes
from megajax.parallel.shards import NOT_SHARDED, Shards

Tree = Any


@dataclass(frozen=True)
class PlacedAdapters:
    """The adapters of a model on a mesh.

    Attributes:
        adapters: whatever the mesh.
        shards: which of their dims ZeRO shards.
        per_step, per_use: the weights' (`StateLayout`).
        specs: where the adapters lie, pipelined.
    """

    adapters: Adapters
    shards: Shards
    per_step: Shards
    per_use: Shards
    specs: Tree

    def put(self, params: Tree, main: Tree, dtype: DTypeLike) -> Tree:
        """`params` with new weights of the products that have adapters: main weights and what the adapters add."""
        whole, merge = self.shards.gather(main[LORA], invariant=True), self.adapters.merged
        per_step = Shards(self.adapters.part(self.per_step.dims))
        merged = merge(self.adapters.part(main), self._for_shards(whole, self.per_step, self.per_use))
        computed = jax.tree.map(lambda weight: weight.astype(dtype), merged)
        return self.adapters.put(params, per_step.gather(computed, invariant=True))

    def gradients(self, grads: Tree, adapters: Tree, dtype: DTypeLike) -> Tree:
        """The adapters' gradients where they lie, of the weights' gradients as the pipeline leaves them: local sums, of
        weights that are gathered for every use of their shards."""

        def pull_back(grad: Array, adapter: Mapping[str, Array], inner: int, dim: int) -> Mapping[str, Array]:
            def added(adapter: Mapping[str, Array]) -> Array:
                return self.adapters.added(self._for_shard(adapter, inner, dim), inner)

            # Declared varying, they get local sums, too.
            (pulled,) = jax.vjp(added, vary(adapter, sorted(varying_axes(grad))))[1](grad.astype(dtype))
            return pulled

        part, dims = self.adapters.part(grads), self.adapters.part(self.per_use.dims)
        sums = jax.tree.map(pull_back, part, self.shards.gather(adapters), self.adapters.num_inner, dims)
        return complete(self.shards.scatter(sums, dtype), self.specs)

    def _for_shards(self, adapters: Tree, *sharded: Shards) -> Tree:
        """The parts of whole adapters that belong to a device's shards of the weights."""
        for shards in sharded:
            dims = self.adapters.part(shards.dims)
            adapters = jax.tree.map(
                lambda inner, dim, adapter: self._for_shard(adapter, inner, dim),
                self.adapters.num_inner,
                dims,
                adapters,
            )
        return adapters

    def _for_shard(self, adapter: Mapping[str, Array], inner: int, dim: int) -> Mapping[str, Array]:
        return adapter if dim == NOT_SHARDED else self.adapters.of_shard(adapter, inner, dim, own_shard)

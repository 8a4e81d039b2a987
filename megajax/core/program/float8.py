"""Float8 copies of the layers' weights, handed to the layers beside the weights: made once per step, before its loop;
those of frozen weights once, before the first step."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from megajax.core.models.config import ModelConfig
from megajax.core.parallel.collectives import vary_as
from megajax.core.parallel.float8 import FLOAT8, Copies, copies_of
from megajax.core.parallel.shards import NOT_SHARDED
from megajax.core.program.weight import Weight
from megajax.core.trees import Path, Tree


class LayerCopies:
    """Float8 copies of a layer's weights, each under the key `FLOAT8` beside its weight.

    Args:
        weights: the records of the layers' weights.
        dtype: of the copies; None: there are none.
        both: whether input gradients are computed too.
    """

    def __init__(self, config: ModelConfig, weights: Tree, dtype: DTypeLike | None, *, both: bool):
        self._dtype: Any = dtype
        self._both = both
        records: dict[Path, Weight] = {} if dtype is None else flatten_dict(weights)
        self._weights = {path: weight for path, weight in records.items() if weight.of_product}
        first, last = config.high_precision_ends
        self._first, self._end = first, config.num_blocks - last
        self._all = (first, last) == (0, 0)  # products of all layers are in 8 bits

    def added(self, weights: Tree, layer_index: Array, made: Tree = None) -> Tree:
        """Stacked layers' weights, [slots, …], inside the region, with their copies: those `made` before, or new ones.
        `layer_index` says which layer is in each slot."""
        flat, made, wide = flatten_dict(weights), flatten_dict(made or {}), None
        if not self._all:
            wide = ((layer_index < self._first) | (layer_index >= self._end)).astype(jnp.float32)
        for path, weight in self._weights.items():
            place, axes = (*path[:-1], FLOAT8), weight.axes_of_sides
            copies = made.get(place) or self._copies(weight, flat[path], axes)
            flat[place] = vary_as(copies, flat[path])._replace(wide=wide)
        return unflatten_dict(flat)

    def shardings(self, shardings: Tree) -> Tree:
        """The shardings of weights and of their copies. Of a weight that has copies, only the type is needed."""
        flat, wide = flatten_dict(shardings), None if self._all else NOT_SHARDED
        for path, weight in self._weights.items():
            along = partial(weight.computed.along, ndim=len(weight.shape))
            flat[*path[:-1], FLOAT8] = weight.copies(along, both=self._both, wide=wide)
            if self._all and flat[path] != NOT_SHARDED:
                flat[path] = replace(flat[path], type_only=True)
        return unflatten_dict(flat)

    @property
    def paths(self) -> frozenset[Path]:
        """Paths of the copies, which have no gradient."""
        return frozenset((*path[:-1], FLOAT8) for path in self._weights)

    def copied(self, weights: Tree) -> dict[Path, Copies]:
        """The copies of unsharded weights, outside any region, of one layer or with dims of several before its own."""
        flat = flatten_dict(weights)
        return {
            (*path[:-1], FLOAT8): self._copies(weight, flat[path], ((), ())) for path, weight in self._weights.items()
        }

    def copied_specs(self, *before: Any) -> dict[Path, Copies]:
        """Their specs, with entries for the dims `before` those of one layer."""

        def specs(weight: Weight) -> Copies:
            spec = weight.layer_spec(weight.computed)
            return weight.copies(lambda dims: PartitionSpec(*before, *(spec[dim] for dim in dims)), both=self._both)

        return {(*path[:-1], FLOAT8): specs(weight) for path, weight in self._weights.items()}

    def with_copies(self, weights: Tree, layer: int) -> Tree:
        """The unsharded weights of one layer, outside any region, with their copies."""
        return self._with(weights, self.copied(weights), layer)

    def layer_specs(self, specs: Tree, layer: int) -> Tree:
        """Their specs, given those of the weights."""
        return self._with(specs, self.copied_specs(), layer)

    def _copies(self, weight: Weight, x: Array, over: tuple[tuple[str, ...], tuple[str, ...]]) -> Copies:
        inner, outer = weight.sides
        return copies_of(x, x.ndim - inner - outer, inner, self._dtype, over, both=self._both)

    def _with(self, tree: Tree, copies: dict[Path, Copies], layer: int) -> Tree:
        return unflatten_dict(flatten_dict(tree) | (copies if self._first <= layer < self._end else {}))

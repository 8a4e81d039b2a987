"""Float8 copies of the layers' weights, handed to the layers beside the weights: made once per step, before its loop;
those of frozen weights once, before the first step."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from megajax.core.models.config import ModelConfig
from megajax.core.models.staged import Path, StagedModel
from megajax.core.parallel.collectives import spec_axes, vary, varying_axes
from megajax.core.parallel.float8 import FLOAT8, Copies, Scaled, copies_of, shardings_of
from megajax.core.parallel.shards import NOT_SHARDED

Tree = Any


class LayerCopies:
    """Float8 copies of a layer's weights, each under the key `FLOAT8` beside its weight.

    Args:
        dtype: of the copies; None: there are none.
        both: whether input gradients are computed too.
    """

    def __init__(self, config: ModelConfig, model: StagedModel, dtype: DTypeLike | None, *, both: bool):
        self._dtype: Any = dtype
        self._both = both
        self._dims = {} if dtype is None else model.inner_dims()
        first, last = config.high_precision_ends
        self._first, self._end = first, config.num_blocks - last
        self._all = (first, last) == (0, 0)  # products of all layers are in 8 bits

    def added(self, weights: Tree, specs: Mapping[Path, PartitionSpec], layer_index: Array, made: Tree = None) -> Tree:
        """Stacked layers' weights, [slots, …], inside the region, with their copies: those `made` before, or new ones.
        `specs` are those of pipelined weights; `layer_index` says which layer is in each slot."""
        flat, made, wide = flatten_dict(weights), flatten_dict(made or {}), None
        if not self._all:
            wide = ((layer_index < self._first) | (layer_index >= self._end)).astype(jnp.float32)
        for path, (stacked, inner) in self._dims.items():
            entries, place = [*specs[path]][3 + stacked :], (*path[:-1], FLOAT8)
            over = tuple(tuple(sorted(spec_axes(PartitionSpec(*side)))) for side in (entries[:inner], entries[inner:]))
            copies = made.get(place) or copies_of(
                flat[path], 1 + stacked, inner, self._dtype, (over[0], over[1]), both=self._both
            )
            flat[place] = vary(copies, sorted(varying_axes(flat[path])))._replace(wide=wide)
        return unflatten_dict(flat)

    def shardings(self, shardings: Tree, specs: Mapping[Path, PartitionSpec]) -> Tree:
        """The shardings of weights and of their copies. Of a weight that has copies, only the type is needed."""
        flat = flatten_dict(shardings)
        for path, (stacked, inner) in self._dims.items():
            outer = len(specs[path]) - 3 - stacked - inner
            flat[*path[:-1], FLOAT8] = shardings_of(flat[path], inner, outer, both=self._both, wide=not self._all)
            if self._all and flat[path] != NOT_SHARDED:
                flat[path] = replace(flat[path], type_only=True)
        return unflatten_dict(flat)

    @property
    def paths(self) -> frozenset[Path]:
        """Paths of the copies, which have no gradient."""
        return frozenset((*path[:-1], FLOAT8) for path in self._dims)

    def of_whole(self, weights: Tree, before: int = 0) -> dict[Path, Copies]:
        """The copies of unsharded weights, outside any region, with `before` dims before those of one layer."""
        flat = flatten_dict(weights)
        return {
            (*path[:-1], FLOAT8): copies_of(flat[path], before + stacked, inner, self._dtype, ((), ()), both=self._both)
            for path, (stacked, inner) in self._dims.items()
        }

    def specs_of_whole(self, specs: Tree, before: int = 0) -> dict[Path, Copies]:
        """Their specs, given those of the weights."""
        flat, found = flatten_dict(specs), {}
        for path, (stacked, inner) in self._dims.items():
            spec, place = [*flat[path]], before + stacked
            first, rows, columns = spec[:place], spec[place : place + inner], spec[place + inner :]
            forward: Any = PartitionSpec(*first, *columns, *rows), PartitionSpec(*first, *columns)
            backward: Any = PartitionSpec(*spec), PartitionSpec(*first, *rows)  # specs where arrays stand
            found[*path[:-1], FLOAT8] = Copies(Scaled(*forward), Scaled(*backward) if self._both else None, None)
        return found

    def of_one(self, weights: Tree, layer: int) -> Tree:
        """The unsharded weights of one layer, outside any region, with their copies."""
        return self._with(weights, self.of_whole(weights), layer)

    def specs_of_one(self, specs: Tree, layer: int) -> Tree:
        """Their specs, given those of the weights."""
        return self._with(specs, self.specs_of_whole(specs), layer)

    def _with(self, tree: Tree, copies: dict[Path, Copies], layer: int) -> Tree:
        return unflatten_dict(flatten_dict(tree) | (copies if self._first <= layer < self._end else {}))

"""The update of the trained weights by the optimizer. Inside the region: arrays are this device's shards.

AdamW and Muon know how weights are sharded. A user's (`optim/by_layer.py`) gets weights as `Model.weights` returns
them, layers stacked [L, …]. If it updates every number by itself, it gets ZeRO's shards of them, in the same dims;
otherwise every device gathers gradients and weights, computes the whole update, and takes its shards of it.
"""

from functools import partial
from typing import Any

import jax
from jax import Array

from megajax.core.optim.adam import update
from megajax.core.parallel.collectives import PIPE, entry_axes, gather_shards, own_shard, vary
from megajax.core.parallel.shards import Shards
from megajax.core.program.state import StateLayout
from megajax.core.program.weight import Weight
from megajax.core.trees import Tree


def updated(layout: StateLayout, grads: Tree, state: Tree, main: Tree, taken: Array) -> tuple[Tree, Tree]:
    """New main weights and optimizer state; bit for bit the old ones if the step is not `taken`."""
    if layout.own is None:
        return update(layout.optimizer, grads, state, main, taken)
    if not layout.mixing:
        flat, flat_state, flat_main = _without_stages(layout, (grads, state, main))
        new = update(layout.optimizer, flat, flat_state, flat_main, taken)
        return jax.tree.map(lambda new, old: new.reshape(old.shape), new, (main, state))
    records = layout.trained(layout.weights)
    whole = partial(jax.tree.map, _whole, records)
    weights = whole(main)
    new, state = update(layout.optimizer, whole(grads), state, weights, taken)
    return jax.tree.map(_owned, records, new), state


def _without_stages(layout: StateLayout, trees: Tree) -> Tree:
    """Layers [chunks, 1, n, …] as [L, …]."""

    def flat(path: Any, x: Array) -> Array:
        return x.reshape(-1, *x.shape[3:]) if layout.is_stacked(path) else x

    return jax.tree_util.tree_map_with_path(flat, trees)


def _whole(weight: Weight, x: Array) -> Array:
    """A weight or gradient in canonical form, on every device."""
    x = Shards(weight.owned).gather(vary(x, weight.owned.axes), invariant=True)
    for dim, axes in _split_dims(weight):
        x = gather_shards(vary(x, axes), dim, axes, invariant=True)
    return weight.stack.to_canonical(x) if weight.stack else x


def _owned(weight: Weight, x: Array) -> Array:
    """The inverse of `_whole`."""
    x = weight.stack.to_stages(x) if weight.stack else x
    for dim, axes in reversed(_split_dims(weight)):
        x = own_shard(x, dim, axes)
    return Shards(weight.owned).take(x)


def _split_dims(weight: Weight) -> list[tuple[int, tuple[str, ...]]]:
    """The dims, counted from the last, that mesh axes shard beside ZeRO's, with these axes."""
    entries = [entry_axes(entry) for entry in weight.spec]
    split = [(dim - len(entries), axes) for dim, axes in enumerate(entries) if axes]
    return [*split, (1, (PIPE,))] if weight.stack else split

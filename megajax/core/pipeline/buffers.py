"""What a stage keeps from tick to tick: trees of arrays with slots; and branches on what its row says."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.core.parallel.collectives import at_place, zeros_like_type
from megajax.core.trees import Tree


def idle(types: Tree, *leading: int) -> Tree:
    """Zeros for values that were not computed. Nothing uses those of an idle tick: NaN in their place changes nothing
    (tested)."""
    return jax.tree.map(lambda type_: zeros_like_type(type_, leading), types)


def taken(buffer: Tree, slot: Array | int) -> Tree:
    """What is in a slot."""
    return jax.tree.map(lambda slots: at_place(slots, slot), buffer)


def stored(buffer: Tree, slot: Any, tree: Tree) -> Tree:
    """The buffer with `tree` in a slot, which may have several indices."""
    index = slot if isinstance(slot, tuple) else (slot,)

    def put(slots: Array, new: Array) -> Array:
        at = [jnp.asarray(place, jnp.int32) for place in (*index, *[0] * new.ndim)]  # also where ints have 64 bits
        return lax.dynamic_update_slice(slots, new[(None,) * len(index)], at, allow_negative_indices=False)

    return jax.tree.map(put, buffer, tree)


def unchanged(*operands: Tree) -> Tree:
    """The last operand."""
    return operands[-1]


def when(predicate: Array | bool, then: Callable, *operands: Tree, otherwise: Callable = unchanged) -> Tree:
    """`then(*operands)` where the predicate is true: `lax.cond`, decided while tracing if it is known. Of the operands
    only arrays become unknown."""
    if isinstance(predicate, bool):
        return (then if predicate else otherwise)(*operands)
    leaves, structure = jax.tree.flatten(operands)
    indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Array)]

    def branch(function: Callable, *arrays: Array) -> Tree:
        known = dict(zip(indices, arrays, strict=True))
        return function(*jax.tree.unflatten(structure, [known.get(*pair) for pair in enumerate(leaves)]))

    branches = (partial(branch, function) for function in (then, otherwise))
    return lax.cond(predicate, *branches, *(leaves[index] for index in indices))

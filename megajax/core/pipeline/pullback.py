"""A layer's forward and backward: `jax.vjp` split into arrays to save and a structure that depends on no values."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from megajax.core.pipeline.model import Factors, Figures
from megajax.core.trees import Path, Tree

LayerFunction = Callable[[Tree, Factors, Array, Array, Tree], tuple[Array, Figures]]  # as `LoopModel.layer`


@jax.tree_util.register_static
@dataclass(frozen=True)
class Pullback:
    """How to rebuild a layer's pullback from arrays; nothing in it depends on values."""

    structure: jax.tree_util.PyTreeDef  # of the pullback as a pytree
    places: tuple[int, ...]  # for each leaf, its index in [*weights, *dummies, *residuals]

    def restore(self, known: Tree, residuals: list[Array]) -> Callable:
        """The pullback itself."""
        known = [*jax.tree.leaves(known), *residuals]
        return jax.tree.unflatten(self.structure, [known[place] for place in self.places])


def with_pullback(
    function: LayerFunction,
    excluded: frozenset[Path],
    weights: Tree,
    dummies: Factors,
    index: Array,
    x: Array,
    context: Tree,
) -> tuple[tuple[Array, Figures], list[Array], Pullback]:
    """A layer's output with its figures, its residuals (each saved once, however often the backward pass uses it), and
    its pullback.

    The pullback returns the gradients by path of all weights except those `excluded`, which are frozen or deferred; the
    factors of the deferred ones; and the gradient of `x`.
    """
    flat = flatten_dict(weights)
    at_once = {path: weight for path, weight in flat.items() if path not in excluded}

    def layer(at_once: dict[Path, Array], dummies: Factors, x: Array) -> tuple[Array, Figures]:
        return function(unflatten_dict(flat | at_once), dummies, index, x, context)

    y, pullback, figures = jax.vjp(layer, at_once, dummies, x, has_aux=True)
    leaves, structure = jax.tree.flatten(pullback)
    known = jax.tree.leaves((weights, dummies))
    num_known, indices = len(known), {id(leaf): position for position, leaf in enumerate(known)}
    for leaf in leaves:
        if indices.setdefault(id(leaf), len(known)) == len(known):
            known.append(leaf)
    return (y, figures), known[num_known:], Pullback(structure, tuple(indices[id(leaf)] for leaf in leaves))

"""What a stage does with a microbatch: run its layers forward keeping what the backward needs, and run them backward.

A layer's forward is `jax.vjp`; the function it returns is a pytree whose leaves are either the layer's own weights,
recognised by identity and not kept, or activations, which are. The backward puts the weights back. So a
`jax.checkpoint` around the layer decides what is kept, nothing weight-sized ever is, and no layer is run an extra time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.parallel.collectives import zeros_like_type

Tree = Any
LayerFunction = Callable[[Tree, Array, Array, Tree], Array]  # (weights, layer index, x_BTD, context) -> x_BTD


def when(predicate: Array | bool, then: Callable, otherwise: Callable, *operands):
    """`lax.cond` that is decided while tracing where the predicate is known."""
    if isinstance(predicate, bool):
        return (then if predicate else otherwise)(*operands)
    return lax.cond(predicate, then, otherwise, *operands)


@dataclass
class Layers:
    """The layers of one stage as a pair of functions, forward and backward.

    Attributes:
        function: one layer.
        unroll: unroll the loop over layers in the compiled program.
        padded: some slot may hold no layer (index -1); it then passes its input on.
    """

    function: LayerFunction
    unroll: bool
    padded: bool
    _structure: Any = field(default=None, init=False)
    _weight_of_leaf: list[int | None] = field(default_factory=list, init=False)

    def _save(self, weights: Tree, index: Array, x: Array, context: Tree) -> tuple[Array, list[Array]]:
        y, pullback = jax.vjp(lambda weights, x: self.function(weights, index, x, context), weights, x)
        leaves, self._structure = jax.tree.flatten(pullback)
        own = [id(leaf) for leaf in jax.tree.leaves(weights)]
        self._weight_of_leaf = [own.index(id(leaf)) if id(leaf) in own else None for leaf in leaves]
        return y, [leaf for leaf, weight in zip(leaves, self._weight_of_leaf, strict=True) if weight is None]

    def _restore(self, weights: Tree, saved: list[Array]) -> Callable:
        own, kept = jax.tree.leaves(weights), iter(saved)
        leaves = [next(kept) if weight is None else own[weight] for weight in self._weight_of_leaf]
        return jax.tree.unflatten(self._structure, leaves)

    def residual_types(self, weights: Tree, indices: Array, x: Array, context: Tree) -> list[jax.ShapeDtypeStruct]:
        """Types of what `forward` keeps; nothing is computed."""
        return jax.eval_shape(self.forward, weights, indices, x, context)[1]

    def forward(self, weights: Tree, indices: Array, x: Array, context: Tree) -> tuple[Array, list[Array]]:
        """Run the stacked layers `weights` [n, …] with global layer indices [n]. Returns the output and what to
        keep."""

        def layer(x: Array, slot: tuple[Tree, Array]):
            weights, index = slot
            if not self.padded:
                return self._save(weights, index, x, context)
            types = jax.eval_shape(self._save, weights, index, x, context)[1]
            return lax.cond(
                index >= 0,
                lambda x: self._save(weights, index, x, context),
                lambda x: (x, [zeros_like_type(kept) for kept in types]),
                x,
            )

        return lax.scan(layer, x, (weights, indices), unroll=self.unroll)

    def run(self, weights: Tree, indices: Array, x: Array, context: Tree) -> Array:
        """Run the layers forward and keep nothing."""

        def layer(x: Array, slot: tuple[Tree, Array]):
            weights, index = slot
            skip = index < 0 if self.padded else False
            return when(skip, lambda x: x, lambda x: self.function(weights, index, x, context), x), None

        return lax.scan(layer, x, (weights, indices), unroll=self.unroll)[0]

    def backward(
        self, weights: Tree, indices: Array, saved: list[Array], grad: Array, total: Tree
    ) -> tuple[Array, Tree]:
        """Pull `grad` back through the layers; their weights' gradients are added to `total` [n, …] in place."""

        def layer(carry: tuple[Array, Tree], slot: tuple[Array, Tree, Array, list[Array]]):
            (grad, total), (position, weights, index, saved) = carry, slot

            def pull(grad: Array, total: Tree) -> tuple[Array, Tree]:
                grad_weights, grad = self._restore(weights, saved)(grad)
                return grad, jax.tree.map(lambda t, g: t.at[position].add(g.astype(t.dtype)), total, grad_weights)

            skip = index < 0 if self.padded else False
            return when(skip, lambda *carry: carry, pull, grad, total), None

        positions = jnp.arange(indices.shape[0], dtype=jnp.int32)
        return lax.scan(layer, (grad, total), (positions, weights, indices, saved), reverse=True, unroll=self.unroll)[0]

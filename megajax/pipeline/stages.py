"""What a stage does with a microbatch: run the layers of a chunk forward, keeping residuals for the backward, and run
them backward.

A layer's forward is `jax.vjp`; the pullback it returns is a pytree whose leaves are either the layer's own weights,
recognised by identity and not kept, or activations: the residuals, which are. The backward puts the weights back. So a
`jax.checkpoint` around the layer decides what is kept, nothing weight-sized ever is, and no layer is run an extra time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from megajax.parallel.collectives import zeros_like_type
from megajax.parallel.shards import Shards

Tree = Any
LayerFunction = Callable[[Tree, Array, Array, Tree], Array]  # (weights, layer index, x_BTD, context) -> x_BTD


def when(predicate: Array | bool, then: Callable, otherwise: Callable, *operands):
    """`lax.cond` that is decided while tracing where the predicate is known."""
    if isinstance(predicate, bool):
        return (then if predicate else otherwise)(*operands)
    return lax.cond(predicate, then, otherwise, *operands)


def idle(type_: Any, leading: tuple[int, ...] = ()) -> Array:
    """What stands where nothing was computed. It is never used: NaN in place of zero changes nothing (tested)."""
    return zeros_like_type(type_, leading)


def rematerialized(
    function: LayerFunction, remat: str, save_expensive: Callable, *, prevent_cse: bool
) -> LayerFunction:
    """`function` with its backward pass recomputing what `remat` says.

    none: nothing but what the layer recomputes of itself. selective: all but what the policy `save_expensive` saves.
    layer: all.
    stage: the stage is recomputed as a whole (`Layers.forward`), and then nothing more.
    """
    if remat == "layer":
        return jax.checkpoint(function, prevent_cse=prevent_cse)
    if remat == "selective":
        return jax.checkpoint(function, prevent_cse=prevent_cse, policy=save_expensive)
    return function


@jax.tree_util.register_static
@dataclass(frozen=True)
class Pullback:
    """How a layer's pullback is put together; nothing of it depends on values.

    Attributes:
        structure: of the pullback as a pytree.
        places: for every leaf its place among the layer's weights followed by its residuals.
    """

    structure: jax.tree_util.PyTreeDef
    places: tuple[int, ...]

    def restore(self, weights: Tree, residuals: list[Array]) -> Callable:
        """The pullback itself."""
        known = [*jax.tree.leaves(weights), *residuals]
        return jax.tree.unflatten(self.structure, [known[place] for place in self.places])


@dataclass(frozen=True)
class Layers:
    """The layers of a stage as a pair of functions, forward and backward, of one chunk.

    Weights are stacked [v · n, …]: n slots a chunk, chunk after chunk. Chunks are numbers, or scalars of a table.

    Attributes:
        function: one layer.
        layer_index: global index of the layer in every slot, -1 in a padded one, which passes its input on; int32
            [v, n], this stage's.
        unroll: unroll the loop over layers in the compiled program.
        padded: some slot of some stage holds no layer.
        storage: how the weights of a layer are kept; they are gathered just for it, forward and again backward.
        recompute_stage: keep a stage's input only, and run its forward again in the backward pass.
    """

    function: LayerFunction
    layer_index: Array | np.ndarray
    unroll: bool
    padded: bool
    storage: Shards
    recompute_stage: bool = False

    @property
    def num_chunks(self) -> int:
        return self.layer_index.shape[0]

    def forward(self, weights: Tree, chunk: int | Array, x: Array, context: Tree) -> tuple[Array, list[Array]]:
        """Output of a chunk, and its residuals: what is kept until its `backward`."""
        if self.recompute_stage:
            return self.run(weights, chunk, x, context), [x]
        return self.forward_with_residuals(weights, chunk, x, context)

    def backward(
        self, weights: Tree, chunk: int | Array, residuals: list[Array], context: Tree, grad: Array, total: Tree
    ) -> tuple[Array, Tree]:
        """Pull `grad` back through a chunk; the gradients of its weights are added to `total` [v · n, …] in place."""
        if self.recompute_stage:
            residuals = self.forward_with_residuals(weights, chunk, residuals[0], context)[1]
        return self.pull_back(weights, chunk, residuals, context, grad, total)

    def residual_types(self, weights: Tree, x: Array, context: Tree) -> list[jax.ShapeDtypeStruct]:
        """Types of the residuals of `forward`; nothing is computed."""
        return jax.eval_shape(lambda *args: self.forward(args[0], 0, *args[1:]), weights, x, context)[1]

    def run(self, weights: Tree, chunk: int | Array, x: Array, context: Tree) -> Array:
        """Run a chunk forward and keep nothing."""

        def layer(x: Array, own: Tree, index: Array, _):
            skip = index < 0 if self.padded else False
            return when(
                skip, lambda x: x, lambda x: self.function(self.storage.gather(own), index, x, context), x
            ), None

        return self._scan(layer, x, weights, chunk)[0]

    def forward_with_residuals(
        self, weights: Tree, chunk: int | Array, x: Array, context: Tree
    ) -> tuple[Array, list[Array]]:
        """Run a chunk forward; returns its output and all that `pull_back` needs, stacked over its layers."""

        def layer(x: Array, own: Tree, index: Array, _):
            def run(x: Array) -> tuple[Array, list[Array]]:
                return self._vjp(self.storage.gather(own), index, x, context)[:2]

            if not self.padded:
                return run(x)
            types = jax.eval_shape(run, x)[1]
            return lax.cond(index >= 0, run, lambda x: (x, [idle(residual) for residual in types]), x)

        return self._scan(layer, x, weights, chunk)

    def pull_back(
        self, weights: Tree, chunk: int | Array, residuals: list[Array], context: Tree, grad: Array, total: Tree
    ) -> tuple[Array, Tree]:
        """`backward` from what `forward_with_residuals` returned."""

        def layer(carry: tuple[Array, Tree], own: Tree, index: Array, slot_and_residuals: tuple[Array, list[Array]]):
            (grad, total), (slot, residuals) = carry, slot_and_residuals
            grad_dtype = jax.tree.leaves(total)[0].dtype

            def pull(grad: Array) -> tuple[Tree, Array]:
                gathered = self.storage.gather(own)
                # The gradient is of the input's type.
                pullback = jax.eval_shape(lambda *args: self._vjp(*args)[2], gathered, index, grad, context)
                grads, grad = pullback.restore(gathered, residuals)(grad)
                return self.storage.scatter(grads, grad_dtype), grad

            def skip(grad: Array) -> tuple[Tree, Array]:
                return jax.tree.map(zeros_like_type, jax.eval_shape(pull, grad)[0]), grad

            # The sums stay outside: a conditional inside the loop would copy all of them for every layer.
            grad_weights, grad = when(index < 0 if self.padded else False, skip, pull, grad)
            return (grad, jax.tree.map(lambda t, g: t.at[slot].add(g), total, grad_weights)), None

        return self._scan(layer, (grad, total), weights, chunk, (self._slots(chunk), residuals), reverse=True)[0]

    def _slots(self, chunk: int | Array) -> Array:
        """Positions of a chunk's layers in the stack."""
        slots_per_chunk = self.layer_index.shape[1]
        return chunk * slots_per_chunk + jnp.arange(slots_per_chunk, dtype=jnp.int32)

    def _scan(
        self, layer: Callable, carry: Tree, weights: Tree, chunk: int | Array, xs: Tree = None, reverse: bool = False
    ) -> tuple[Tree, Tree]:
        """Scan `layer(carry, weights, layer index, x)` over a chunk."""
        stack = weights, jnp.asarray(self.layer_index).reshape(-1)
        if self.num_chunks == 1:

            def body(carry: Tree, slot: tuple[Tree, Tree]):
                return layer(carry, *slot[0], slot[1])

            return lax.scan(body, carry, (stack, xs), reverse=reverse, unroll=self.unroll)

        def body_of_chunk(carry: Tree, slot: tuple[Array, Tree]):
            own = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, slot[0], keepdims=False), stack)
            return layer(carry, *own, slot[1])

        return lax.scan(body_of_chunk, carry, (self._slots(chunk), xs), reverse=reverse, unroll=self.unroll)

    def _vjp(self, weights: Tree, index: Array, x: Array, context: Tree) -> tuple[Array, list[Array], Pullback]:
        """A layer's output, its residuals, each once however often the backward pass uses it, and its pullback."""
        y, pullback = jax.vjp(lambda weights, x: self.function(weights, index, x, context), weights, x)
        leaves, structure = jax.tree.flatten(pullback)
        known = jax.tree.leaves(weights)
        num_weights, places = len(known), {id(leaf): place for place, leaf in enumerate(known)}
        for leaf in leaves:
            if places.setdefault(id(leaf), len(known)) == len(known):
                known.append(leaf)
        return y, known[num_weights:], Pullback(structure, tuple(places[id(leaf)] for leaf in leaves))

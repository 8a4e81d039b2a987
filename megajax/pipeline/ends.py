"""The two ends of the model in the pipeline's loop: the embedding before the first virtual stage, the head after the
last.

Each is run by the stage that has the end, or, `together`, by all stages at once: the vocabulary is then split over them
too, and the predicate depends on the tick only, so that the collectives in there may run over `pipe`.

A row holds a stage's entries of a tick. It says where a direction begins or ends at this stage: `begins` (forward, at
the embedding), `ends` (forward, before the head), `turns` (backward, from the head), `leaves` (backward, into the
embedding); `any_begins`, … on any stage, and `begins_microbatch`, … which microbatch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.parallel.collectives import DATA, PIPE, broadcast_stage, vary, varying_axes
from megajax.parallel.shards import Shards
from megajax.pipeline.stages import Layers, when

Tree = Any
Microbatch = dict[str, Array]  # leaves [rows of a microbatch, …]
Row = dict[str, Any]


@dataclass(frozen=True)
class StageFunctions:
    """A model cut at the stage boundaries.

    Attributes:
        embed: (shared weights, microbatch) -> x_BTD; linear in the weights.
        layers: the layers of this stage.
        context: microbatch -> what every layer gets beside its input (the state of dropout, the tokens' positions).
        loss: (shared weights, x_BTD, microbatch) -> scalar, already divided by the step's number of targets.
        storage: how the shared weights are kept; they are gathered just for an end.
        loss_scale: what the backward pass starts from; the gradients, not the loss, are multiplied by it.
    """

    embed: Callable[[Tree, Microbatch], Array]
    layers: Layers
    context: Callable[[Microbatch], Tree]
    loss: Callable[[Tree, Array, Microbatch], Array]
    storage: Shards
    loss_scale: Array


@dataclass(frozen=True)
class Ends:
    """Embedding and head of one step.

    Attributes:
        shared: the weights of both.
        microbatches: leaves [microbatches, rows of a microbatch, …], the same on every stage.
        together: all stages run both ends of a microbatch at once, each on its share of the vocabulary.
    """

    functions: StageFunctions
    shared: Tree
    microbatches: Microbatch
    together: bool

    @property
    def axes(self) -> tuple[str, ...]:
        """What the loss varies over before it is reduced: together, every stage sees the whole."""
        return (DATA,) if self.together else (DATA, PIPE)

    def take(self, microbatch: int | Array) -> Microbatch:
        """One microbatch."""
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, microbatch, keepdims=False), self.microbatches)

    def weights(self) -> Tree:
        """The shared weights to compute with."""
        return self.functions.storage.gather(self.shared)

    def whole(self, x: Array, mine: Array | bool) -> Array:
        """What an end gets: `x` of the stage where `mine` is true."""
        return broadcast_stage(x, mine) if self.together else x

    def input(self, row: Row, x_in: Array) -> Array:
        """Input of the row's forward: what came from below, or the embedding."""

        def embed(batch: Microbatch) -> Array:
            return vary(self.functions.embed(self.weights(), batch), (PIPE,))

        runs, batch = self._where(row, "begins")
        if not self.together:
            return when(runs, lambda: embed(batch()), lambda: x_in)
        embedded = when(runs, lambda: embed(batch()), lambda: x_in)
        return jnp.where(row["begins"], embedded, x_in)

    def head(self, row: Row, output: Callable[[], Array], grad_in: Array, total: Tree) -> tuple[Array, Tree]:
        """Gradient of the output of the row's backward: what came from above, or the head's, from `output()`.

        The head's loss and gradients are added to `total`, `{"loss": …, "shared": …}`.
        """

        def head(batch: Microbatch, total: Tree) -> tuple[Array, Tree]:
            y = self.whole(output(), row["turns"])
            value, pullback = jax.vjp(lambda shared, y: self.functions.loss(shared, y, batch), self.weights(), y)
            scale = self.functions.loss_scale.astype(value.dtype)
            shared, grad = pullback(vary(scale, sorted(varying_axes(value))))
            loss = total["loss"] + value.astype(total["loss"].dtype)
            return vary(grad, (PIPE,)), {"loss": loss, "shared": self._add(total["shared"], shared)}

        runs, batch = self._where(row, "turns")
        grad, total = when(runs, lambda total: head(batch(), total), lambda total: (grad_in, total), total)
        return jnp.where(row["turns"], grad, grad_in) if self.together else grad, total

    def leave(self, row: Row, grad: Array, total: Tree) -> Tree:
        """The gradient of the first virtual stage's input goes on into the embedding."""

        def into_embedding(batch: Microbatch, total: Tree) -> Tree:
            weights = jax.eval_shape(self.weights)
            transpose = jax.linear_transpose(lambda shared: self.functions.embed(shared, batch), weights)
            return total | {"shared": self._add(total["shared"], transpose(self.whole(grad, row["leaves"]))[0])}

        runs, batch = self._where(row, "leaves")
        return when(runs, lambda total: into_embedding(batch(), total), lambda total: total, total)

    def finish(self, row: Row, y: Array, function: Callable[[Array, Microbatch], Tree], outputs: Tree) -> Tree:
        """Forward only: put `function(y, microbatch)` of the last virtual stage in its place in `outputs`."""
        runs, batch = self._where(row, "ends")

        def put(outputs: Tree) -> Tree:
            result = function(self.whole(y, row["ends"]), batch())
            microbatch = self._microbatch(row, "ends")
            return jax.tree.map(lambda slots, new: slots.at[microbatch].set(new), outputs, result)

        return when(runs, put, lambda outputs: outputs, outputs)

    def _where(self, row: Row, name: str) -> tuple[Array | bool, Callable[[], Microbatch]]:
        """Whether this stage runs an end in this tick, and on which microbatch."""
        return row[f"any_{name}" if self.together else name], lambda: self.take(self._microbatch(row, name))

    def _microbatch(self, row: Row, name: str) -> Array:
        if self.together:
            return row[f"{name}_microbatch"]
        return row["forward" if name in ("begins", "ends") else "backward"]

    def _add(self, total: Tree, grads: Tree) -> Tree:
        """Gradients of the gathered weights, added to the sums of those that are kept."""
        scattered = self.functions.storage.scatter(grads, jax.tree.leaves(total)[0].dtype)
        return jax.tree.map(jnp.add, total, scattered)

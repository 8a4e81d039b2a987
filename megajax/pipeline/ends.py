"""The two ends of the model in the pipeline's loop: the embedding before the first virtual stage, the head after the
last.

Each is run by the stage that has the end, or, with a vocabulary that is sharded over `pipe` too, by all stages at once:
the predicate then depends on the tick only, so that the collectives in there may run over `pipe`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.axes import BATCH_AXES
from megajax.parallel.collectives import PIPE, broadcast_stage, vary, varying_axes
from megajax.parallel.shards import Shards
from megajax.pipeline.rows import End, Predicate, Row, Work
from megajax.pipeline.stages import Layers, when

Tree = Any
Batch = dict[str, Array]


class Microbatch(NamedTuple):
    """Some rows of the batch.

    Attributes:
        batch: leaves [rows of a microbatch, …].
        context: what every layer gets of them beside its input (the state of dropout, what tokens see).
    """

    batch: Batch
    context: Tree


@dataclass(frozen=True)
class StageFunctions:
    """A model cut at the stage boundaries.

    Attributes:
        embed: (shared weights, *microbatch) -> x_BTD.
        linear_embedding: `embed` is linear in the weights, so that its backward needs nothing of its forward.
        layers: the layers of this stage.
        context: (batch, rows of the global batch) -> what every layer gets of them, see `Microbatch`.
        losses: (shared weights, x_BTD, *microbatch) -> scalars by name, each divided by the number of its targets in
            the step.
        trained: for every name whether the gradient is taken of it; the others are only added up.
        storage: how the shared weights are kept; they are gathered just for an end.
        loss_scale: what the backward pass starts from; the gradients, not the losses, are multiplied by it.
    """

    embed: Callable[[Tree, Batch, Tree], Array]
    linear_embedding: bool
    layers: Layers
    context: Callable[[Batch, Array], Tree]
    losses: Callable[[Tree, Array, Batch, Tree], dict[str, Array]]
    trained: dict[str, bool]
    storage: Shards
    loss_scale: Array


@dataclass(frozen=True)
class EmbeddingAndHead:
    """Embedding and head of one step.

    Attributes:
        shared: the weights of both.
        microbatches: the batch, and its rows' numbers in the global batch; leaves [microbatches, rows of a
            microbatch, …], the same on every stage.
        vocabulary_split: all stages run both ends of a microbatch at once, each on its share of the vocabulary.
    """

    functions: StageFunctions
    shared: Tree
    microbatches: tuple[Batch, Array]
    vocabulary_split: bool

    @property
    def axes(self) -> tuple[str, ...]:
        """What the losses vary over before they are reduced: of a split vocabulary, every stage sees all."""
        return BATCH_AXES if self.vocabulary_split else (*BATCH_AXES, PIPE)

    def take(self, microbatch: int | Array) -> Microbatch:
        """One microbatch."""
        own = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, microbatch, keepdims=False), self.microbatches)
        return Microbatch(own[0], self.functions.context(*own))

    def weights(self) -> Tree:
        """The shared weights to compute with."""
        return self.functions.storage.gather(self.shared)

    def broadcast(self, x: Array, mine: Predicate) -> Array:
        """What an end gets: `x` of the stage where `mine` is true."""
        return broadcast_stage(x, mine) if self.vocabulary_split else x

    def input(self, row: Row, x_in: Array) -> Array:
        """Input of the row's forward: what came from below, or the embedding."""

        def embed(own: Microbatch) -> Array:
            return vary(self.functions.embed(self.weights(), *own), (PIPE,))

        runs, own = self._where(row.embed, row.forward)
        embedded = when(runs, lambda: embed(own()), lambda: x_in)
        return jnp.where(row.embed.here, embedded, x_in) if self.vocabulary_split else embedded

    def head(self, row: Row, output: Callable[[], Array], grad_in: Array, total: Tree) -> tuple[Array, Tree]:
        """Gradient of the output of the row's backward: what came from above, or the head's, from `output()`.

        The head's losses and gradients are added to `total`, `{"losses": …, "shared": …}`.
        """

        def head(own: Microbatch, total: Tree) -> tuple[Array, Tree]:
            y = self.broadcast(output(), row.head.here)
            losses, pullback = jax.vjp(lambda shared, y: self.functions.losses(shared, y, *own), self.weights(), y)
            shared, grad = pullback({name: self._scale_of(name, loss) for name, loss in losses.items()})
            added = jax.tree.map(lambda sum_, loss: sum_ + loss.astype(sum_.dtype), total["losses"], losses)
            return vary(grad, (PIPE,)), {"losses": added, "shared": self._add(total["shared"], shared)}

        runs, own = self._where(row.head, row.backward)
        grad, total = when(runs, lambda total: head(own(), total), lambda total: (grad_in, total), total)
        return jnp.where(row.head.here, grad, grad_in) if self.vocabulary_split else grad, total

    def embed_backward(self, row: Row, grad: Array, total: Tree) -> Tree:
        """The gradient of the first virtual stage's input goes on into the embedding."""

        def into_embedding(own: Microbatch, total: Tree) -> Tree:
            x_grad = self.broadcast(grad, row.embed_backward.here)
            return total | {"shared": self._add(total["shared"], self._embed_pullback(own)(x_grad)[0])}

        runs, own = self._where(row.embed_backward, row.backward)
        return when(runs, lambda total: into_embedding(own(), total), lambda total: total, total)

    def _embed_pullback(self, own: Microbatch) -> Callable[[Array], tuple[Tree]]:
        if self.functions.linear_embedding:
            types = jax.eval_shape(self.weights)
            return jax.linear_transpose(lambda shared: self.functions.embed(shared, *own), types)
        return jax.vjp(lambda shared: self.functions.embed(shared, *own), self.weights())[1]

    def finish(self, row: Row, y: Array, function: Callable[[Array, Batch], Tree], outputs: Tree) -> Tree:
        """Forward only: put `function(y, batch)` of a microbatch of the last virtual stage in its place in
        `outputs`."""
        runs, own = self._where(row.finish, row.forward)

        def put(outputs: Tree) -> Tree:
            result = function(self.broadcast(y, row.finish.here), own().batch)
            microbatch = self._microbatch(row.finish, row.forward)
            return jax.tree.map(lambda slots, new: slots.at[microbatch].set(new), outputs, result)

        return when(runs, put, lambda outputs: outputs, outputs)

    def _where(self, end: End, work: Work) -> tuple[Predicate, Callable[[], Microbatch]]:
        """Whether this stage runs an end in this tick, and on which microbatch."""
        runs = end.anywhere if self.vocabulary_split else end.here
        return runs, lambda: self.take(self._microbatch(end, work))

    def _microbatch(self, end: End, work: Work) -> Array | int:
        return end.microbatch if self.vocabulary_split else work.microbatch

    def _scale_of(self, name: str, loss: Array) -> Array:
        """What the backward pass of a loss starts from."""
        scale = self.functions.loss_scale if self.functions.trained[name] else jnp.zeros(())
        return vary(scale.astype(loss.dtype), sorted(varying_axes(loss)))

    @jax.named_scope("gradient_sums")
    def _add(self, total: Tree, grads: Tree) -> Tree:
        """Gradients of the gathered weights, added to the sums of those that are kept."""
        scattered = self.functions.storage.scatter(grads, jax.tree.leaves(total)[0].dtype)
        return jax.tree.map(jnp.add, total, scattered)

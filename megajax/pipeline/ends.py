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
from megajax.pipeline.rows import End, Number, Predicate, Row, Work
from megajax.pipeline.stages import when

Tree = Any
Batch = dict[str, Array]


class Microbatch(NamedTuple):
    """Some rows of the batch, and what every layer gets of them beside its input."""

    batch: Batch
    context: Tree


@dataclass(frozen=True)
class EmbeddingAndHead:
    """Embedding and head, bound to one step's weights and batch."""

    embed: Callable[[Tree, Batch, Tree], Array]  # (shared weights, *microbatch) -> x_BTD
    linear_embedding: bool  # it is linear in the weights, so that its backward needs nothing of its forward
    # (shared weights, x_BTD, *microbatch) -> scalars by name, each divided by the number of its targets in the step
    losses: Callable[[Tree, Array, Batch, Tree], dict[str, Array]]
    trained: dict[str, bool]  # for every name whether the gradient is taken of it; the others are only added up
    loss_scale: Array  # what the backward pass starts from; the gradients, not the losses, are multiplied by it
    shared: Tree  # the weights of both ends as they are kept
    storage: Shards  # how they are; they are gathered just for an end
    frozen: bool  # they have no gradient
    microbatches: tuple[Batch, Array]  # and the rows' numbers in the global batch, [microbatches, rows of one, …]
    context: Callable[[Batch, Array], Tree]  # (batch, rows' numbers) -> what every layer gets of them
    # All stages run both ends of a microbatch at once, each on its share of the vocabulary; the shared weights then do
    # not vary over `pipe`, but for the vocabulary.
    vocabulary_split: bool

    @property
    def axes(self) -> tuple[str, ...]:
        """What the losses vary over before they are reduced: of a split vocabulary, every stage sees all."""
        return BATCH_AXES if self.vocabulary_split else (*BATCH_AXES, PIPE)

    def take(self, microbatch: Number) -> Microbatch:
        """One microbatch."""
        own = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, microbatch, keepdims=False), self.microbatches)
        return Microbatch(own[0], self.context(*own))

    def weights(self) -> Tree:
        """The shared weights to compute with."""
        return self.storage.gather(self.shared)

    def embedded(self, microbatch: Number) -> Array:
        """The first virtual stage's input."""
        return vary(self.embed(self.weights(), *self.take(microbatch)), (PIPE,))

    def broadcast(self, x: Array, mine: Predicate) -> Array:
        """What an end gets: `x` of the stage where `mine` is true."""
        return broadcast_stage(x, mine) if self.vocabulary_split else x

    def input(self, row: Row, x_in: Array) -> Array:
        """Input of the row's forward: what came from below, or the embedding."""
        runs, microbatch = self._where(row.embed, row.forward)
        embedded = when(runs, lambda: self.embedded(microbatch), lambda: x_in)
        return jnp.where(row.embed.here, embedded, x_in) if self.vocabulary_split else embedded

    def head(self, row: Row, output: Callable[[], Array], grad_in: Array, total: Tree) -> tuple[Array, Tree]:
        """Gradient of the output of the row's backward: what came from above, or the head's, from `output()`.

        The head's losses and gradients are added to `total`, `{"losses": …, "shared": …}`.
        """
        runs, microbatch = self._where(row.head, row.backward)

        def head(total: Tree) -> tuple[Array, Tree]:
            own, y = self.take(microbatch), self.broadcast(output(), row.head.here)
            shared, frozen = ({}, self.weights()) if self.frozen else (self.weights(), {})
            losses, pullback = jax.vjp(lambda shared, y: self.losses(shared | frozen, y, *own), shared, y)
            shared, grad = pullback({name: self._scale_of(name, loss) for name, loss in losses.items()})
            added = jax.tree.map(lambda sum_, loss: sum_ + loss.astype(sum_.dtype), total["losses"], losses)
            return vary(grad, (PIPE,)), {"losses": added, "shared": self._add(total["shared"], shared)}

        grad, total = when(runs, head, lambda total: (grad_in, total), total)
        return jnp.where(row.head.here, grad, grad_in) if self.vocabulary_split else grad, total

    def embed_backward(self, row: Row, grad: Array, total: Tree) -> Tree:
        """The gradient of the first virtual stage's input goes on into the embedding, if that has one."""
        if self.frozen:
            return total
        runs, microbatch = self._where(row.embed_backward, row.backward)

        def into_embedding(total: Tree) -> Tree:
            own = self.take(microbatch)
            x_grad = self.broadcast(grad, row.embed_backward.here)
            embed = lambda shared: self.embed(shared, *own)  # noqa: E731
            if self.linear_embedding:
                pullback = jax.linear_transpose(embed, jax.eval_shape(self.weights))
            else:
                pullback = jax.vjp(embed, self.weights())[1]
            return total | {"shared": self._add(total["shared"], pullback(x_grad)[0])}

        return when(runs, into_embedding, lambda total: total, total)

    def finish(self, row: Row, y: Array, function: Callable[[Array, Batch], Tree], outputs: Tree) -> Tree:
        """Forward only: put `function(y, batch)` of a microbatch of the last virtual stage in its place in
        `outputs`."""
        runs, microbatch = self._where(row.finish, row.forward)

        def put(outputs: Tree) -> Tree:
            result = function(self.broadcast(y, row.finish.here), self.take(microbatch).batch)
            return jax.tree.map(lambda slots, new: slots.at[microbatch].set(new), outputs, result)

        return when(runs, put, lambda outputs: outputs, outputs)

    def _where(self, end: End, work: Work) -> tuple[Predicate, Number]:
        """Whether this stage runs an end in this tick, and on which microbatch."""
        return (end.anywhere, end.microbatch) if self.vocabulary_split else (end.here, work.microbatch)

    def _scale_of(self, name: str, loss: Array) -> Array:
        """What the backward pass of a loss starts from."""
        scale = self.loss_scale if self.trained[name] else jnp.zeros(())
        return vary(scale.astype(loss.dtype), sorted(varying_axes(loss)))

    @jax.named_scope("gradient_sums")
    def _add(self, total: Tree, grads: Tree) -> Tree:
        """Gradients of the gathered weights, added to the sums of those that are kept."""
        if self.frozen:
            return total
        scattered = self.storage.scatter(grads, jax.tree.leaves(total)[0].dtype)
        return jax.tree.map(jnp.add, total, scattered)

"""The two ends of the model in the pipeline loop: the embedding before the first virtual stage, the head after the
last.

Each is run by the stage that has it. If the vocabulary is sharded over `pipe` too, all stages run it at the same time:
whether they do then depends on the tick only, so collectives inside it may run over `pipe`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from megajax.core.axes import BATCH_AXES
from megajax.core.parallel.collectives import PIPE, at_place, broadcast_stage, vary, varying_axes
from megajax.core.parallel.shards import Shards
from megajax.core.pipeline.model import Batch, LoopModel
from megajax.core.pipeline.rows import End, Number, Predicate, Row, Work
from megajax.core.pipeline.stages import when

Tree = Any


class Microbatch(NamedTuple):
    """Some rows of the batch, and the context that all layers receive for them."""

    batch: Batch
    context: Tree


@dataclass(frozen=True)
class EmbeddingAndHead:
    """Embedding and head, bound to one step's weights and batch."""

    model: LoopModel
    linear_embedding: bool  # it is linear in the weights, so its backward needs nothing from its forward
    coefficients: dict[str, float]  # of what the head computes by name, in the sum that is differentiated
    has_layers: bool  # the head has layers of its own, with figures like those of the others
    loss_scale: Array  # the backward pass starts from it; it multiplies the gradients, not the losses
    shared: Tree  # weights of both ends, as stored
    storage: Shards  # how they are sharded; they are gathered just before an end runs
    frozen: bool  # they have no gradient
    of_head: frozenset[str]  # those that only the head uses
    microbatches: tuple[Batch, Array]  # with the rows' numbers in the global batch, [microbatches, rows of one, …]
    # All stages run both ends of a microbatch at the same time, each on its share of the vocabulary. The shared weights
    # then do not vary over `pipe`, except for the vocabulary.
    vocabulary_split: bool

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes that the losses vary over before they are reduced. With a split vocabulary every stage sees all."""
        return BATCH_AXES if self.vocabulary_split else (*BATCH_AXES, PIPE)

    def take(self, microbatch: Number) -> Microbatch:
        """One microbatch."""
        own = jax.tree.map(lambda x: at_place(x, microbatch), self.microbatches)
        return Microbatch(own[0], self.model.context(*own))

    def weights(self) -> Tree:
        """The shared weights, gathered for computing."""
        return self.storage.gather(self.shared)

    def embedded(self, microbatch: Number) -> Array:
        """The input of the first virtual stage."""
        return vary(self.model.embed(self.weights(), *self.take(microbatch)), (PIPE,))

    def broadcast(self, x: Array, mine: Predicate) -> Array:
        """Input for an end that all stages run together: `x` from the stage where `mine` is true."""
        return broadcast_stage(x, mine) if self.vocabulary_split else x

    def input(self, row: Row, x_in: Array) -> Array:
        """Input of the row's forward: the activation received, or the embedding."""
        runs, microbatch = self._where(row.embed, row.forward)
        embedded = when(runs, lambda: self.embedded(microbatch), lambda: x_in)
        return jnp.where(row.embed.here, embedded, x_in) if self.vocabulary_split else embedded

    def head(self, row: Row, output: Callable[[], Array], grad_in: Array, total: Tree) -> tuple[Array, Tree]:
        """Gradient of the output of the row's backward: the one received, or the head's gradient for `output()`.

        The head's losses, gradients and figures are added to `total`, `{"losses": …, "shared": …, "figures": …}`.
        """
        runs, microbatch = self._where(row.head, row.backward)

        def head(total: Tree) -> tuple[Array, Tree]:
            own, y, weights = self.take(microbatch), self.broadcast(output(), row.head.here), self.weights()
            run = lambda trained, y: self.model.head(weights | trained, y, *own)  # noqa: E731
            losses, pullback, figures = jax.vjp(run, {} if self.frozen else weights, y, has_aux=True)
            grads, grad = pullback({name: self._scale_of(name, loss) for name, loss in losses.items()})
            added = jax.tree.map(lambda sum_, loss: sum_ + loss.astype(sum_.dtype), total["losses"], losses)
            grad = vary(grad, (PIPE,))
            if self.vocabulary_split:  # all stages have computed them
                figures = jax.tree.map(lambda x: jnp.where(row.head.here, x, jnp.zeros_like(x)), figures)
            figures = jax.tree.map(jnp.add, total["figures"], figures)
            return grad, {"losses": added, "shared": self._add(total["shared"], grads), "figures": figures}

        grad, total = when(runs, head, lambda total: (grad_in, total), total)
        return jnp.where(row.head.here, grad, grad_in) if self.vocabulary_split else grad, total

    def apart(self, total: Tree) -> tuple[Tree, Tree]:
        """What `head` and `embed_backward` have summed, without the gradients of weights that only the head uses; and
        these, which are complete when the last head has run."""
        of_head = {name: sum_ for name, sum_ in total["shared"].items() if name in self.of_head}
        others = {name: sum_ for name, sum_ in total["shared"].items() if name not in self.of_head}
        return total | {"shared": others}, of_head

    def embed_backward(self, row: Row, grad: Array, total: Tree) -> Tree:
        """Pull the gradient of the first virtual stage's input back through the embedding, unless it is frozen."""
        if self.frozen:
            return total
        runs, microbatch = self._where(row.embed_backward, row.backward)

        def into_embedding(total: Tree) -> Tree:
            own = self.take(microbatch)
            x_grad = self.broadcast(grad, row.embed_backward.here)
            embed = lambda shared: self.model.embed(shared, *own)  # noqa: E731
            if self.linear_embedding:  # only the types of weights matter
                (grads,) = jax.linear_transpose(embed, jax.eval_shape(self.weights))(x_grad)
            else:
                (grads,) = jax.vjp(embed, self.weights())[1](x_grad)
            return total | {"shared": self._add(total["shared"], grads)}

        return when(runs, into_embedding, lambda total: total, total)

    def finish(self, row: Row, y: Array, function: Callable[[Array, Batch], Tree], outputs: Tree) -> Tree:
        """Forward only: store `function(y, batch)` of the last virtual stage's microbatch at its index in
        `outputs`."""
        runs, microbatch = self._where(row.finish, row.forward)

        def put(outputs: Tree) -> Tree:
            result = function(self.broadcast(y, row.finish.here), self.take(microbatch).batch)
            return jax.tree.map(lambda slots, new: slots.at[microbatch].set(new), outputs, result)

        return when(runs, put, lambda outputs: outputs, outputs)

    def _where(self, end: End, work: Work) -> tuple[Predicate, Number]:
        """Whether this stage runs an end in this tick, and for which microbatch."""
        return (end.anywhere, end.microbatch) if self.vocabulary_split else (end.here, work.microbatch)

    def _scale_of(self, name: str, loss: Array) -> Array:
        """The cotangent from which a loss's backward pass starts."""
        coefficient = self.coefficients[name]
        scale = jnp.zeros(()) if coefficient == 0 else self.loss_scale
        scale = scale if coefficient in (0, 1) else scale * jnp.asarray(coefficient, scale.dtype)
        return vary(scale.astype(loss.dtype), sorted(varying_axes(loss)))

    @jax.named_scope("gradient_sums")
    def _add(self, total: Tree, grads: Tree) -> Tree:
        """Add gradients of gathered weights to the sums, which are sharded like the stored weights, if there are any: a
        reduced sum is complete."""
        if self.frozen:
            return total
        shardings = {name: self.storage.shardings[name] for name in total}
        grads = {name: grads[name] for name in total}
        return jax.tree.map(jnp.add, total, Shards(shardings).scatter(grads, jax.tree.leaves(total)[0].dtype))

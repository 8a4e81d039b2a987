"""The two ends of the model in the pipeline loop: the embedding before the first virtual stage, the head after the
last.

Each is run by the stage that has it. If the vocabulary is sharded over `pipe` too, all stages run it at the same time:
whether they do then depends on the tick only, so collectives inside it may run over `pipe`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax import Array

from megajax.core.axes import BATCH_AXES
from megajax.core.parallel.collectives import PIPE, broadcast_stage, vary, vary_as
from megajax.core.parallel.shards import Shards
from megajax.core.pipeline.buffers import stored, taken, when
from megajax.core.pipeline.model import Batch, Figures, LoopModel
from megajax.core.pipeline.rows import End, Number, Predicate, Row, Work
from megajax.core.pipeline.sums import Gradients, Summation, Sums
from megajax.core.trees import Path, Tree


class Microbatch(NamedTuple):
    """Some rows of the batch, and the context that all layers receive for them."""

    batch: Batch
    context: Tree


class HeadTotals(NamedTuple):
    """What the head adds up."""

    losses: dict[str, Array]
    sums: Sums  # of both ends
    figures: Figures  # of all layers, of which the head may have some

    def counting(self, figures: Figures) -> "HeadTotals":
        """With figures of layers."""
        return self._replace(figures=self.figures | {name: self.figures[name] + x for name, x in figures.items()})


@dataclass(frozen=True)
class EmbeddingAndHead:
    """Embedding and head, bound to one step's weights and batch."""

    model: LoopModel
    linear_embedding: bool  # it is linear in the weights, so its backward needs nothing from its forward
    coefficients: dict[str, float]  # of what the head computes by name, in the sum that is differentiated
    loss_scale: Array  # the backward pass starts from it; it multiplies the gradients, not the losses
    shared: Tree  # weights of both ends, as stored
    storage: Shards  # how they are sharded; they are gathered just before an end runs
    frozen: bool  # they have no gradient
    of_head: frozenset[str]  # those that only the head uses
    microbatches: tuple[Batch, Array]  # with the rows' numbers in the global batch, [microbatches, rows of one, …]
    # All stages run both ends of a microbatch at the same time, each on its share of the vocabulary. The shared weights
    # then do not vary over `pipe`, except for the vocabulary.
    vocabulary_split: bool
    summation: Summation  # of gradients and losses

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes that the losses vary over before they are reduced. With a split vocabulary every stage sees all."""
        return BATCH_AXES if self.vocabulary_split else (*BATCH_AXES, PIPE)

    def take(self, microbatch: Number) -> Microbatch:
        """One microbatch."""
        batch, row_B = taken(self.microbatches, microbatch)
        return Microbatch(batch, self.model.context(batch, row_B))

    def weights(self) -> Tree:
        """The shared weights, gathered for computing."""
        return self.storage.gather(self.shared)

    def trained(self) -> dict[Path, Array]:
        """Those that have gradients, by path, as stored."""
        return {} if self.frozen else flatten_dict({"shared": self.shared})

    def embedded(self, microbatch: Number) -> Array:
        """The input of the first virtual stage."""
        return vary(self.model.embed(self.weights(), *self.take(microbatch)), (PIPE,))

    def broadcast(self, x: Array, mine: Predicate) -> Array:
        """Input for an end that all stages run together: `x` from the stage where `mine` is true."""
        return broadcast_stage(x, mine) if self.vocabulary_split else x

    def input(self, row: Row, x_in: Array) -> Array:
        """Input of the row's forward: the activation received, or the embedding."""
        runs, microbatch = self._where(row.embed, row.forward)
        embedded = when(runs, self._embed, microbatch, x_in)
        return jnp.where(row.embed.here, embedded, x_in) if self.vocabulary_split else embedded

    def _embed(self, microbatch: Number, _: Array) -> Array:
        return self.embedded(microbatch)

    def head(
        self, row: Row, output: Tree, slot: Number | None, grad_in: Array, totals: HeadTotals
    ) -> tuple[Array, HeadTotals]:
        """Gradient of the output of the row's backward: the one received, or the head's gradient for `output`, or for
        what it has in a slot."""
        runs, microbatch = self._where(row.head, row.backward)
        grad, totals = when(runs, self._head, row.head.here, microbatch, output, slot, (grad_in, totals))
        return jnp.where(row.head.here, grad, grad_in) if self.vocabulary_split else grad, totals

    def _head(
        self, here: Predicate, microbatch: Number, output: Tree, slot: Number | None, carry: tuple[Array, HeadTotals]
    ) -> tuple[Array, HeadTotals]:
        totals = carry[1]
        inputs, y = self.take(microbatch), self.broadcast(output if slot is None else taken(output, slot), here)
        weights = self.weights()

        def run(trained: Tree, y: Array) -> tuple[dict[str, Array], Figures]:
            return self.model.head(weights | trained, y, *inputs)

        losses, pullback, figures = jax.vjp(run, {} if self.frozen else weights, y, has_aux=True)
        grads, grad = pullback({name: self._scale_of(name, loss) for name, loss in losses.items()})
        if self.vocabulary_split:  # all stages have computed them
            figures = {name: jnp.where(here, x, jnp.zeros_like(x)) for name, x in figures.items()}
        added = {name: sum_ + self.summation.loss(losses[name]) for name, sum_ in totals.losses.items()}
        return vary(grad, (PIPE,)), HeadTotals(added, self._add(totals.sums, grads), totals.figures).counting(figures)

    def split_head(self, totals: HeadTotals) -> tuple[HeadTotals, Gradients]:
        """Totals without the gradients of weights that only the head uses; and these, which are complete when the last
        head has run."""
        gradients = totals.sums.gradients
        of_head = {path: sum_ for path, sum_ in gradients.items() if path[1] in self.of_head}
        others = {path: sum_ for path, sum_ in gradients.items() if path not in of_head}
        return totals._replace(sums=Sums(others)), of_head

    def embed_backward(self, row: Row, grad: Array, sums: Sums) -> Sums:
        """Pull the gradient of the first virtual stage's input back through the embedding, unless it is frozen."""
        if self.frozen:
            return sums
        runs, microbatch = self._where(row.embed_backward, row.backward)
        return when(runs, self._embed_backward, row.embed_backward.here, microbatch, grad, sums)

    def _embed_backward(self, here: Predicate, microbatch: Number, grad: Array, sums: Sums) -> Sums:
        inputs, x_grad = self.take(microbatch), self.broadcast(grad, here)

        def embed(shared: Tree) -> Array:
            return self.model.embed(shared, *inputs)

        if self.linear_embedding:  # only the types of weights matter
            (grads,) = jax.linear_transpose(embed, jax.eval_shape(self.weights))(x_grad)
        else:
            (grads,) = jax.vjp(embed, self.weights())[1](x_grad)
        return self._add(sums, grads)

    def finish(self, row: Row, y: Array, function: Callable[[Array, Batch], Tree], outputs: Tree) -> Tree:
        """Forward only: store `function(y, batch)` of the last virtual stage's microbatch at its index in
        `outputs`."""
        runs, microbatch = self._where(row.finish, row.forward)
        return when(runs, self._finish, row.finish.here, microbatch, y, function, outputs)

    def _finish(self, here: Predicate, microbatch: Number, y: Array, function: Callable, outputs: Tree) -> Tree:
        return stored(outputs, microbatch, function(self.broadcast(y, here), self.take(microbatch).batch))

    def _where(self, end: End, work: Work) -> tuple[Predicate, Number]:
        """Whether this stage runs an end in this tick, and for which microbatch."""
        return (end.anywhere, end.microbatch) if self.vocabulary_split else (end.here, work.microbatch)

    def _scale_of(self, name: str, loss: Array) -> Array:
        """The cotangent from which a loss's backward pass starts."""
        coefficient = self.coefficients[name]
        scale = jnp.zeros(()) if coefficient == 0 else self.loss_scale
        scale = scale if coefficient in (0, 1) else scale * jnp.asarray(coefficient, scale.dtype)
        return vary_as(scale.astype(loss.dtype), loss)

    def _add(self, sums: Sums, grads: Tree) -> Sums:
        """Add gradients of gathered weights to the sums, which are sharded like the stored weights, if there are any: a
        reduced sum is complete."""
        if not sums.gradients:
            return sums
        flat = flatten_dict({"shared": grads})
        terms = self.summation.terms({path: flat[path] for path in sums.gradients if path in flat})
        return sums.add(self.storage.some(terms, "shared").scatter(terms))

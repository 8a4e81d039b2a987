"""The two ends of the model in the pipeline's loop: embedding into the first virtual stage, head after the last.

`Alone`: each is run by the stage that has the end, inside that stage's conditionals. `Together`: the vocabulary is
split over the stages too; all of them run the ends of one microbatch at once, under predicates that depend on the tick
only, so that the collectives in there may run over `pipe`.

A row holds a stage's entries of a tick. Where a direction begins or ends at this stage: `begins` (forward, at the
embedding), `ends` (forward, before the head), `turns` (backward, from the head), `leaves` (backward, into the
embedding); `any_begins`, … on any stage, and `begins_microbatch`, … which. `total` holds the sums `loss`, `shared` and
`blocks`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.parallel.collectives import DATA, PIPE, broadcast_stage, vary, varying_axes
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
        context: microbatch -> what every layer gets beside its input (the state of dropout).
        loss: (shared weights, x_BTD, microbatch) -> scalar, already divided by the step's number of targets.
    """

    embed: Callable[[Tree, Microbatch], Array]
    layers: Layers
    context: Callable[[Microbatch], Tree]
    loss: Callable[[Tree, Array, Microbatch], Array]


@dataclass(frozen=True)
class Ends(ABC):
    """Embedding and head over one step's microbatches, leaves [microbatches, rows of a microbatch, …]."""

    functions: StageFunctions
    shared: Tree
    microbatches: Microbatch

    # What the loss and the gradients of the shared weights vary over before they are reduced.
    axes: ClassVar[tuple[str, ...]] = (DATA, PIPE)

    def take(self, microbatch: int | Array) -> Microbatch:
        """One microbatch."""
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, microbatch, keepdims=False), self.microbatches)

    def _head(self, microbatch: Array, y: Array, total: Tree) -> tuple[Array, Tree]:
        """Gradient of the loss in `y`, and the sums with its loss and gradients added."""
        batch = self.take(microbatch)
        value, pullback = jax.vjp(lambda shared, y: self.functions.loss(shared, y, batch), self.shared, y)
        grad_shared, grad_y = pullback(vary(jnp.ones((), value.dtype), sorted(varying_axes(value))))
        loss = total["loss"] + value.astype(total["loss"].dtype)
        return grad_y, total | {"loss": loss, "shared": _add(total["shared"], grad_shared)}

    def _into_embedding(self, microbatch: Array, grad_x: Array, total: Tree) -> Tree:
        batch = self.take(microbatch)
        transpose = jax.linear_transpose(lambda shared: self.functions.embed(shared, batch), self.shared)
        return total | {"shared": _add(total["shared"], transpose(grad_x)[0])}

    @abstractmethod
    def whole(self, y: Array, mine: Array | bool) -> Array:
        """What the head gets: the output `y` of the stage where `mine` is true."""

    # Before the forward: outside the conditionals on the stage, then inside.

    @abstractmethod
    def embed(self, row: Row, idle_x: Array) -> Array | None: ...

    @abstractmethod
    def input(self, row: Row, embedded: Array | None, x_in: Array) -> Array: ...

    # Between forward and backward: outside, with a function that gives what the head gets, then inside.

    @abstractmethod
    def head(self, row: Row, output: Callable[[], Array], idle_x: Array, total: Tree) -> tuple[Array | None, Tree]: ...

    @abstractmethod
    def turn(
        self, row: Row, output: Callable[[], Array], grad_head: Array | None, grad_in: Array, total: Tree
    ) -> tuple[Array, Tree]: ...

    # After the backward: inside, then outside.

    @abstractmethod
    def leave(self, row: Row, grad_x: Array, total: Tree) -> Tree: ...

    @abstractmethod
    def leave_outside(self, row: Row, grad_x: Array, total: Tree) -> Tree: ...

    @abstractmethod
    def finish(self, row: Row, y: Array, function: Callable[[Array, Microbatch], Array], outputs: Array) -> Array:
        """Forward only: put `function(y, microbatch)` in its place in `outputs`, outside."""


class Alone(Ends):
    """The first virtual stage runs the embedding, the last one the head."""

    def whole(self, y, mine):
        return y

    def embed(self, row, idle_x):
        return None

    def input(self, row, embedded, x_in):
        return when(row["begins"], lambda: self.functions.embed(self.shared, self.take(row["forward"])), lambda: x_in)

    def head(self, row, output, idle_x, total):
        return None, total

    def turn(self, row, output, grad_head, grad_in, total):
        return when(
            row["turns"],
            lambda total: self._head(row["backward"], output(), total),
            lambda total: (grad_in, total),
            total,
        )

    def leave(self, row, grad_x, total):
        return when(
            row["leaves"],
            lambda total: self._into_embedding(row["backward"], grad_x, total),
            lambda total: total,
            total,
        )

    def leave_outside(self, row, grad_x, total):
        return total

    def finish(self, row, y, function, outputs):
        def put(outputs: Array) -> Array:
            return outputs.at[row["forward"]].set(function(y, self.take(row["forward"])))

        return when(row["ends"], put, lambda outputs: outputs, outputs)


class Together(Ends):
    """All stages run both ends of a microbatch together: what is theirs alone is their share of the vocabulary."""

    axes = (DATA,)  # each stage sees the whole loss

    def whole(self, y, mine):
        return broadcast_stage(y, mine)

    def embed(self, row, idle_x):
        def embed() -> Array:
            return vary(self.functions.embed(self.shared, self.take(row["begins_microbatch"])), (PIPE,))

        return when(row["any_begins"], embed, lambda: idle_x)

    def input(self, row, embedded, x_in):
        return when(row["begins"], lambda: embedded, lambda: x_in)

    def head(self, row, output, idle_x, total):
        def head(total: Tree) -> tuple[Array, Tree]:
            grad, total = self._head(row["turns_microbatch"], self.whole(output(), row["turns"]), total)
            return vary(grad, (PIPE,)), total

        return when(row["any_turns"], head, lambda total: (idle_x, total), total)

    def turn(self, row, output, grad_head, grad_in, total):
        return when(row["turns"], lambda: grad_head, lambda: grad_in), total

    def leave(self, row, grad_x, total):
        return total

    def leave_outside(self, row, grad_x, total):
        def into_embedding(total: Tree) -> Tree:
            return self._into_embedding(row["leaves_microbatch"], self.whole(grad_x, row["leaves"]), total)

        return when(row["any_leaves"], into_embedding, lambda total: total, total)

    def finish(self, row, y, function, outputs):
        def put(outputs: Array) -> Array:
            result = function(self.whole(y, row["ends"]), self.take(row["ends_microbatch"]))
            return outputs.at[row["ends_microbatch"]].set(result)

        return when(row["any_ends"], put, lambda outputs: outputs, outputs)


def _add(total: Tree, grads: Tree) -> Tree:
    return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads)

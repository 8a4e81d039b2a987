"""One scanned loop over the ticks of a schedule's table: loss and gradients of a step, on any mesh.

Every tick a stage runs at most one microbatch forward and one backward, each under a conditional, and hands
activations up and gradients down. Collectives over `tensor` may stand inside the conditionals (a tensor group shares
its stage, and so the branch); those over `pipe` never do. Predicates known from the table alone are decided while
tracing, so that a pipe of one, and with it plain accumulation over microbatches, is this loop without conditionals and
without a buffer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from megajax.parallel.collectives import DATA, PIPE, axis_index, send_down, send_up, vary, varying_axes, zeros_like_type
from megajax.pipeline.schedule import IDLE, Schedule, forward_only
from megajax.pipeline.stages import Layers, when
from megajax.precision import at_least_fp32

Tree = Any
Microbatch = dict[str, Array]  # leaves [rows of a microbatch, …]


@dataclass(frozen=True)
class StageFunctions:
    """A model cut at the stage boundaries.

    Attributes:
        embed: (shared weights, microbatch) -> x_BTD; linear in the weights.
        layers: the layers of a stage.
        context: microbatch -> what every layer gets beside its input (the state of dropout).
        loss: (shared weights, x_BTD, microbatch) -> scalar, already divided by the step's number of targets.
    """

    embed: Callable[[Tree, Microbatch], Array]
    layers: Layers
    context: Callable[[Microbatch], Tree]
    loss: Callable[[Tree, Array, Microbatch], Array]


class Pipeline:
    """A stage's part of the loop, bound to one step's weights and batch. Made inside the `shard_map` region.

    Args:
        functions: the model.
        weights: `{"shared": …, "blocks": …}`, blocks [n, …] of this stage, varying over `data` and `pipe`.
        batch: leaves [rows of this device, …].
        num_microbatches: how many microbatches the rows are cut in.
        layer_index: global index of the layer in each slot of each stage, -1 in a padded one; [stages, n].
    """

    def __init__(
        self,
        functions: StageFunctions,
        weights: Tree,
        batch: Microbatch,
        num_microbatches: int,
        layer_index: np.ndarray,
    ):
        self.functions, self.weights = functions, weights
        self.num_stages = layer_index.shape[0]
        self.num_microbatches = num_microbatches
        self.microbatches = jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), batch)
        self.stage = axis_index(PIPE)
        self.layer_index = jnp.asarray(layer_index)[self.stage]
        stages = np.arange(self.num_stages)
        self.is_first = self._column(stages == 0)
        self.is_last = self._column(stages == self.num_stages - 1)
        self.x_type = jax.eval_shape(functions.embed, weights["shared"], self._take(0))

    def loss_and_gradients(self, schedule: Schedule, grad_dtype: Any) -> tuple[Array, Tree]:
        """Run the microbatches forward and backward as `schedule` says.

        Returns the loss and the gradients (accumulated in `grad_dtype`) of this device's rows and stage: local sums,
        not yet reduced over `data` or `pipe`.
        """
        assert (schedule.num_stages, schedule.num_microbatches) == (self.num_stages, self.num_microbatches)
        fused = (schedule.forward == schedule.backward) & (schedule.forward != IDLE)
        last_is_fused = bool(fused.any())
        rows, known = self._rows(
            forward=schedule.forward,
            backward=schedule.backward,
            forward_slot=schedule.forward_slot,
            backward_slot=schedule.backward_slot,
            does_forward=(schedule.forward != IDLE) & ~fused,
            does_backward=(schedule.backward != IDLE) & ~fused,
            does_fused=fused,
        )
        idle_x = zeros_like_type(self.x_type)
        sample = self._take(0)
        saved_types = self.functions.layers.residual_types(
            self.weights["blocks"], self.layer_index, idle_x, self.functions.context(sample)
        )
        # Where the last stage does not run its backward at once, the head's input has to be kept as well.
        buffer = jax.tree.map(
            lambda kept: zeros_like_type(kept, (schedule.num_slots,)),
            {"saved": saved_types, "output": () if last_is_fused else self.x_type},
        )
        grads = jax.tree.map(lambda w: vary(jnp.zeros(w.shape, grad_dtype), sorted(varying_axes(w))), self.weights)
        loss = vary(jnp.zeros((), at_least_fp32(grad_dtype)), (DATA, PIPE))

        def tick(carry, row):
            row = row | known
            x_inbox, grad_inbox, buffer, loss, grads = carry

            def forward(buffer):
                y, saved = self._forward(row["forward"], x_inbox)
                kept = {"saved": saved, "output": () if last_is_fused else y}
                return y, jax.tree.map(lambda slots, new: slots.at[row["forward_slot"]].set(new), buffer, kept)

            y, buffer = when(row["does_forward"], forward, lambda buffer: (idle_x, buffer), buffer)
            next_x_inbox = self._hand_over(send_up, y)

            def fused(_, loss, grads):
                y, saved = self._forward(row["forward"], x_inbox)
                grad_y, loss, grads = self._head(row["forward"], y, loss, grads)
                return self._backward(row["forward"], saved, grad_y, loss, grads)

            def backward(_, loss, grads):
                kept = jax.tree.map(lambda slots: slots[row["backward_slot"]], buffer)
                grad_y, loss, grads = when(
                    False if last_is_fused else self.is_last,
                    lambda loss, grads: self._head(row["backward"], kept["output"], loss, grads),
                    lambda loss, grads: (grad_inbox, loss, grads),
                    *(loss, grads),
                )
                return self._backward(row["backward"], kept["saved"], grad_y, loss, grads)

            def nothing(grad_x, loss, grads):
                return grad_x, loss, grads

            # One after the other, not one inside the other: nested conditionals copy the accumulators.
            results = when(row["does_backward"], backward, nothing, idle_x, loss, grads)
            grad_x, loss, grads = when(row["does_fused"], fused, nothing, *results)
            return (next_x_inbox, self._hand_over(send_down, grad_x), buffer, loss, grads), None

        (_, _, _, loss, grads), _ = lax.scan(tick, (idle_x, idle_x, buffer, loss, grads), rows)
        return loss, grads

    def forward(self, finish: Callable[[Array, Microbatch], Array]) -> Array:
        """Run the microbatches forward only.

        Returns what `finish(y, microbatch)` makes of the last stage's output, [microbatches, …]; zeros on other stages.
        """
        table = forward_only(self.num_stages, self.num_microbatches)
        rows, known = self._rows(forward=table, does_forward=table != IDLE)
        idle_x = zeros_like_type(self.x_type)
        outputs = zeros_like_type(jax.eval_shape(finish, idle_x, self._take(0)), (self.num_microbatches,))

        def tick(carry, row):
            row = row | known
            x_inbox, outputs = carry

            def forward(outputs):
                batch = self._take(row["forward"])
                y = self.functions.layers.run(
                    self.weights["blocks"], self.layer_index, self._input(batch, x_inbox), self.functions.context(batch)
                )

                def last(outputs):
                    return outputs.at[row["forward"]].set(finish(y, batch))

                return y, when(self.is_last, last, lambda outputs: outputs, outputs)

            y, outputs = when(row["does_forward"], forward, lambda outputs: (idle_x, outputs), outputs)
            return (self._hand_over(send_up, y), outputs), None

        return lax.scan(tick, (idle_x, outputs), rows)[0][1]

    def _forward(self, microbatch: Array, x_inbox: Array) -> tuple[Array, list[Array]]:
        batch = self._take(microbatch)
        x = self._input(batch, x_inbox)
        return self.functions.layers.forward(self.weights["blocks"], self.layer_index, x, self.functions.context(batch))

    def _head(self, microbatch: Array, y: Array, loss: Array, grads: Tree) -> tuple[Array, Array, Tree]:
        """Loss of the last stage's output `y`, and the gradient to start the backward with."""
        batch = self._take(microbatch)
        value, pullback = jax.vjp(lambda shared, y: self.functions.loss(shared, y, batch), self.weights["shared"], y)
        grad_shared, grad_y = pullback(vary(jnp.ones((), value.dtype), sorted(varying_axes(value))))
        return grad_y, loss + value.astype(loss.dtype), grads | {"shared": _add(grads["shared"], grad_shared)}

    def _backward(
        self, microbatch: Array, saved: list[Array], grad_y: Array, loss: Array, grads: Tree
    ) -> tuple[Array, Array, Tree]:
        """Gradient of the stage's input; on the first stage it goes on into the embedding."""
        grad_x, blocks = self.functions.layers.backward(
            self.weights["blocks"], self.layer_index, saved, grad_y, grads["blocks"]
        )

        def into_embedding(shared: Tree) -> Tree:
            batch = self._take(microbatch)
            transpose = jax.linear_transpose(
                lambda weights: self.functions.embed(weights, batch), self.weights["shared"]
            )
            return _add(shared, transpose(grad_x)[0])

        shared = when(self.is_first, into_embedding, lambda shared: shared, grads["shared"])
        return grad_x, loss, {"shared": shared, "blocks": blocks}

    def _input(self, batch: Microbatch, x_inbox: Array) -> Array:
        return when(self.is_first, lambda: self.functions.embed(self.weights["shared"], batch), lambda: x_inbox)

    def _hand_over(self, send: Callable[[Array], Array], x: Array) -> Array:
        return send(x) if self.num_stages > 1 else x

    def _take(self, microbatch: int | Array) -> Microbatch:
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, microbatch, keepdims=False), self.microbatches)

    def _column(self, table: np.ndarray) -> Array | bool:
        """This stage's column of a table whose last dim is the stages; a bool where it is the same everywhere."""
        if table.dtype == bool and (table.all() or not table.any()):
            return bool(table.all())
        return jnp.asarray(table)[..., self.stage]

    def _rows(self, **tables: np.ndarray) -> tuple[dict[str, Array], dict[str, bool]]:
        """Tables [ticks, stages] as this stage's columns to scan over, and those known to be the same everywhere."""
        columns: dict[str, Any] = {name: self._column(table) for name, table in tables.items()}
        known = {name: column for name, column in columns.items() if isinstance(column, bool)}
        return {name: column for name, column in columns.items() if name not in known}, known


def _add(total: Tree, grads: Tree) -> Tree:
    return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads)

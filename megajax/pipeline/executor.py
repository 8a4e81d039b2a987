"""One scanned loop over the ticks of a schedule's table: loss and gradients of a step, on any mesh.

Every tick a stage runs at most one microbatch through a chunk forward and one backward, each under a conditional, and
hands activations up and gradients down. Collectives over `tensor` may stand inside the conditionals (a tensor group
shares its stage, and so the branch); those over `pipe` stand only where all stages take part. Predicates known from the
table are decided while tracing, so that a pipe of one, and with it plain accumulation over microbatches, is this loop
without conditionals and without a buffer.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from megajax.parallel.collectives import (
    DATA,
    PIPE,
    axis_index,
    axis_size,
    send_down,
    send_up,
    vary,
    varying_axes,
    zeros_like_type,
)
from megajax.pipeline.ends import Alone, Ends, Microbatch, Row, StageFunctions, Together
from megajax.pipeline.schedule import IDLE, Pass, Schedule
from megajax.pipeline.stages import when
from megajax.precision import at_least_fp32

Tree = Any


def idle(type_: Any, leading: tuple[int, ...] = ()) -> Array:
    """What stands where nothing was computed. It is never used: NaN in place of zero changes nothing (tested)."""
    return zeros_like_type(type_, leading)


class Pipeline:
    """A stage's part of the loop, bound to one step's weights and batch. Made inside the `shard_map` region.

    Args:
        functions: the model.
        weights: `{"shared": …, "blocks": …}`, blocks [chunks · n, …] of this stage.
        batch: leaves [rows of this device, …], the same on every stage.
        num_microbatches: how many microbatches the rows are cut in.
        together: all stages run embedding and head of a microbatch together (`pipeline/ends.py`); the shared weights
            then do not vary over `pipe`, but for the vocabulary, which is split over it.
    """

    def __init__(
        self, functions: StageFunctions, weights: Tree, batch: Microbatch, num_microbatches: int, together: bool
    ):
        self.functions, self.layers = functions, functions.layers
        self.weights, self.blocks = weights, weights["blocks"]
        self.stage, self.num_stages, self.num_chunks = axis_index(PIPE), axis_size(PIPE), self.layers.num_chunks
        self.num_microbatches = num_microbatches
        microbatches = jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), batch)
        self.ends: Ends = (Together if together else Alone)(functions, weights["shared"], microbatches)
        self.x_type = jax.eval_shape(lambda: vary(functions.embed(weights["shared"], self.ends.take(0)), (PIPE,)))

    def loss_and_gradients(self, schedule: Schedule, grad_dtype: Any) -> tuple[Array, Tree]:
        """Run the microbatches forward and backward as `schedule` says.

        Returns the loss and the gradients (accumulated in `grad_dtype`) as local sums: not yet reduced over the axes
        that they vary over although their weights do not.
        """
        self._expect(schedule)
        ends = self.ends
        rows, known = self._rows(schedule)
        idle_x = idle(self.x_type)
        buffer = self._buffer(schedule.num_slots, keeps_output=not schedule.turns_at_once)
        total = self._zeros(grad_dtype)
        # The sums that conditionals on the stage add to.
        staged = ("blocks",) if PIPE not in ends.axes else tuple(total)

        def tick(carry, row):
            row = row | known
            x_wire, grad_wire, x_inbox, grad_inbox, buffer, total = carry
            x_inbox, x_in = _receive(schedule.forward, x_inbox, x_wire, row, "forward")
            grad_inbox, grad_in = _receive(schedule.backward, grad_inbox, grad_wire, row, "backward")
            embedded = ends.embed(row, idle_x)

            def forward(buffer):
                return self._forward(row, ends.input(row, embedded, x_in), buffer)

            y, buffer = when(row["runs_forward"], forward, lambda buffer: (idle_x, buffer), buffer)
            x_wire = self._send(send_up, y)

            def output() -> Array:
                return y if schedule.turns_at_once else buffer["output"][row["backward_slot"]]

            grad_head, total = ends.head(row, output, idle_x, total)

            def backward(_, total):
                grad, total = ends.turn(row, output, grad_head, grad_in, total)
                return self._backward(row, buffer, grad, total)

            def fused(_, total):
                """The last virtual stage, forward and backward as one: nothing is kept, nothing recomputed."""
                x, chunk = ends.input(row, embedded, x_in), row["forward_chunk"]
                y, saved = self.layers.save(self.blocks, chunk, x, self._context(row["forward"]))
                grad, total = ends.turn(row | {"turns": True}, lambda: y, grad_head, grad_in, total)
                grad, blocks = self.layers.pull(self.blocks, chunk, saved, grad, total["blocks"])
                return grad, ends.leave(row, grad, total | {"blocks": blocks})

            # One after the other, not one inside the other: nested conditionals copy the accumulators.
            results = idle_x, {name: total[name] for name in staged}
            results = when(row["runs_backward"], backward, lambda *carry: carry, *results)
            grad, changed = when(row["runs_fused"], fused, lambda *carry: carry, *results)
            total = ends.leave_outside(row, grad, total | changed)
            return (x_wire, self._send(send_down, grad), x_inbox, grad_inbox, buffer, total), None

        inboxes = self._inbox(schedule.forward), self._inbox(schedule.backward)
        total = lax.scan(tick, (idle_x, idle_x, *inboxes, buffer, total), rows, schedule.num_ticks)[0][-1]
        return total.pop("loss"), total

    def forward(self, schedule: Schedule, finish: Callable[[Array, Microbatch], Array]) -> Array:
        """Run the microbatches forward only.

        Returns what `finish(y, microbatch)` makes of the last virtual stage's output, [microbatches, …]; zeros on other
        stages, unless all run `finish` together.
        """
        self._expect(schedule)
        rows, known = self._rows(schedule)
        idle_x = idle(self.x_type)
        result = jax.eval_shape(lambda: finish(self.ends.whole(idle_x, True), self.ends.take(0)))
        outputs = zeros_like_type(result, (self.num_microbatches,))

        def tick(carry, row):
            row = row | known
            x_wire, x_inbox, outputs = carry
            x_inbox, x_in = _receive(schedule.forward, x_inbox, x_wire, row, "forward")
            embedded = self.ends.embed(row, idle_x)

            def forward():
                x = self.ends.input(row, embedded, x_in)
                return self.layers.run(self.blocks, row["forward_chunk"], x, self._context(row["forward"]))

            y = when(row["runs_forward"], forward, lambda: idle_x)
            outputs = self.ends.finish(row, y, finish, outputs)
            return (self._send(send_up, y), x_inbox, outputs), None

        return lax.scan(tick, (idle_x, self._inbox(schedule.forward), outputs), rows, schedule.num_ticks)[0][-1]

    def measured(self, part: str, k: Array, repeats: Array, grad_dtype: Any) -> Array:
        """Run one part of a step over and over, for measuring it; returns a number that depends on the results.

        Parts: `forward` and `both` (and backward) of one microbatch through virtual stage `k`, on its stage alone,
        where all others skip it; `embed`, `head` and `embed_backward` of ends that all stages run together.
        """
        chunk, stage = k // self.num_stages, k % self.num_stages
        alone = PIPE in self.ends.axes
        begins, turns = alone & (k == 0), alone & (k == self.num_chunks * self.num_stages - 1)

        def once(repeat: Array, carry: Tree) -> Tree:
            x, buffer, total = carry
            microbatch = repeat % self.num_microbatches
            row: Row = {"forward": microbatch, "forward_chunk": chunk, "forward_slot": 0, "begins": begins}
            row |= {"backward": microbatch, "backward_chunk": chunk, "backward_slot": 0, "turns": turns}
            row |= {"leaves": begins, "any_begins": True, "any_turns": True, "any_leaves": True}
            row |= {f"{name}_microbatch": microbatch for name in ("begins", "turns", "leaves")}
            if part == "embed":
                x += self.ends.embed(row, x)
            elif part == "head":
                x, total = self.ends.head(row | {"turns": self.stage == 0}, lambda: x, x, total)
            elif part == "embed_backward":
                total = self.ends.leave_outside(row | {"leaves": self.stage == 0}, x, total)
            else:
                y, buffer = self._forward(row, self.ends.input(row, x, x), buffer)
                if part == "both":
                    grad, total = self.ends.turn(row, lambda: y, y, y, total)
                    x, total = self._backward(row, buffer, grad, total)
                x += y
            size = lax.rsqrt(jnp.mean(jnp.square(x)) + jnp.asarray(1e-6, x.dtype))
            return x * size, buffer, total

        def run(x: Array) -> Array:
            total = self._zeros(grad_dtype)
            if part in ("forward", "both") and not alone:
                total = {"blocks": total["blocks"]}
            carry = lax.fori_loop(0, repeats, once, (x, self._buffer(1, keeps_output=False), total))
            return sum(vary(jnp.sum(leaf).astype(jnp.float32), (DATA, PIPE)) for leaf in jax.tree.leaves(carry))

        x = vary(self.functions.embed(self.weights["shared"], self.ends.take(0)), (PIPE,))
        if part not in ("forward", "both"):
            return run(x)
        mine = (k >= 0) & (stage == self.stage)
        return when(mine, run, lambda x: idle(jax.eval_shape(run, x)), x)

    def _forward(self, row: Row, x: Array, buffer: Tree) -> tuple[Array, Tree]:
        """A chunk's output for the row's microbatch; what its backward needs goes into the buffer."""
        y, kept = self.layers.forward(self.blocks, row["forward_chunk"], x, self._context(row["forward"]))
        entry = {"layers": kept} | ({"output": y} if "output" in buffer else {})
        return y, jax.tree.map(lambda slots, new: slots.at[row["forward_slot"]].set(new), buffer, entry)

    def _backward(self, row: Row, buffer: Tree, grad: Array, total: Tree) -> tuple[Array, Tree]:
        """Pull the gradient of a chunk's output back to its input."""
        kept = jax.tree.map(lambda slots: slots[row["backward_slot"]], buffer["layers"])
        context = self._context(row["backward"])
        grad, blocks = self.layers.backward(self.blocks, row["backward_chunk"], kept, context, grad, total["blocks"])
        return grad, self.ends.leave(row, grad, total | {"blocks": blocks})

    def kept_types(self) -> list[jax.ShapeDtypeStruct]:
        """Types of what a stage keeps of a microbatch's way through a chunk, until it comes back."""
        context = vary(self.functions.context(self.ends.take(0)), (PIPE,))
        return self.layers.kept_types(self.blocks, idle(self.x_type), context)

    def _buffer(self, num_slots: int, keeps_output: bool) -> Tree:
        """`keeps_output`: the head runs later than the layers before it, whose output it needs."""
        types: Tree = {"layers": self.kept_types()} | ({"output": self.x_type} if keeps_output else {})
        return jax.tree.map(lambda kept: idle(kept, (num_slots,)), types)

    def _zeros(self, dtype: Any) -> Tree:
        """The sums of a step: gradients and loss."""
        total = jax.tree.map(lambda w: vary(jnp.zeros(w.shape, dtype), sorted(varying_axes(w))), self.weights)
        return total | {"loss": vary(jnp.zeros((), at_least_fp32(dtype)), self.ends.axes)}

    def _expect(self, schedule: Schedule) -> None:
        expected = self.num_stages, self.num_chunks, self.num_microbatches
        assert (schedule.num_stages, schedule.num_chunks, schedule.num_microbatches) == expected, expected
        assert not schedule.fused or PIPE in self.ends.axes, "work of all stages cannot stand inside one stage's"

    def _context(self, microbatch: Array) -> Tree:
        return vary(self.functions.context(self.ends.take(microbatch)), (PIPE,))

    def _send(self, send: Callable[..., Array], x: Array) -> Array:
        return send(x, ring=self.num_chunks > 1) if self.num_stages > 1 else x

    def _inbox(self, direction: Pass) -> Array | None:
        """Slots for what waits longer than a tick, and a spare one for what nobody sent."""
        return None if direction.direct else idle(self.x_type, (direction.inbox_depth + 1,))

    def _rows(self, schedule: Schedule) -> tuple[Row, Row]:
        """The table's columns of this stage, to scan over; and those predicates that are always the same."""
        up, down = schedule.forward, schedule.backward
        fused = schedule.at_virtual(up, schedule.num_virtual - 1) & schedule.fused
        tables: dict[str, np.ndarray] = {
            "runs_forward": up.active & ~fused,
            "runs_backward": down.active & ~fused,
            "runs_fused": fused,
        }
        for name, table in (("forward", up), ("backward", down)):
            spare = table.inbox_depth
            tables |= {
                name: table.microbatch,
                f"{name}_chunk": np.maximum(table.chunk, 0),
                f"{name}_slot": table.slot,
                f"{name}_arrival": np.where(table.arrival == IDLE, spare, table.arrival),
                f"{name}_source": np.where(table.source == IDLE, spare, table.source),
            }
        last = schedule.num_virtual - 1
        for name, table, k in (("begins", up, 0), ("ends", up, last), ("turns", down, last), ("leaves", down, 0)):
            here = schedule.at_virtual(table, k)
            tables |= {
                name: here,
                f"any_{name}": here.max(axis=1),
                f"{name}_microbatch": np.where(here, table.microbatch, IDLE).max(1),
            }
        tables["turns"] = tables["turns"] & ~fused
        columns = {name: self._column(table) for name, table in tables.items()}
        known = {name: column for name, column in columns.items() if isinstance(column, bool | int)}
        return {name: column for name, column in columns.items() if name not in known}, known

    def _column(self, table: np.ndarray) -> Array | bool | int:
        """This stage's column of a table [ticks, stages], or a table [ticks]; its one value where it has no other."""
        if (table == table.flat[0]).all():
            return table.flat[0].item()
        column = jnp.asarray(table)
        return column if table.ndim == 1 else column[:, self.stage]


def _receive(direction: Pass, inbox: Array | None, wire: Array, row: Row, name: str) -> tuple[Array | None, Array]:
    """Put what arrived in its slot of the inbox; returns the inbox, and the input of this tick."""
    if inbox is None:
        return None, wire
    inbox = inbox.at[row[f"{name}_arrival"]].set(wire)
    return inbox, inbox[row[f"{name}_source"]]

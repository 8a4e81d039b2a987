"""One scanned loop over the ticks of a schedule's table: loss and gradients of a step, on any mesh.

In every tick a stage runs at most one chunk forward and one backward, each under a conditional, and sends activations
up and gradients down. Collectives over the other axes may be inside the conditionals, because the devices of their
groups share a stage and so take the same branch; collectives over `pipe` are only where all stages take part.
Predicates known from the table are decided while tracing, so with one stage the loop is plain gradient accumulation
over microbatches, without conditionals or buffers.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.core.parallel.collectives import (
    PIPE,
    at_place,
    axis_index,
    axis_size,
    send_down,
    send_up,
    vary,
    varying_axes,
    zeros_like_type,
)
from megajax.core.pipeline.ends import EmbeddingAndHead
from megajax.core.pipeline.model import Batch, Figures
from megajax.core.pipeline.rows import Predicate, Row, Turns, Work, rows_of
from megajax.core.pipeline.stages import Layers, Reduce, Sums, idle, stacked, when
from megajax.core.pipeline.table import Pass, Schedule
from megajax.core.precision import at_least_fp32
from megajax.core.private import tied

Tree = Any
Gather = Callable[[Tree, Tree], tuple[Tree, tuple[Tree, ...]]]
"""The whole weights of the ends and of every layer, from a device's shards of the ends' and of the stacked layers'."""


class Reduction(NamedTuple):
    """Global sums of gradients, in their owners' shards, from local ones."""

    on_stage: Reduce  # over the devices that share a stage
    over_stages: Callable[[Tree], Tree]  # of what that made of the ends'
    everywhere: Callable[[Tree], Tree]  # of the ends'


class Pipeline:
    """One stage's part of the loop, bound to one step's weights and batch. Made inside the `shard_map` region."""

    def __init__(self, ends: EmbeddingAndHead, layers: Layers, num_microbatches: int):
        self.ends, self.layers, self.num_microbatches = ends, layers, num_microbatches
        self.stage, self.num_stages, self.num_chunks = axis_index(PIPE), axis_size(PIPE), layers.num_chunks
        self.x_type = jax.eval_shape(lambda: ends.embedded(0))

    def losses_and_gradients(
        self,
        schedule: Schedule,
        grad_dtype: Any,
        reduction: Reduction | None = None,
        gather: Gather | None = None,
        ticks_at_once: int = 1,
    ) -> tuple[dict[str, Array], Tree, Figures]:
        """The losses by name, the gradients (accumulated in `grad_dtype`), and the layers' figures, all as local sums:
        not yet reduced over the axes over which they vary but losses, weights and figures do not.

        With a `reduction` the gradients are reduced: during the last tick, which is then apart from the loop, those of
        the layers and of what only the head uses. In a pipe, the first stage runs a backward of its first chunk in it.
        Nothing else does, since every other backward precedes one of these; the other stages reduce.

        With `gather` the layers' weights are sharded, and gathered during the first tick, which is then apart, too. In
        a pipe, nothing else happens in it but a forward of the first chunk on the first stage.

        An iteration of the loop computes `ticks_at_once`, and what they leave follows it. Without a pipe these are
        microbatches, which depend on each other only in their sums: XLA overlaps the collectives of one with the
        products of the other.
        """
        self._expect(schedule)
        last = reduction is not None
        first = int(gather is not None and schedule.num_ticks > last)
        in_loop = schedule.num_ticks - first - last
        typed = self if gather is None else self._typed(gather)
        idle_x = idle(self.x_type)
        no_figures = typed.no_figures()

        def tick(bound: Pipeline, row: Row, carry: Tree, reduction: Reduction | None = None) -> Tree:
            reduce = None if reduction is None else reduction.on_stage
            x_wire, grad, x_inbox, grad_inbox, buffer, ends, sums, figures = carry
            grad_wire = self.send(send_down, grad)  # from the previous tick; in transit while the forward runs
            x_inbox, x_in = _receive(schedule.forward, x_inbox, x_wire, row.forward)
            grad_inbox, grad_in = _receive(schedule.backward, grad_inbox, grad_wire, row.backward)
            sums = bound.weight_gradients(schedule, row.early, sums)  # in place of a forward
            # Conditionals one after the other, not one inside the other: nested ones copy the accumulators.
            x = bound.ends.input(row, x_in)
            if schedule.fused:
                if reduce is not None:  # otherwise XLA would begin this tick before the loop
                    x, sums = tied((x, sums))
                context = self._context(row.forward.microbatch)
                (y, new), residuals = bound.layers.forward_with_residuals(row.forward.chunk, x, context)
            else:
                forward = lambda buffer: bound.forward_chunk(row, x, buffer)  # noqa: E731
                y, buffer, new = when(row.forward.runs, forward, lambda buffer: (idle_x, buffer, no_figures), buffer)
            figures = jax.tree.map(jnp.add, figures, new)
            x_wire = self.send(send_up, y)  # in transit while the backward runs

            output = lambda: y if schedule.turns_at_once else at_place(buffer["output"], row.backward.slot)  # noqa: E731
            grad, ends = bound.ends.head(row, output, grad_in, ends)
            if reduction is not None:
                ends, of_head = bound.ends.apart(ends)
                grad, ends, of_head = tied((grad, ends, of_head))  # otherwise XLA would compute the head's last
                sums = sums._replace(of_head=of_head)
            if schedule.fused:
                chunk = row.backward.chunk
                grad, sums = bound.layers.pull_back(chunk, residuals, context, grad, sums, reduce=reduce)
            else:
                grad, sums = bound.backward(row, buffer, grad, sums, None if schedule.deferral else reduce)
            ends = bound.ends.embed_backward(row, grad, ends)
            sums = bound.weight_gradients(schedule, row.late, sums, reduce)
            if reduction is not None:
                shared = reduction.everywhere(ends["shared"]) | reduction.over_stages(sums.of_head)
                ends, sums = ends | {"shared": shared}, sums._replace(of_head=None)
            return x_wire, grad, x_inbox, grad_inbox, buffer, ends, sums, figures

        def in_turn(carry: Tree, values: list[Array]) -> tuple[Tree, None]:
            *others, ends, sums, figures = tick(bound, row_of(values), carry)
            if ticks_at_once > 1:  # otherwise XLA would add the gradients of both before it adds them to the sums
                ends, sums = jax.tree.map(lax.optimization_barrier, (ends, sums))
            return (*others, ends, sums, figures), None

        inboxes = self._inbox(schedule.forward), self._inbox(schedule.backward)
        buffer = None if schedule.fused else typed.buffer(schedule.num_slots, not schedule.turns_at_once)
        carry = idle_x, idle_x, *inboxes, buffer, *typed.sums(grad_dtype, schedule.num_factor_slots), no_figures
        bound = self
        if gather is not None and self.num_stages == 1:
            whole = self._gathered(gather)
            bound = self._with(*whole, awaits=True)
            if first:
                carry = tick(bound, self._row(schedule, 0), carry)
                bound = self._with(*whole)
        elif gather is not None:
            bound, carry = self._first_forward(self._row(schedule, 0), carry, gather)
        if in_loop:
            changing, row_of = rows_of(schedule, self.stage, slice(first, first + in_loop))
            carry = lax.scan(in_turn, carry, changing, in_loop, unroll=min(ticks_at_once, in_loop))[0]
        if reduction is not None:
            carry = tick(bound, self._row(schedule, -1), carry, reduction)
        *_, ends, sums, figures = carry
        # XLA inlines a loop of one tick. Without the barrier every reader of the sums would then stack the gradients of
        # all layers anew.
        ends, sums = jax.tree.map(lax.optimization_barrier, (ends, sums))  # one for each: their types differ
        if self.ends.has_layers:
            figures = jax.tree.map(jnp.add, figures, ends["figures"])
        return ends["losses"], {"shared": ends["shared"], "blocks": sums.total}, figures

    def _row(self, schedule: Schedule, tick: int) -> Row:
        """The row of one tick."""
        values, row_of = rows_of(schedule, self.stage, slice(tick, tick + 1 or None))
        return row_of([column[0] for column in values])

    def _gathered(self, gather: Gather) -> tuple[Tree, tuple[Tree, ...]]:
        return gather(self.ends.shared, self.layers.weights)

    def _with(self, shared: Tree, layers: Tree, *, awaits: bool = False) -> "Pipeline":
        """The same with other weights."""
        other = copy(self)
        vars(other).pop("_forward_types", None)  # found with the others
        other.ends, other.layers = (
            replace(self.ends, shared=shared),
            replace(self.layers, weights=layers, awaits=awaits),
        )
        return other

    def _typed(self, gather: Gather) -> "Pipeline":
        """The same with what stands for the gathered weights where only their types matter."""
        types = jax.eval_shape(lambda shared, layers: gather(shared, layers), self.ends.shared, self.layers.weights)
        shared, layers = jax.tree.map(zeros_like_type, types)
        return self._with(shared, stacked(layers))

    def _first_forward(self, row: Row, carry: Tree, gather: Gather) -> tuple["Pipeline", Tree]:
        """The first tick in a pipe, and the pipeline with the weights that are gathered meanwhile. Stages without a
        forward only gather."""
        x_in, grad, x_inbox, grad_inbox, buffer, ends, sums, figures = carry
        x = self.ends.input(row, x_in)

        def run(buffer: Tree) -> tuple[Tree, ...]:
            whole = self._gathered(gather)
            return *self._with(*whole, awaits=True).forward_chunk(row, x, buffer), whole

        skip = lambda buffer: (x_in, buffer, figures, self._gathered(gather))  # noqa: E731
        y, buffer, figures, (shared, layers) = when(row.forward.runs, run, skip, buffer)
        x_wire = self.send(send_up, y)
        # The loop takes a chunk of the stack by a number that changes, the layers of a single one one by one.
        bound = self._with(shared, stacked(layers) if self.num_chunks > 1 else layers)
        return bound, (x_wire, grad, x_inbox, grad_inbox, buffer, ends, sums, figures)

    def forward(self, schedule: Schedule, finish: Callable[[Array, Batch], Tree]) -> Tree:
        """Forward only: the results of `finish(y, batch)` on the last virtual stage's outputs, every leaf
        [microbatches, …]; zeros on other stages, unless all stages run `finish` together."""
        self._expect(schedule)
        changing, row_of = rows_of(schedule, self.stage)
        idle_x = idle(self.x_type)
        result = jax.eval_shape(lambda: finish(self.ends.broadcast(idle_x, True), self.ends.take(0).batch))
        outputs = jax.tree.map(lambda leaf: zeros_like_type(leaf, (self.num_microbatches,)), result)

        def tick(carry, values):
            row = row_of(values)
            x_wire, x_inbox, outputs = carry
            x_inbox, x_in = _receive(schedule.forward, x_inbox, x_wire, row.forward)
            x = self.ends.input(row, x_in)
            forward = lambda: self.layers.run(row.forward.chunk, x, self._context(row.forward.microbatch))[0]  # noqa: E731
            y = when(row.forward.runs, forward, lambda: idle_x)
            outputs = self.ends.finish(row, y, finish, outputs)
            return (self.send(send_up, y), x_inbox, outputs), None

        return lax.scan(tick, (idle_x, self._inbox(schedule.forward), outputs), changing, schedule.num_ticks)[0][-1]

    def forward_chunk(self, row: Row, x: Array, buffer: Tree) -> tuple[Array, Tree, Figures]:
        """Run a chunk forward on the row's microbatch and store its residuals: output, buffer, and figures."""
        context = self._context(row.forward.microbatch)
        (y, figures), residuals = self.layers.forward(row.forward.chunk, x, context)
        entry = {"residuals": residuals} | ({"output": y} if "output" in buffer else {})
        return y, jax.tree.map(lambda slots, new: slots.at[row.forward.slot].set(new), buffer, entry), figures

    def backward(self, row: Row, buffer: Tree, grad: Array, sums: Sums, reduce: Reduce | None) -> tuple[Array, Sums]:
        """The row's backward, if there is one; with `reduce` it completes the sums."""
        pull = lambda grad, sums: self.backward_chunk(row, buffer, grad, sums, reduce)  # noqa: E731
        if reduce is None:
            return when(row.backward.runs, pull, lambda *carry: carry, grad, sums)
        return self._completed(reduce, row.backward.runs, pull, grad, sums)

    def _completed(self, reduce: Reduce, runs: Predicate, run: Callable, *carry: Any) -> Any:
        """`run(*carry)`, if it `runs`, which adds the last gradients of the first chunk to the sums (the last of
        `carry`) and reduces them. All others are reduced here."""
        *others, sums = carry
        size, skip = self.layers.layers_per_chunk, lambda *carry: (*carry[:-1], _reduced(reduce, carry[-1]))
        if self.num_chunks == 1:
            return when(runs, run, skip, *others, sums)
        first, rest = (_rows(sums.total, at) for at in (slice(size), slice(size, None)))
        *others, sums = when(runs, run, skip, *others, sums._replace(total=first))
        parts = sums.total, reduce("blocks", rest)
        return *others, sums._replace(total=jax.tree.map(lambda *parts: jnp.concatenate(parts), *parts))

    def backward_chunk(
        self, row: Row, buffer: Tree, grad: Array, sums: Sums, reduce: Reduce | None = None
    ) -> tuple[Array, Sums]:
        """Pull the gradient of a chunk's output back to its input."""
        chunk, slot = row.backward.chunk, row.backward.factor_slot
        saved = jax.tree.map(lambda slots: at_place(slots, row.backward.slot), buffer["residuals"])
        context = self._context(row.backward.microbatch)
        residuals = self.layers.restored(chunk, saved, context)
        return self.layers.pull_back(chunk, residuals, context, grad, sums, slot, reduce)

    def weight_gradients(
        self, schedule: Schedule, turns: Turns | None, sums: Sums, reduce: Reduce | None = None
    ) -> Sums:
        """Run the deferred weight gradients whose turn it is. With `reduce` the last of these completes the sums: on
        every stage it is the first chunk's, as the last backward is."""
        if turns is None or schedule.deferral is None or (isinstance(turns.number, int) and turns.number == 0):
            return sums
        num_slots = schedule.deferral.num_slots
        chunk = jnp.asarray(schedule.deferral.chunk)[:, self.stage]

        def run(number: Array, sums: Sums) -> Sums:
            own = chunk[number] if self.num_chunks > 1 else 0
            sums = self.layers.add_weight_gradients(own, sums, number % num_slots)
            # Without the barrier XLA sees the factors unchanged and copies all of them in every tick.
            return sums._replace(factors=jax.tree.map(lax.optimization_barrier, sums.factors))

        if reduce is None:
            return lax.fori_loop(turns.first, turns.first + turns.number, run, sums)
        last = turns.first + turns.number - 1
        if schedule.deferral.late[-1].max() > 1:
            sums = lax.fori_loop(turns.first, last, run, sums)

        run_last = lambda sums: (self.layers.add_weight_gradients(0, sums, last % num_slots, reduce),)  # noqa: E731
        on_all = bool(schedule.deferral.late[-1].all())
        return self._completed(reduce, on_all or turns.number > 0, run_last, sums)[0]

    def residual_types(self) -> list[jax.ShapeDtypeStruct]:
        """Types of the residuals that a stage saves for one microbatch and chunk until its backward."""
        return self._forward_types[1]

    @cached_property
    def _forward_types(self) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
        return jax.eval_shape(lambda x: self.layers.forward(0, x, self._context(0)), idle(self.x_type))

    def factor_types(self) -> Tree:
        """Types of the factors that a stage saves for one chunk until its deferred weight gradients are computed."""
        types = self.layers.factor_types(idle(self.x_type), self._context(0))
        return jax.eval_shape(lambda: jax.tree.map(lambda type_: idle(type_, (self.layers.layers_per_chunk,)), types))

    def no_figures(self) -> Figures:
        """Zeros like a chunk's figures."""
        if self.num_stages > 1:  # which need these types anyway
            return jax.tree.map(zeros_like_type, self._forward_types[0][1])
        types = jax.eval_shape(lambda: self.layers.run(0, idle(self.x_type), self._context(0)))[1]
        return jax.tree.map(zeros_like_type, types)

    def buffer(self, num_slots: int, with_output: bool) -> Tree:
        """The ring buffer; `with_output` includes chunks' outputs, for a head that runs later than its layers."""
        types: Tree = {"residuals": self.residual_types()} | ({"output": self.x_type} if with_output else {})
        return jax.tree.map(lambda type_: vary(idle(type_, (num_slots,)), (PIPE,)), types)  # like the slot numbers

    def sums(self, dtype: Any, num_factor_slots: int = 0) -> tuple[Tree, Sums]:
        """Zeros for a step's sums: losses, gradients and figures of the ends, and gradients of the layers with the
        buffered factors of deferred ones."""
        trained = {"shared": {} if self.ends.frozen else self.ends.shared, "blocks": self.layers.trained()}
        zeros = jax.tree.map(lambda w: vary(jnp.zeros(w.shape, dtype), sorted(varying_axes(w))), trained)
        loss = vary(jnp.zeros((), at_least_fp32(dtype)), self.ends.axes)
        figures = self.no_figures() if self.ends.has_layers else {}
        losses = dict.fromkeys(self.ends.coefficients, loss)
        ends = {"losses": losses, "shared": zeros["shared"], "figures": figures}
        factors = None
        if num_factor_slots:
            factors = jax.tree.map(lambda type_: idle(type_, (num_factor_slots,)), self.factor_types())
        return ends, Sums(zeros["blocks"], factors)

    def _expect(self, schedule: Schedule) -> None:
        expected = self.num_stages, self.num_chunks, self.num_microbatches
        assert (schedule.num_stages, schedule.num_chunks, schedule.num_microbatches) == expected, expected

    def _context(self, microbatch: Array | int) -> Tree:
        return vary(self.ends.take(microbatch).context, (PIPE,))

    def send(self, send: Callable[..., Array], x: Array) -> Array:
        """Send to a neighbour, if there is one. The barrier keeps the transfer here: XLA would move it to the start of
        the next tick, which would then wait for it."""
        return lax.optimization_barrier(send(x, ring=self.num_chunks > 1)) if self.num_stages > 1 else x

    def _inbox(self, direction: Pass) -> Array | None:
        """Slots for what arrives more than a tick before its use, and a spare slot for ticks in which nothing does."""
        return None if direction.direct else idle(self.x_type, (direction.inbox_depth + 1,))


def _reduced(reduce: Reduce, sums: Sums) -> Sums:
    return sums._replace(total=reduce("blocks", sums.total), of_head=reduce("shared", sums.of_head))


def _rows(tree: Tree, at: slice) -> Tree:
    return jax.tree.map(lambda x: x[at], tree)


def _receive(direction: Pass, inbox: Array | None, wire: Array, work: Work) -> tuple[Array | None, Array]:
    """Put the arrival into its inbox slot; returns the inbox and this tick's input."""
    if inbox is None:
        return None, wire
    inbox = inbox.at[work.arrival].set(wire)
    return inbox, at_place(inbox, work.source)

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
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.core.parallel.collectives import (
    PIPE,
    axis_index,
    axis_size,
    send_down,
    send_up,
    vary,
)
from megajax.core.pipeline.buffers import idle, stored, taken, when
from megajax.core.pipeline.ends import EmbeddingAndHead, HeadTotals
from megajax.core.pipeline.kinds import LayersOfKinds
from megajax.core.pipeline.model import Batch, Figures
from megajax.core.pipeline.rows import Number, Predicate, Row, Turns, Work, rows_of
from megajax.core.pipeline.stages import Layers, Output
from megajax.core.pipeline.sums import Gradients, Last, Reduction, Sums
from megajax.core.pipeline.table import Deferral, Pass, Schedule
from megajax.core.private import tied
from megajax.core.trees import Tree

Gather = Callable[[Tree, Tree], tuple[Tree, tuple[Tree, ...]]]
"""The whole weights of the ends and of every layer, from a device's shards of the ends' and of the stacked layers'."""


class Carry(NamedTuple):
    """What a stage has between two ticks.

    Attributes:
        x, grad: the output of its last forward, under way up; the gradient of its last backward's input.
        x_inbox, grad_inbox: slots for what arrives more than a tick before its use; None if nothing does.
        saved: ring buffer of the residuals, and outputs if the head runs later; None if a backward follows at once.
        totals: what the head adds up.
        sums: gradients of its layers.
    """

    x: Array
    grad: Array
    x_inbox: Array | None
    grad_inbox: Array | None
    saved: Tree
    totals: HeadTotals
    sums: Sums


class Pipeline:
    """One stage's part of the loop, bound to one step's weights and batch. Made inside the `shard_map` region."""

    def __init__(self, ends: EmbeddingAndHead, layers: Layers | LayersOfKinds, num_microbatches: int):
        self.ends, self.layers, self.num_microbatches = ends, layers, num_microbatches
        self.stage, self.num_stages, self.num_chunks = axis_index(PIPE), axis_size(PIPE), layers.num_chunks
        self.x_type = jax.eval_shape(partial(ends.embedded, 0))

    def losses_and_gradients(
        self,
        schedule: Schedule,
        reduction: Reduction | None = None,
        gather: Gather | None = None,
        ticks_at_once: int = 1,
    ) -> tuple[dict[str, Array], Gradients, Figures]:
        """The losses by name, the gradients, and the layers' figures, all as local sums: not yet reduced over the axes
        over which they vary but losses, weights and figures do not. With a `reduction` the gradients are reduced; with
        `gather` the weights are shards, and gathered here.

        An iteration of the loop computes `ticks_at_once`, and what they leave follows it. Without a pipe these are
        microbatches, which depend on each other only in their sums: XLA overlaps the collectives of one with the
        products of the other.
        """
        self._expect(schedule)
        bound, first, end = self, 0, schedule.num_ticks - (reduction is not None)
        if gather is None:
            carry = self.begin(schedule)
        else:
            carry, first = self._typed(gather).begin(schedule), min(1, end)
            bound, carry = self.first_tick(schedule, carry, gather, alone=end == 0)
        if end > first:
            changing, row_of = rows_of(schedule, self.stage, slice(first, end))
            ticks = partial(bound._ticks, schedule, row_of, ticks_at_once)
            carry, _ = lax.scan(ticks, carry, changing, end - first, unroll=min(ticks_at_once, end - first))
        if reduction is not None:
            carry = bound.last_tick(schedule, carry, reduction)
        totals = carry.totals
        return totals.losses, totals.sums.finish() | carry.sums.finish(), totals.figures

    def _ticks(
        self, schedule: Schedule, row_of: Callable, at_once: int, carry: Carry, values: list[Array]
    ) -> tuple[Carry, None]:
        carry = self.tick(schedule, row_of(values), carry)
        if at_once > 1:  # otherwise XLA would add the gradients of both before it adds them to the sums
            totals, sums = jax.tree.map(lax.optimization_barrier, (carry.totals, carry.sums))
            carry = carry._replace(totals=totals, sums=sums)
        return carry, None

    def tick(self, schedule: Schedule, row: Row, carry: Carry) -> Carry:
        """One tick. Conditionals follow each other: inside others they would copy the sums."""
        carry, x_in, grad_in = self._received(schedule, row, carry)
        sums = self.weight_gradients(schedule, row.early, carry.sums)  # in place of a forward
        y, saved, figures = self._forward(schedule, row, self.ends.input(row, x_in), carry.saved)
        x = self._send(send_up, y)  # in transit while the backward runs
        grad, totals = self._head(schedule, row, y, saved, grad_in, carry.totals.counting(figures))
        grad, sums = self._backward(schedule, row, saved, grad, sums)
        totals = totals._replace(sums=self.ends.embed_backward(row, grad, totals.sums))
        sums = self.weight_gradients(schedule, row.late, sums)
        saved = None if schedule.fused else saved
        return Carry(x, grad, carry.x_inbox, carry.grad_inbox, saved, totals, sums)

    def first_tick(self, schedule: Schedule, carry: Carry, gather: Gather, *, alone: bool) -> tuple["Pipeline", Carry]:
        """The first tick, apart from the loop, and the pipeline with the weights that are gathered in it, or in the
        last tick if that is `alone`. In a pipe only the first stage computes in it: its first chunk's forward."""
        row = self._row(schedule, 0)
        if self.num_stages == 1:
            whole = gather(self.ends.shared, self.layers.weights)
            awaiting = self._with(*whole, awaits=True)
            return (awaiting, carry) if alone else (self._with(*whole), awaiting.tick(schedule, row, carry))
        operands = gather, row, self.ends.input(row, carry.x), carry.saved, carry.totals.figures
        done = when(row.forward.runs, self._gathered_and_run, *operands, otherwise=self._gathered)
        x, saved, figures, (shared, layers) = done
        # The loop takes a chunk of the stack by a number that changes, the layers of a single one one by one.
        bound = self._with(shared, layers, stack=self.num_chunks > 1)
        totals = carry.totals._replace(figures=figures)
        return bound, carry._replace(x=self._send(send_up, x), saved=saved, totals=totals)

    def last_tick(self, schedule: Schedule, carry: Carry, reduction: Reduction) -> Carry:
        """The last tick, apart from the loop: gradients of the layers, and of what only the head uses, are reduced in
        it. In a pipe the first stage runs a backward of its first chunk. Nothing else does, since every other backward
        precedes one of these; the other stages reduce."""
        row = self._row(schedule, -1)
        carry, x_in, grad_in = self._received(schedule, row, carry)
        sums = self.weight_gradients(schedule, row.early, carry.sums)
        x = self.ends.input(row, x_in)
        x, sums = tied((x, sums)) if schedule.fused else (x, sums)  # otherwise XLA would begin it before the loop
        y, saved, figures = self._forward(schedule, row, x, carry.saved)
        grad, totals = self._head(schedule, row, y, saved, grad_in, carry.totals.counting(figures))
        grad, totals, of_head = tied(
            (grad, *self.ends.split_head(totals))
        )  # otherwise XLA would compute the head's last
        last = Last(of_head, reduction)
        grad, sums = self._backward(schedule, row, saved, grad, sums, None if schedule.deferral else last)
        ends = self.ends.embed_backward(row, grad, totals.sums).gradients
        layers = self.weight_gradients(schedule, row.late, sums, last).gradients
        shared = reduction.everywhere(ends) | reduction.over_stages({path: layers.pop(path) for path in of_head})
        totals, x = totals._replace(sums=Sums(shared)), self._send(send_up, y)
        return carry._replace(x=x, totals=totals, sums=Sums(layers))

    # The parts of a tick.

    def _received(self, schedule: Schedule, row: Row, carry: Carry) -> tuple[Carry, Array, Array]:
        """The inputs of the forward and the backward."""
        grad = self._send(send_down, carry.grad)  # from the previous tick; in transit while the forward runs
        x_inbox, x_in = _receive(schedule.forward, carry.x_inbox, carry.x, row.forward)
        grad_inbox, grad_in = _receive(schedule.backward, carry.grad_inbox, grad, row.backward)
        return carry._replace(x_inbox=x_inbox, grad_inbox=grad_inbox), x_in, grad_in

    def _forward(self, schedule: Schedule, row: Row, x: Array, saved: Tree) -> tuple[Array, Tree, Figures]:
        """Output, what is saved with it, and figures. If a backward always follows at once, it is saved in no slot."""
        if not schedule.fused:
            return when(row.forward.runs, self.forward_chunk, row, x, saved, otherwise=self._no_forward)
        context = self._context(row.forward.microbatch)
        (y, figures), residuals = self.layers.forward_with_residuals(row.forward.chunk, x, context)
        return y, (residuals, context), figures

    def forward_chunk(self, row: Row, x: Array, saved: Tree) -> tuple[Array, Tree, Figures]:
        """Run a chunk forward on the row's microbatch and store its residuals: output, buffer, and figures."""
        (y, figures), residuals = self._saving(row.forward.chunk, x, self._context(row.forward.microbatch))
        new = {"residuals": residuals} | ({"output": y} if "output" in saved else {})
        return y, stored(saved, row.forward.slot, new), figures

    def _saving(self, chunk: Number, x: Array, context: Tree) -> tuple[Output, Tree]:
        """A chunk's output with its figures, and what is saved for its backward: its residuals, or its input, from
        which they are computed again."""
        if self.layers.recompute_stage:
            return self.layers.run(chunk, x, context), [x]
        return self.layers.forward_with_residuals(chunk, x, context)

    def _no_forward(self, _: Row, __: Array, saved: Tree) -> tuple[Array, Tree, Figures]:
        return idle(self.x_type), saved, self.no_figures()

    def _head(
        self, schedule: Schedule, row: Row, y: Array, saved: Tree, grad_in: Array, totals: HeadTotals
    ) -> tuple[Array, HeadTotals]:
        if schedule.turns_at_once:
            return self.ends.head(row, y, None, grad_in, totals)
        return self.ends.head(row, saved["output"], row.backward.slot, grad_in, totals)

    def _backward(
        self, schedule: Schedule, row: Row, saved: Tree, grad: Array, sums: Sums, last: Last | None = None
    ) -> tuple[Array, Sums]:
        """Pull the gradient of a chunk's output back to its input, if there is a backward."""
        operands = schedule, row, saved, (grad, sums)
        if last is None:
            return when(row.backward.runs, self._pull_back, None, *operands)
        return self._completed(row.backward.runs, self._pull_back, last, *operands)

    def _pull_back(
        self, last: Last | None, schedule: Schedule, row: Row, saved: Tree, carry: tuple[Array, Sums]
    ) -> tuple[Array, Sums]:
        chunk, slot = row.backward.chunk, row.backward.factor_slot
        if schedule.fused:
            residuals, context = saved
        else:
            context, kept = self._context(row.backward.microbatch), taken(saved["residuals"], row.backward.slot)
            again = self.layers.recompute_stage
            residuals = self.layers.forward_with_residuals(chunk, kept[0], context)[1] if again else kept
        return self.layers.pull_back(chunk, residuals, context, *carry, slot, last)

    def weight_gradients(self, schedule: Schedule, turns: Turns | None, sums: Sums, last: Last | None = None) -> Sums:
        """Run the deferred weight gradients whose turn it is. The `last` of all is the first chunk's on every stage, as
        the last backward is."""
        deferral = schedule.deferral
        if deferral is None or turns is None or (isinstance(turns.number, int) and turns.number == 0):
            return sums
        run, end = partial(self._weight_gradients, deferral), turns.first + turns.number - int(last is not None)
        if last is None or deferral.late[-1].max() > 1:
            sums = lax.fori_loop(turns.first, end, run, sums)
        if last is None:
            return sums
        runs = bool(deferral.late[-1].all()) or turns.number > 0
        return self._completed(runs, self._last_weight_gradients, last, end % deferral.num_slots, (None, sums))[1]

    def _weight_gradients(self, deferral: Deferral, number: Array, sums: Sums) -> Sums:
        chunk = jnp.asarray(deferral.chunk)[:, self.stage][number] if self.num_chunks > 1 else 0
        sums = self.layers.add_weight_gradients(chunk, sums, number % deferral.num_slots)
        # Without the barrier XLA sees the factors unchanged and copies all of them in every tick.
        return sums._replace(factors=jax.tree.map(lax.optimization_barrier, sums.factors))

    def _last_weight_gradients(self, last: Last, slot: Array, carry: tuple[None, Sums]) -> tuple[None, Sums]:
        return None, self.layers.add_weight_gradients(0, carry[1], slot, last)

    def _completed(self, runs: Predicate, run: Callable, last: Last, *operands: Tree) -> tuple[Tree, Sums]:
        """`run(last, *operands)`, if it `runs`, which completes the sums of the first chunk, those in the last operand,
        and reduces them. All others are reduced here."""
        *before, (carry, sums) = operands
        slots, several = self.layers.slots, self.num_chunks > 1
        first = sums._replace(gradients={p: x[: slots(p)] for p, x in sums.gradients.items()}) if several else sums
        carry, reduced = when(runs, run, last, *before, (carry, first), otherwise=_only_reduced)
        if several:
            rest = last.reduction.on_stage({path: x[slots(path) :] for path, x in sums.gradients.items()})
            joined = {path: jnp.concatenate([reduced.gradients[path], stack]) for path, stack in rest.items()}
            reduced = Sums(reduced.gradients | joined)
        return carry, reduced

    # Before the first tick.

    def begin(self, schedule: Schedule) -> Carry:
        """Nothing under way, nothing saved, all sums zero."""
        x = idle(self.x_type)
        inboxes = self._inbox(schedule.forward), self._inbox(schedule.backward)
        saved = None if schedule.fused else self.buffer(schedule.num_slots, not schedule.turns_at_once)
        return Carry(x, x, *inboxes, saved, self.totals(), self.sums(schedule.num_factor_slots))

    def totals(self) -> HeadTotals:
        """Zeros for what the head adds up."""
        summation = self.layers.summation
        loss = vary(summation.no_loss(), self.ends.axes)
        losses = dict.fromkeys(self.ends.coefficients, loss)
        return HeadTotals(losses, Sums(summation.zeros(self.ends.trained())), self.no_figures())

    def sums(self, num_factor_slots: int) -> Sums:
        """Zeros for the gradients of the layers, with a buffer of factors if there are slots."""
        factors = idle(self.factor_types(), num_factor_slots) if num_factor_slots else None
        return Sums(self.layers.no_gradients(), factors)

    def buffer(self, num_slots: int, with_output: bool) -> Tree:
        """The ring buffer; `with_output` includes chunks' outputs, for a head that runs later than its layers."""
        types: Tree = {"residuals": self.residual_types()} | ({"output": self.x_type} if with_output else {})
        return vary(idle(types, num_slots), (PIPE,))  # like the slot numbers

    def residual_types(self) -> list[jax.ShapeDtypeStruct]:
        """Types of the residuals that a stage saves for one microbatch and chunk until its backward."""
        return self._forward_types[1]

    @cached_property
    def _forward_types(self) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
        return jax.eval_shape(lambda x: self._saving(0, x, self._context(0)), idle(self.x_type))

    def factor_types(self) -> Tree:
        """Types of the factors that a stage saves for one chunk until its deferred weight gradients are computed."""
        return self.layers.factor_types(idle(self.x_type), self._context(0))

    def no_figures(self) -> Figures:
        """Zeros like a chunk's figures."""
        if self.num_stages > 1:  # which need these types anyway
            return idle(self._forward_types[0][1])
        return idle(jax.eval_shape(lambda: self.layers.run(0, idle(self.x_type), self._context(0)))[1])

    def _inbox(self, direction: Pass) -> Array | None:
        """Slots for what arrives more than a tick before its use, and a spare slot for ticks in which nothing does."""
        return None if direction.direct else idle(self.x_type, direction.inbox_depth + 1)

    # Gathered weights.

    def _typed(self, gather: Gather) -> "Pipeline":
        """The same with what stands for the gathered weights where only their types matter."""
        shared, layers = idle(jax.eval_shape(gather, self.ends.shared, self.layers.weights))
        return self._with(shared, layers, stack=True)

    def _with(self, shared: Tree, layers: Tree, **how: bool) -> "Pipeline":
        """The same with other weights; `how`: see `Layers.with_weights`."""
        other = copy(self)
        vars(other).pop("_forward_types", None)  # found with the others
        other.ends = replace(self.ends, shared=shared)
        other.layers = self.layers.with_weights(layers, **how)
        return other

    def _gathered(self, gather: Gather, _: Row, x: Array, saved: Tree, figures: Figures) -> tuple[Tree, ...]:
        return x, saved, figures, gather(self.ends.shared, self.layers.weights)

    def _gathered_and_run(self, gather: Gather, row: Row, x: Array, saved: Tree, _: Figures) -> tuple[Tree, ...]:
        whole = gather(self.ends.shared, self.layers.weights)
        return *self._with(*whole, awaits=True).forward_chunk(row, x, saved), whole

    # Forward only.

    def forward(self, schedule: Schedule, finish: Callable[[Array, Batch], Tree]) -> Tree:
        """The results of `finish(y, batch)` on the last virtual stage's outputs, every leaf [microbatches, …]; zeros on
        other stages, unless all stages run `finish` together."""
        self._expect(schedule)
        changing, row_of = rows_of(schedule, self.stage)
        x = idle(self.x_type)
        result = jax.eval_shape(lambda: finish(self.ends.broadcast(x, True), self.ends.take(0).batch))
        carry = x, self._inbox(schedule.forward), idle(result, self.num_microbatches)
        tick = partial(self._forward_tick, schedule, row_of, finish)
        return lax.scan(tick, carry, changing, schedule.num_ticks)[0][-1]

    def _forward_tick(
        self, schedule: Schedule, row_of: Callable, finish: Callable, carry: tuple[Tree, ...], values: list[Array]
    ) -> tuple[tuple[Tree, ...], None]:
        row, (x_wire, x_inbox, outputs) = row_of(values), carry
        x_inbox, x_in = _receive(schedule.forward, x_inbox, x_wire, row.forward)
        y = when(row.forward.runs, self._run, row, self.ends.input(row, x_in))
        outputs = self.ends.finish(row, y, finish, outputs)
        return (self._send(send_up, y), x_inbox, outputs), None

    def _run(self, row: Row, x: Array) -> Array:
        return self.layers.run(row.forward.chunk, x, self._context(row.forward.microbatch))[0]

    # What all need.

    def _expect(self, schedule: Schedule) -> None:
        expected = self.num_stages, self.num_chunks, self.num_microbatches
        assert (schedule.num_stages, schedule.num_chunks, schedule.num_microbatches) == expected, expected

    def _row(self, schedule: Schedule, tick: int) -> Row:
        """The row of one tick."""
        values, row_of = rows_of(schedule, self.stage, slice(tick, tick + 1 or None))
        return row_of([column[0] for column in values])

    def _context(self, microbatch: Array | int) -> Tree:
        return vary(self.ends.take(microbatch).context, (PIPE,))

    def _send(self, send: Callable[..., Array], x: Array) -> Array:
        """Send to a neighbour, if there is one. The barrier keeps the transfer here: XLA would move it to the start of
        the next tick, which would then wait for it."""
        return lax.optimization_barrier(send(x, ring=self.num_chunks > 1)) if self.num_stages > 1 else x


def _only_reduced(last: Last, *operands: Tree) -> tuple[Tree, Sums]:
    carry, sums = operands[-1]
    return carry, Sums(last.reduction.on_stage(sums.gradients) | last.reduction.on_stage(last.of_head))


def _receive(direction: Pass, inbox: Array | None, wire: Array, work: Work) -> tuple[Array | None, Array]:
    """Put the arrival into its inbox slot; returns the inbox and this tick's input."""
    if inbox is None:
        return None, wire
    inbox = stored(inbox, work.arrival, wire)
    return inbox, taken(inbox, work.source)

"""What a training step communicates: the collectives of a traced layer and of the traced ends (`plan/traced.py`), times
how often they run, plus those for weights and between stages, by arithmetic on shapes.

`communication` has every collective of `core/program/train_step.py`, counted as `core/program/communication.py` counts
the step's jaxpr. It also says how many of them are really sent: a stage that has nothing to run in a tick, or does not
have an end of the model, sends nothing.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

from megajax.core.axes import BATCH_AXES, DEVICE_ORDER, ROW_AXES
from megajax.core.backend import GPU, Backend
from megajax.core.config import MeshConfig
from megajax.core.models.family import family_of
from megajax.core.models.freeze import is_head
from megajax.core.models.prediction import prediction_losses
from megajax.core.parallel.collectives import PIPE, TENSOR, spec_axes
from megajax.core.parallel.shards import NOT_SHARDED
from megajax.core.pipeline.deferral import PassTimes
from megajax.core.pipeline.schedule import make_schedule
from megajax.core.pipeline.table import Deferral
from megajax.core.program.communication import Collective
from megajax.core.program.program import batch_form
from megajax.core.program.weight import Shape, Weight
from megajax.plan.costs import Sent, StepCost
from megajax.plan.machines import Machine
from megajax.plan.sizes import ONCE, Occurrences, Sizes, steady_state_microbatches
from megajax.plan.traced import step_cost
from megajax.plan.update import dealt
from megajax.settings.config import Config

Axes = tuple[str, ...]
REDUCE, GATHER, SCATTER = "all-reduce", "all-gather", "reduce-scatter"
PERMUTE, EXCHANGE = "permute", "all-to-all"
OF_HEAD = "of the head "


@dataclass(frozen=True)
class Communication(Collective):
    """A collective of a training step."""

    purpose: str  # the part of the step, then after a colon what it is for
    sent: int  # how often the device that sends it most really does; `count` includes every tick of every stage

    @property
    def part(self) -> str:
        """The part of the step that it belongs to."""
        return self.purpose.partition(":")[0]


def communication(config: Config, cost: StepCost | None = None, backend: Backend = GPU) -> list[Communication]:
    """Everything that a training step of a valid configuration communicates, per device, in program order. Kinds of
    devices differ only in whether the gradients of layers are reduced one by one."""
    alike = config  # with deferred weight gradients it matters who has some in the last tick
    if config.pipeline.weight_gradients == "together":
        alike = replace(config, train=replace(config.train, microbatch=1, remat="none"))
    before, after = outside_the_loop(alike, backend)
    return [*before, *in_the_loop(config, cost or step_cost(config, backend), backend), *after]


@lru_cache(maxsize=1024)
def outside_the_loop(config: Config, backend: Backend = GPU) -> tuple[list[Communication], list[Communication]]:
    """What is sent before and after the loop, which does not depend on microbatches or recomputation."""
    step = _Step(config, backend)
    return [*step.targets(), *step.scales()], [*step.after_the_loop()]


def in_the_loop(config: Config, cost: StepCost, backend: Backend = GPU) -> list[Communication]:
    """What is sent for microbatches."""
    return [*_Step(config, backend).loop(cost)]


def totals(ops: Iterable[Collective]) -> Counter:
    """Operands communicated by kind, axes, shape and bytes, with their counts, for comparing two lists."""
    counts: Counter = Counter()
    for op in ops:
        for shape in op.shapes:
            counts[op.kind, op.axes, shape, op.num_bytes // len(op.shapes)] += op.count
    return counts


def sent_by_axes(config: Config) -> dict[tuple[str, str], tuple[int, int]]:
    """By axes (as `data,pipe`) and kind: how many collectives the busiest device takes part in, and the bytes that it
    sends in them. Axes of size 1 send nothing."""
    mesh = config.mesh
    summed: dict[tuple[str, str], tuple[int, float]] = {}
    for op in communication(config):
        axes = ",".join(axis for axis in op.axes if mesh.size_of((axis,)) > 1)
        if axes:
            count, sent = summed.get((axes, op.kind), (0, 0.0))
            again = op.sent * op.bytes_sent(mesh.size_of(op.axes))
            summed[axes, op.kind] = count + op.sent, sent + again
    return {key: (count, round(sent)) for key, (count, sent) in summed.items()}


def total_sent(config: Config, ops: Iterable[Collective]) -> int:
    """The bytes that a device sends in all of these, with each one's count."""
    return round(sum(op.count * op.bytes_sent(config.mesh.size_of(op.axes)) for op in ops))


@lru_cache(maxsize=65536)
def group_of(axes: tuple[str, ...], mesh: MeshConfig, server: int) -> tuple[int, int]:
    """The size of a group that a collective over these axes runs in, and how many of its devices share a server."""
    size, stride, neighbours = 1, 1, 1
    for axis in reversed(DEVICE_ORDER):
        devices = mesh.size_of((axis,))
        if axis in axes:
            size *= devices
            neighbours *= max(1, min(devices, server // stride))
        stride *= devices
    return size, neighbours


def seconds_of(collective: Collective, mesh: MeshConfig, machine: Machine) -> float:
    """Seconds for one such collective with nothing else running.

    Devices are numbered as `mesh.make_mesh` places them, and servers hold neighbouring numbers. A ring passes through
    all members in a server before it goes to the next one, and all of them contribute their network adapters. All
    groups of an axis run at the same time, each on its own members' adapters.
    """
    kind, rates = collective.kind, machine.efficiency
    size, neighbours = group_of(collective.axes, mesh, machine.server)
    if size == 1:
        return 0.0
    if neighbours >= size:
        rate = machine.link * (rates.all_reduce if kind == "all-reduce" else rates.others)
        latency = rates.server_latency
    else:
        adapters = 1 if kind == "permute" else neighbours
        rate = min(machine.link * rates.others, adapters * machine.network * rates.network)
        latency = rates.network_latency
    return collective.bytes_sent(size) / rate + latency


def one(purpose: str, kind: str, axes: Axes, shape: Shape, item: int, times: Occurrences) -> Communication:
    """A collective with one operand, whose elements have `item` bytes."""
    return Communication(kind, axes, (shape,), prod(shape) * item, times.count, purpose, times.sent)


class _Step(Sizes):
    """The sizes of a step, and what it communicates for weights (`core/program/train_step.py`,
    `core/parallel/shards.py`) and between stages."""

    def loop(self, cost: StepCost) -> Iterator[Communication]:
        """The passes of embedding, layers and head. ZeRO-3 gathers their weights for each, and scatters the gradients.
        An embedding that is not linear in its weights runs forward again in its backward pass, and so may a stage."""
        layer, ends = cost.layer, cost.ends
        yield from self.p2p_transfers()
        yield from self._pass("embedding", "shared", ends.embedding, self.embedding_runs)
        yield from self._pass("layers forward", "blocks", layer.forward, self.forward_runs)
        yield from self._pass("head", "shared", ends.head, self.head_runs)
        yield from self.scattered("head", "shared", self.head_runs)
        if self.recomputes_stage:
            yield from self._pass("layers backward", "blocks", layer.forward, self.backward_runs)
        together = () if self.defers else layer.weight_gradients
        yield from self._pass("layers backward", "blocks", (*layer.backward, *together), self.backward_runs)
        yield from self.scattered("layers backward", "blocks", self.backward_runs, later=False)
        linear = family_of(self.config.model).linear_embedding(self.config.model)
        again = "none" if linear and self.config.bitwise <= 1 else "shared"
        yield from self._pass("embedding backward", again, ends.embedding_backward, self.embedding_backward_runs)
        if linear and self.config.bitwise > 1:  # with parts it is not computed as a linear one
            yield from self._pass("embedding backward", "none", ends.embedding, self.embedding_backward_runs)
        for weight in self.held.trained if self._in_parts and self.splits_sequence else ():
            times = self.backward_runs if weight.stack else self.head_runs
            if weight.is_vector:
                yield from self._in_tree("gradients", REDUCE, (TENSOR,), (*weight.shape[-1:],), times)
        yield from self.scattered_by_embedding("embedding backward")
        if self.defers and (layer.weight_gradients or self.zero == 3):
            times = self.weight_gradient_times
            yield from self._pass("weight gradients", "none", layer.weight_gradients, times)
            yield from self.scattered("weight gradients", "blocks", times, later=True)

    def _pass(self, part: str, room: str, sent: Iterable[Sent], times: Occurrences) -> Iterator[Communication]:
        yield from self.gathered(part, room, times)
        maximum = next((op for op in sent if part == "head" and op.kind == REDUCE), None)  # the first: of the logits
        for op in sent:
            shape = op.operand.dims.shape(self.microbatch)
            counts = Occurrences(op.count * times.count, op.count * times.sent)
            if self._in_parts and TENSOR in op.axes and op.kind != GATHER and op is not maximum:
                yield from self._in_tree(part, op.kind, op.axes, shape, counts)
            else:
                yield one(part, op.kind, op.axes, shape, op.operand.item, counts)

    @property
    def _in_parts(self) -> bool:
        """Whether sums over `tensor` are made in a tree (`parallel/fixed_tree.py`)."""
        return self.config.bitwise > 1 and self.config.mesh.tensor > 1

    def _in_tree(self, part: str, kind: str, axes: Axes, shape: Shape, times: Occurrences) -> Iterator[Communication]:
        """A sum, in shards or whole."""
        size, devices = prod(shape), self.config.mesh.size_of(axes)
        divided = size % devices == 0
        if kind == SCATTER:
            yield one(part, EXCHANGE, axes, (devices, *shape[:1], shape[1] // devices, *shape[2:]), self.wide, times)
            return
        if divided:
            yield one(part, EXCHANGE, axes, (devices, size // devices), self.wide, times)
        yield one(part, GATHER, axes, (size // devices,) if divided else shape, self.wide, times)

    # In the loop over ticks: ZeRO-3 gathers and scatters wherever weights are used.

    def gathered(self, purpose: str, room: str, times: Occurrences) -> Iterator[Communication]:
        """All weights of a room, `shared` or one layer of the `blocks`, and adapters."""
        for weight in _sharded_per_use(room, (*self.held.weights, *self.held.adapters)):
            copied = self.is_copied(weight)
            if not copied or self.config.model.high_precision_ends != (0, 0):
                item = weight.computed_in(self.item, self.wide)
                yield one(purpose, GATHER, weight.computed.axes, weight.shard, item, times)
            for shape, item, sharded in self.parts_of_copies(weight) if copied else ():
                if sharded:
                    yield one(purpose, GATHER, weight.computed.axes, shape, item, times)

    def scattered(
        self, purpose: str, room: str, times: Occurrences, later: bool | None = None
    ) -> Iterator[Communication]:
        """Scatter the gradients of everything trained in a room; for a layer only those that come `later`, because they
        are deferred, or only the others."""
        for weight in _sharded_per_use(room, self.held.trained):
            if later is None or later == (self.defers and weight.of_product):
                yield one(purpose, SCATTER, weight.computed.axes, (*self.digits, *weight.padded), self._sum_item, times)

    def scattered_by_embedding(self, purpose: str) -> Iterator[Communication]:
        """Scatter the gradients that the embedding's backward pass has: also those of what only the head uses, zeros,
        but not where the last pass reduces these."""
        times, apart = self.embedding_backward_runs, int(self.overlaps_reductions)
        fewer = Occurrences(times.count - apart, times.sent - apart)
        for weight in _sharded_per_use("shared", self.held.trained):
            each = fewer if self._head_note(weight) else times
            yield one(purpose, SCATTER, weight.computed.axes, (*self.digits, *weight.padded), self._sum_item, each)

    def p2p_transfers(self) -> Iterator[Communication]:
        """Activations to the next stage and gradients to the previous one, in every tick that may have some."""
        ticks = {"up": self.ticks, "down": self.ticks - self._split_ticks[0]} if self.config.mesh.pipe > 1 else {}
        for what, number in ticks.items():
            yield one(f"p2p: {what}", PERMUTE, (PIPE,), self.own, self.item, Occurrences(number, number))

    @property
    def weight_gradient_times(self) -> Occurrences:
        """How often the program has a layer's deferred weight gradients: they run in one or two places of a tick,
        before the forward or after the backward. The last ones may be apart, after those of the last tick before
        them, in a loop whose length is known if it is the same on all stages."""
        early, late = self._deferral.early, self._deferral.late
        if not self.overlaps_reductions:
            return Occurrences((int(early.any()) + int(late.any())) * self.backward_runs.count, self.backward_runs.sent)
        places, last = int(early[:-1].any()) + int(late[:-1].any()), late[-1]
        before = 0 if last.max() == 1 else int(last[0] - 1) if (last == last[0]).all() else 1
        return Occurrences((places * self._split_ticks[1] + before + 1) * self.layers_of_chunk, self.backward_runs.sent)

    @property
    def _deferral(self) -> Deferral:
        pipeline, pipe = self.config.pipeline, self.config.mesh.pipe
        settled = steady_state_microbatches(pipeline.schedule, pipe, self.microbatches)
        return _deferral(pipeline.schedule, pipe, settled, pipeline.chunks, pipeline.deferring())

    # Once per step, before and after the loop.

    def targets(self) -> Iterator[Communication]:
        """How many targets the losses have in the global batch, and how many sequences experts see."""
        sequences = ("sequences",) * (self.config.model.num_experts > 0)
        for what in (*("targets" for _ in self._losses), *sequences):
            yield one(f"losses: numbers of {what}", REDUCE, self._mesh_axes(ROW_AXES), (), self.counted, ONCE)

    def scales(self) -> Iterator[Communication]:
        """The scales of weights in 8 bits, if devices share the dim that a product sums over."""
        slots = self.layers_of_chunk * self.config.pipeline.chunks
        for weight in self.copied_in_step:
            scales = [shape for shape, *_ in self.parts_of_copies(weight)][1::2]
            for axes, shape in zip(weight.axes_of_sides, scales, strict=True):
                if axes:
                    yield one("weights in 8 bits: scales", REDUCE, axes, (1, slots, *shape), 4, ONCE)

    def after_the_loop(self) -> Iterator[Communication]:
        """Reduce gradients and losses to global sums; the global gradient norm; ZeRO-1's updated weights."""
        per_step = [weight for weight in self.held.trained if weight.per_step != NOT_SHARDED]
        for weight in per_step:
            name = f"gradients: {self._head_note(weight)}over data"
            for padded, times in self._sums(weight, (*self.digits, *weight.padded)):
                yield one(name, SCATTER, weight.per_step.axes, padded, self._sum_item, times)
        for weight in self.held.trained:
            missing, whole = self._varying(weight) - _axes_of(weight), (*self.digits, *weight.layer_shape(weight.owned))
            apart = missing & {PIPE} if self.overlaps_reductions and self._head_note(weight) else set()
            places = (*((missing - apart, *each) for each in self._sums(weight, whole)), (apart, whole, ONCE))
            for over, shape, times in places:
                name = f"gradients: {self._head_note(weight)}over {' and '.join(sorted(over))}"
                if over:
                    yield one(name, REDUCE, tuple(sorted(over)), shape, self._sum_item, times)
        axes = self._mesh_axes(BATCH_AXES if self.splits_vocabulary else (*BATCH_AXES, PIPE))
        for _ in self._losses:
            shape, item = ((5,), 4) if self.digits else ((), max(4, self.summed))
            yield one("losses: sums", REDUCE, axes, shape, item, ONCE)
        rooms = {weight.path[0] for weight in self.held.trained} if self.digits else ()
        for room in rooms:
            every = self._mesh_axes((*BATCH_AXES, PIPE, TENSOR))
            yield one(f"gradients: numbers of {room} that are not summed", REDUCE, every, (2,), 4, ONCE)
        yield from self._loads()
        # One number for all weights that are sharded over the same axes.
        for axes in dict.fromkeys(tuple(sorted(_axes_of(weight))) for weight in self.held.trained):
            if axes:
                # In digits, the largest number and four sums.
                times = Occurrences(5, 5) if self.digits else ONCE
                yield one("gradients: norm", REDUCE, axes, (), self.wide, times)
        yield from self._muon()
        for weight in per_step:
            item = weight.computed_in(self.item, self.wide)
            for shard, times in self._gathers(weight):
                name = f"weights: {self._head_note(weight)}over data"
                yield one(name, GATHER, weight.per_step.axes, shard, item, times)

    def _sums(self, weight: Weight, shape: Shape) -> Iterator[tuple[Shape, Occurrences]]:
        """Shapes of the sums of a weight's gradients that are reduced together, given that of one layer's: those of all
        layers, or during the last backward pass each one's of its chunk, meanwhile those of the same chunk on stages
        that do not run it, and those of the other chunks; in both places those of the head."""
        layers, pipeline = self.layers_of_chunk * (weight.stack.run if weight.stack else 1), self.config.pipeline
        if not (self.overlaps_reductions and (weight.stack or self._head_note(weight))):
            yield weight.on_stage(shape), ONCE
            return
        elsewhere = int(self.config.mesh.pipe > 1 and not (self.defers and self._deferral.late[-1].all()))
        if not weight.stack:
            yield shape, Occurrences(1 + elsewhere, 1)
            return
        yield shape, Occurrences(layers, layers)
        if elsewhere:
            yield (layers, *shape), Occurrences(1, 0)
        if pipeline.chunks > 1:
            yield ((pipeline.chunks - 1) * layers, *shape), ONCE

    def _head_note(self, weight: Weight) -> str:
        """Says that only the head uses it."""
        return OF_HEAD if not weight.stack and is_head(weight.path, self.config.model) else ""

    def _gathers(self, weight: Weight) -> Iterator[tuple[Shape, Occurrences]]:
        """Shapes of the shards of a weight that are gathered together: of all layers, or of each one. In a pipe the
        program has two places for that: with a forward, and without."""
        if not weight.late:
            yield weight.stage_shape(weight.per_step), ONCE
            return
        number = self.layers_of_chunk * weight.stack.run * self.config.pipeline.chunks if weight.stack else 1
        yield weight.shard, Occurrences(number * (1 + (self.config.mesh.pipe > 1)), number)

    def _loads(self) -> Iterator[Communication]:
        """Figures of experts (`core/models/router.py`): every layer's loads, entropy, balance, and dropped choices."""
        model, axes = self.config.model, (*BATCH_AXES, PIPE, *(TENSOR,) * self.splits_sequence)
        loads = (model.num_blocks + model.num_predicting, model.num_experts), 4
        for shape, item in (loads, ((), 4), ((), self.wide), ((), self.wide)) if model.num_experts else ():
            yield one("losses: loads of experts", REDUCE, self._mesh_axes(axes), shape, item, ONCE)

    def _muon(self) -> Iterator[Communication]:
        """Exchange shards of matrices for whole ones and back, and gather results computed for copies."""
        back = self.wide if self.config.optimizer.muon_precision == "fp32" else self.item
        for group in dealt(self):
            for item in (self.wide, back) if group.num_owners > 1 else ():
                yield one("Muon: matrices", EXCHANGE, group.owners, group.operand, item, ONCE)
            if group.num_owners < group.devices:
                yield one("Muon: copies", GATHER, group.copied_over, group.operand, back, ONCE)

    @property
    def _sum_item(self) -> int:
        """Bytes of an element of gradients' sums."""
        return self.summed // prod(self.digits)

    @cached_property
    def _losses(self) -> list[str]:
        form = batch_form(self.config)
        return [*form.targets, *form.measures, *prediction_losses(self.config.model)]

    def _mesh_axes(self, axes: Iterable[str]) -> Axes:
        """Those of some axes that the mesh has, in the order of sums."""
        return tuple(sorted(self.config.mesh.there(axes)))

    def _varying(self, weight: Weight) -> set[str]:
        """Mesh axes over which a gradient varies when the loop has ended (`core/program/bind.py`)."""
        axes = {*self._mesh_axes(BATCH_AXES), *_axes_of(weight)}
        by_token = self.splits_sequence and not (self._in_parts and weight.is_vector)
        if by_token or weight.needs_tensor_sum:
            axes.add(TENSOR)
        if not weight.stack and not self.splits_vocabulary:
            axes.add(PIPE)
        return axes


def _axes_of(weight: Weight) -> frozenset[str]:
    """Mesh axes that a reduced gradient is sharded over."""
    return spec_axes(weight.stage_spec(weight.owned))


def _sharded_per_use(room: str, weights: Iterable[Weight]) -> list[Weight]:
    """Those of a room that ZeRO-3 gathers for every use; of a period each as often as it has slots for such layers."""
    found = (weight for weight in weights if weight.path[0] == room and weight.computed != NOT_SHARDED)
    return [weight for weight in found for _ in range(weight.stack.run if weight.stack else 1)]


@lru_cache(maxsize=256)
def _deferral(schedule: str, pipe: int, microbatches: int, chunks: int, deferring: PassTimes | None) -> Deferral:
    deferral = make_schedule(schedule, pipe, microbatches, chunks, deferring).deferral
    assert deferral is not None
    return deferral

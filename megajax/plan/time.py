"""Predict how long a training step takes on a machine, by arithmetic on a configuration; nothing runs. A stage's
forward and backward consist of its layers' products, attention and memory traffic (`plan/work.py`) and their
collectives, except where these overlap with computation. The pipeline's time follows from its table
(`core/pipeline/timing.py`); the reduction of gradients, the optimizer and the gathering of weights are added. All rates
are in `plan/machines.py`; docs/benchmarks/planning.md says how they were calibrated and compares predictions with
published figures.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any, TypeVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from megajax.core.axes import BATCH_AXES, CONTEXT, EXPERT, TENSOR
from megajax.core.backend import GPU
from megajax.core.models.attention_mask import AttentionMask
from megajax.core.models.config import ModelConfig
from megajax.core.models.flops import step_flops, step_products
from megajax.core.pipeline.config import PipelineConfig
from megajax.core.pipeline.deferral import PassTimes, most_pending
from megajax.core.pipeline.placement import Placement
from megajax.core.pipeline.schedule import make_schedule
from megajax.core.pipeline.timing import StageTimes, wall_time
from megajax.core.program.overlap import scans_layers
from megajax.plan.communication import OF_HEAD, Communication, in_the_loop, outside_the_loop, seconds_of
from megajax.plan.costs import StepCost
from megajax.plan.expert_loop import ExpertLoop
from megajax.plan.machines import Machine
from megajax.plan.memory import backend_of
from megajax.plan.published import deferred_bubble, published_bubble
from megajax.plan.sizes import Sizes, num_ticks
from megajax.plan.traced import step_cost
from megajax.plan.work import Seconds, StepWork
from megajax.settings.config import Config

_LONGEST_TABLE = 4096  # forwards of all stages; the time of a longer table is computed by formula


@dataclass(frozen=True)
class PlannedTime:
    """A predicted step."""

    seconds: float  # of a step
    parts: dict[str, float]  # seconds by part, for the busiest stage; they add up to `seconds`
    stages: list[float]  # seconds that every stage works in the loop over microbatches
    bubble: float  # share of the pipeline's time in which the busiest stage waits
    tokens_per_second: float  # of all devices
    flops_per_second: float  # of a device, counting the model's arithmetic (`core/models/flops.step_flops`)
    mfu: float  # that as a share of the peak; full attention is counted, as if every token saw all others
    mfu_causal: float  # the same, which counts only unmasked scores
    expert_loop: ExpertLoop | None  # in which dropless experts run each product


def in_order(parts: dict[str, float]) -> list[tuple[str, float]]:
    """The parts of a step, longest first."""
    return sorted(parts.items(), key=lambda part: -part[1])


def unit_of_times(longest: float) -> tuple[str, float, int]:
    """The unit for a table of times up to `longest`, in seconds: its name, how many make a second, and decimals."""
    return ("s", 1.0, 3) if longest >= 1 else ("ms", 1e3, 1)


def step_time(config: Config, machine: Machine, cost: StepCost | None = None, *, exact: bool = True) -> PlannedTime:
    """Predict a step of a valid configuration: `exact` by its schedule's table unless that is long, otherwise by
    formula if there is one. Raises `UserError` if the GPU does not support its precision."""
    return StepModel(config, machine, cost).time(config.pipeline, exact=exact)


_flops = lru_cache(maxsize=256)(step_flops)
_table = lru_cache(maxsize=64)(make_schedule)


@lru_cache(maxsize=64)
def _seen_share(model: ModelConfig) -> float:
    """The share of a step's FLOPs that is left if only attention's unmasked scores are counted."""
    length = model.sequence_length
    mask = AttentionMask.of_model(model, length)
    seen = length * mask.keys_seen(length) / sum(map(prod, mask.block_sizes(length, length)))
    attention = sum(each.flops for each in step_products(model, 1, length) if each.name.endswith(" keys"))
    return 1 - (1 - seen) * attention / _flops(model, 1)


_Timed = dict[str, list[tuple[Communication, float]]]
_Found = TypeVar("_Found")


class Shared:
    """What the models of several configurations have in common if these differ only in microbatch, recomputation, ZeRO
    stage, deferral, and how sequence, vocabulary and layers are divided."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Any] = {}

    def once(self, like: Hashable, make: Callable[[], _Found]) -> _Found:
        """What `make` returned first for this key."""
        if like not in self._found:
            self._found[like] = make()
        return self._found[like]


class StepModel:
    """The times of a step's parts; schedule and chunks change only how long the pipeline waits."""

    def __init__(self, config: Config, machine: Machine, cost: StepCost | None = None, shared: Shared | None = None):
        cost, shared = cost or step_cost(config, backend_of(machine)), shared or Shared()
        self.config, self.machine = config, machine
        self.sizes = Sizes(config)
        train, cut = config.train, (config.sequence_parallel, config.splits_vocabulary)
        like = train.remat, train.microbatch, cut, scans_layers(config, GPU)
        self._kinds = shared.once(
            ("work", *like), lambda: [StepWork(config, self.sizes, machine, cost, kind) for kind in cost.kinds]
        )
        self.work = self._kinds[-1]  # with layers like those of prediction modules
        zero, scan = config.optimizer.zero, config.model.scan_layers
        around = shared.once(("around", cut, zero, config.mesh.replica, scan), lambda: self._timed(self._around()))
        sent = train.remat, train.microbatch, cut, zero == 3 and config.mesh.replica, self.sizes.defers
        inside = shared.once(("inside", *sent), lambda: self._timed(self._inside(cost)))
        self._by_part = around | inside
        visits = "visits", *like, *sent, self.sizes.pairs_microbatches
        self._layer, self._ends = shared.once(visits, lambda: (self._visits_of_a_layer(), self._visits_of_ends()))

    def _around(self) -> list[Communication]:
        """What is sent before and after the loop. Microbatches and recomputation change nothing, and deferral nothing
        that is really sent."""
        config = self.config
        train, pipeline = replace(config.train, microbatch=1, remat="none"), config.pipeline
        before, after = outside_the_loop(
            replace(config, train=train, pipeline=replace(pipeline, weight_gradients="together"))
        )
        return [*before, *after]

    def _inside(self, cost: StepCost) -> list[Communication]:
        """What is sent in the loop, as if it had one microbatch: how often does not matter here."""
        train, mesh = self.config.train, self.config.mesh
        one = replace(train, global_batch=mesh.row_shards * train.microbatch)
        return in_the_loop(replace(self.config, train=one), cost)

    def _timed(self, ops: list[Communication]) -> "_Timed":
        """Communication by part, with its seconds."""
        timed: _Timed = defaultdict(list)
        for op in ops:
            timed[op.part].append((op, seconds_of(op, self.config.mesh, self.machine)))
        return timed

    def time(self, pipeline: PipelineConfig, *, exact: bool = True) -> PlannedTime:
        """A step with the configuration's schedule and chunks, or with those of another `pipeline`."""
        config, model = self.config, self.config.model
        loop, stages, bubble = self._loop(pipeline, exact)
        parts = {name: seconds for name, seconds in (*loop.items(), *self._once.items()) if seconds}
        seconds = sum(parts.values())
        rows = config.train.global_batch
        flops = _flops(model, rows) / config.mesh.num_devices / seconds
        tokens = rows * (model.num_classes if model.head == "choice" else 1) * model.sequence_length
        mfu, seen = flops / self.work.peak, _seen_share(model)
        return PlannedTime(
            seconds, parts, stages, bubble, tokens / seconds, flops, mfu, mfu * seen, self.work.expert_loop
        )

    @property
    def least(self) -> float:
        """Seconds of a step if all stages had equally much to do and none waited: no schedule and no placement of the
        layers is faster."""
        layers = len(self.config.model.layers_of_periods) * sum(visit.total for visit in self._layer)
        work = layers + sum(visit.total for visit in self._ends.values())
        return self.sizes.microbatches * work / self.config.mesh.pipe + sum(self._once.values())

    @cached_property
    def head_in_layers(self) -> float:
        """What the head costs the last stage more than others, in layers; nothing if all stages share it."""
        layer = sum(visit.total for visit in self._layer)
        return 0.0 if self.sizes.splits_vocabulary else self._ends["head"].total / layer

    def _loop(self, pipeline: PipelineConfig, exact: bool) -> tuple[dict[str, float], list[float], float]:
        """The loop over microbatches: seconds by part of the busiest stage, its waiting time and p2p transfers; how
        long every stage works; and the share of the busiest one's waiting."""
        sizes, m, pipe = self.sizes, self.sizes.microbatches, self.config.mesh.pipe
        layers = Placement.of(self.config.model.layers_of_periods, pipe, pipeline).counts.astype(float)
        forwards, backwards, laters = (layers * visit.total for visit in self._layer)
        together = {name: visit.total if sizes.splits_vocabulary else 0.0 for name, visit in self._ends.items()}
        if not sizes.splits_vocabulary:
            forwards[0, 0] += self._ends["embed"].total
            backwards[0, 0] += self._ends["embed_backward"].total
            backwards[-1, -1] += self._ends["head"].total
        if not sizes.defers:
            backwards, laters = backwards + laters, 0.0 * laters
        p2p_transfer = self._p2p_transfer(float(min(forwards.sum(), backwards.sum())) / layers.size)
        times = StageTimes(forwards, backwards, laters, p2p_transfer=p2p_transfer, **together)
        working = m * ((forwards + backwards + laters).sum(0) + sum(together.values()))
        busiest, busy = int(working.argmax()), float(working.max())
        ticks = num_ticks(pipeline.schedule, pipe, m, pipeline.chunks)
        parts = self._parts(m * float(layers[:, busiest].sum()), busiest)
        parts["p2p transfers"] = 2 * ticks * p2p_transfer
        wall = busy if pipe == 1 else self._wall(pipeline, times, busy + parts["p2p transfers"], exact)
        parts["pipeline bubble"] = max(0.0, wall - busy - parts["p2p transfers"])
        return parts, working.tolist(), parts["pipeline bubble"] / wall

    def _parts(self, layers: float, stage: int) -> dict[str, float]:
        """Seconds by part for a stage that runs this many layers, counted once per microbatch."""
        of_stage = {"embed": 0, "embed_backward": 0, "head": self.config.mesh.pipe - 1}
        here = [self._ends[end] for end, at in of_stage.items() if self.sizes.splits_vocabulary or at == stage]
        return {
            "matrix products": layers * sum(visit.products for visit in self._layer),
            "attention": layers * sum(visit.attention for visit in self._layer),
            "memory": layers * sum(visit.traffic + visit.fixed for visit in self._layer),
            "layers' collectives": layers * sum(visit.exposed for visit in self._layer),
            "embedding and head": self.sizes.microbatches * sum(visit.total for visit in here),
        }

    @cached_property
    def _once(self) -> dict[str, float]:
        """Seconds outside the loop: reduction of gradients, optimizer, gathering of weights, losses."""
        return {
            "gradients over data": self._seconds("gradients") - self._hidden_reductions(),
            "optimizer": self.work.update(self.sizes).total,
            "Muon's matrices": self.work.muon(self.sizes).total + self._seconds("Muon"),
            "weights over data": self._seconds("weights") - self._hidden_gathers(),
            "weights in 8 bits": self.work.copies(self.sizes).total + self._seconds("weights in 8 bits"),
            "losses": self._seconds("losses"),
        }

    def _hidden_reductions(self) -> float:
        """Seconds of the gradients' reduction that a backward pass hides: the head's, by the last layer of the last
        chunk, and that of every layer but the first, by the layer before it; with other frameworks everything."""
        sizes, overlap, gradients = self.sizes, self.machine.overlap, self._seconds("gradients")
        backward = sum(visit.total for visit in self._layer[1:])
        everything = min(gradients * overlap.gradients, sizes.microbatches * sizes.most_layers * backward)
        if not sizes.overlaps_reductions:
            return everything
        others, last = sizes.layers_of_chunk - 1, self._layer[2].total if sizes.defers else backward
        found = self._by_part.get("gradients", [])
        of_layer = sum(seconds * each.sent for each, seconds in found if each.sent > 1) / sizes.layers_of_chunk
        of_head = sum(seconds for each, seconds in found if OF_HEAD in each.purpose)
        of_head, of_layer = (min(seconds * overlap.reductions, last) for seconds in (of_head, of_layer))
        return max(everything, of_head + others * of_layer)

    def _hidden_gathers(self) -> float:
        """Seconds of the weights' gathers that the first forward pass hides: those of every layer of the first chunk
        but the first layer, by the layer before it, and the head's, by the last one. In a pipe, other stages gather
        before their first forward."""
        gathers, overlap, forward = self._by_part.get("weights", []), self.machine.overlap, self._layer[0].total
        share = overlap.weights if self.config.mesh.tensor == 1 else overlap.weights_with_tensor
        if not self.sizes.gathers_late:
            return 0.0
        of_head = sum(seconds for op, seconds in gathers if OF_HEAD in op.purpose)
        sizes, gathered = self.sizes, sum(seconds * op.sent for op, seconds in gathers if op.sent > 1)
        of_layer = gathered / (sizes.layers_of_chunk * self.config.pipeline.chunks)
        return min(of_head * share, forward) + (sizes.layers_of_chunk - 1) * min(of_layer * share, forward)

    def _seconds(self, part: str) -> float:
        return sum(seconds * each.sent for each, seconds in self._by_part.get(part, []))

    def _visits_of_a_layer(self) -> tuple[Seconds, Seconds, Seconds]:
        """The forward of a layer, or of a mean period, its backward, and its weight gradients, deferred or not."""
        number, kinds = len(self.config.model.layers_of_periods), self.config.model.kinds

        def mean(part: str) -> Seconds:
            parts = (getattr(work, part).times(len(kinds[work.kind]) / number) for work in self._kinds)
            return sum(parts, start=Seconds())

        later = mean("weight_gradients")
        beside = 0.0 if self.sizes.defers else later.products
        forward = self._visit("layers forward", mean("layer_forward"))
        backward = self._visit("layers backward", mean("layer_backward") + mean("layer_again"), beside)
        return forward, backward, self._visit("weight gradients", later)

    def _visits_of_ends(self) -> dict[str, Seconds]:
        embedding = self.work.embedding
        return {
            "embed": self._visit("embedding", embedding.times(1 / 3)),
            "head": self._visit("head", self.work.head),
            "embed_backward": self._visit("embedding backward", embedding.times(2 / 3)),
        }

    def _visit(self, part: str, work: Seconds, beside: float = 0.0) -> Seconds:
        """A part with its collectives, less what overlaps with its products and with `beside` seconds of others."""
        ops = self._by_part.get(part, [])
        hidden = sum(seconds * self._share(part, op) for op, seconds in ops)
        return replace(work, exposed=sum(seconds for _, seconds in ops) - min(hidden, work.products + beside))

    def _share(self, part: str, op: Communication) -> float:
        """The share of a collective that can overlap with products; 0 in embedding and head."""
        overlap = self.machine.overlap
        if part not in ("layers forward", "layers backward", "weight gradients"):
            return 0.0
        if op.axes == (CONTEXT,):
            return overlap.exchanges if op.kind == "all-to-all" else overlap.keys
        dispatches, pairs = op.axes == (EXPERT,) and op.kind == "all-to-all", self.sizes.pairs_microbatches
        if pairs and (dispatches or op.axes == (TENSOR,)):
            return overlap.pairs
        if dispatches:
            return overlap.dispatch
        if not {*BATCH_AXES}.isdisjoint(op.axes):
            return overlap.shards
        if op.kind != "all-reduce":
            return overlap.gathers if op.kind == "all-gather" else overlap.scatters
        # With deferred weight gradients, only kernels remain to overlap with an all-reduce.
        late = part == "layers backward" and not self.sizes.defers
        return overlap.tensor_backward if late else overlap.tensor_forward

    def _p2p_transfer(self, beside: float) -> float:
        """Seconds of a transfer in one direction that computation does not hide."""
        seconds = max((seconds for _, seconds in self._by_part.get("p2p", [])), default=0.0)
        return seconds - min(seconds * self.machine.overlap.p2p_transfers, beside)

    def _wall(self, pipeline: PipelineConfig, times: StageTimes, full: float, exact: bool) -> float:
        """From the first forward to the end of the last stage's work; `full` is the time of a stage that never
        waits."""
        m, v, p = self.sizes.microbatches, pipeline.chunks, self.config.mesh.pipe
        shape = pipeline.schedule, p, m, v
        if published_bubble(*shape) is None or (exact and p * m * v <= _LONGEST_TABLE):
            return wall_time(_table(*shape, pipeline.deferring() if self.sizes.defers else None), times)
        if not self.sizes.defers and m >= p:
            return full + _uneven_waits(pipeline.schedule, m, times.forward, times.backward)
        passes = [float(np.sum(each)) / p for each in (times.forward, times.backward, times.weight_gradient)]
        deferring = pipeline.deferring(PassTimes(*passes)) if self.sizes.defers else None
        return full + _waits(*shape, deferring, passes)


def _uneven_waits(name: str, m: int, forward: np.ndarray, backward: np.ndarray) -> float:
    """How long the busiest stage waits with at least as many microbatches as stages, by formula, from the times of
    chunks, [chunks, stages].

    A stage waits for the others, to fill and to drain the pipeline. With 1F1B and many microbatches, it waits for those
    after it only as far as their passes take longer than the forwards, or backwards, that it has meanwhile. With
    chunks, a stage also waits for the longest of the passes that run at the same time, those of as many consecutive
    virtual stages as there are stages.
    """
    chunks, p = forward.shape
    work, passes = (forward + backward).sum(0), (forward, backward)
    before = work.cumsum() - work
    after = work.sum() - before - work
    if name != "gpipe" and m >= 2 * p:
        by_stage = np.stack([times.sum(0) for times in passes])
        until_last = by_stage[:, ::-1].cumsum(1)[:, ::-1] - by_stage[:, -1:]
        meanwhile = 2 * np.arange(p - 1, -1, -1) * by_stage
        after = np.maximum(0.0, after + until_last - meanwhile).sum(0)
    waits = float((m * work + (before + after) / chunks).max() - m * work.max())
    if chunks > 1:
        runs = (sliding_window_view(np.concatenate([times.ravel(), times[0, :-1]]), p) for times in passes)
        waits += m * max(0.0, float(sum(run.max(1).sum() for run in runs) / p - work.max()))
    return waits


def _waits(name: str, p: int, m: int, v: int, deferring: PassTimes | None, passes: list[float]) -> float:
    """How long the busiest of equal stages waits, by formula.

    With deferred weight gradients and fewer than 2p microbatches there is no formula: the saving is read off tables of
    passes with similar times (tests compare the two).
    """
    together = sum(passes) * ((p - 1) / v if m >= p or v == 1 else p - m + (m - 1) / v)
    if deferring is None:
        return together
    known = deferred_bubble(name, p, m, v, deferring)
    if known is not None:
        return known
    if v == 1:
        later = 0 if name == "gpipe" else min(max(0, m - p + 1), p - 1)
        saved: float = p - 1 + later
    elif m >= p:
        saved = (p - 1 + min(m - p, p - 1)) / v
    else:
        saved = min(p - 1 / v, (p - 1) / v + 2 * (1 - 1 / v) * (p - m))
    return together - min(saved, most_pending(p) / v) * passes[-1]

"""What a training step communicates of weights and their gradients: arithmetic on the weights' shapes
(`program/train_step.py`, `parallel/shards.py`)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megajax.axes import BATCH_AXES
from megajax.parallel.collectives import PIPE, TENSOR, spec_axes
from megajax.plan.shapes import Placed, held
from megajax.plan.sizes import ONCE, Shape, Sizes, Times
from megajax.program.communication import Collective
from megajax.program.program import batch_form

Axes = tuple[str, ...]
REDUCE, GATHER, SCATTER, PERMUTE = "all-reduce", "all-gather", "reduce-scatter", "permute"


@dataclass(frozen=True)
class Communication(Collective):
    """A collective of a training step.

    Attributes:
        purpose: what it is for: the part of the step, and after a colon what of it.
        sent: how often the device that sends it most really does; `count` has every tick of every stage.
    """

    purpose: str
    sent: int

    @property
    def part(self) -> str:
        """The part of the step that it belongs to."""
        return self.purpose.partition(":")[0]


def one(purpose: str, kind: str, axes: Axes, shape: Shape, item: int, times: Times) -> Communication:
    """Of one operand, whose numbers have `item` bytes each."""
    return Communication(kind, axes, (shape,), math.prod(shape) * item, times.count, purpose, times.sent)


class WeightTraffic(Sizes):
    """The sizes of a step, and what it communicates of weights."""

    # ZeRO-3, wherever weights are used.

    def gathered(self, purpose: str, room: str, times: Times) -> Iterator[Communication]:
        """All weights of a room, `shared` or one layer of the `blocks`."""
        for placed in self._sharded(room) if self.zero == 3 else ():
            yield one(purpose, GATHER, BATCH_AXES, placed.shard, self.item, times)

    def scattered(self, purpose: str, room: str, times: Times, later: bool | None = None) -> Iterator[Communication]:
        """Of all weights of a room; of a layer's those whose gradients come `later`, where some do, or the others."""
        for placed in self._sharded(room) if self.zero == 3 else ():
            if later is None or later == (self.defers and is_of_product(placed)):
                yield one(purpose, SCATTER, BATCH_AXES, placed.whole, self.summed, times)

    def _sharded(self, room: str) -> Iterator[Placed]:
        return (placed for placed in self.weights if placed.weight.path[0] == room and placed.data_dim is not None)

    # Once a step, before and after the loop over ticks.

    def targets(self) -> Iterator[Communication]:
        """How many targets the losses have in the global batch."""
        for _ in self._losses:
            yield one("losses: numbers of targets", REDUCE, BATCH_AXES, (), self.counted, ONCE)

    def reduction(self) -> Iterator[Communication]:
        """Gradients and losses to global sums; with LoRA those of the adapters."""
        yield from self._gathered_adapters("gradients: adapters")
        item = self.wide if self.adapters else self.summed
        for placed in self._divided if self.zero == 1 or self.adapters else ():
            yield one("gradients: over data", SCATTER, BATCH_AXES, _pipelined(placed, placed.whole, self), item, ONCE)
        for placed in self.trained:
            missing = tuple(sorted(self._varying(self._product_of(placed)) - self._axes_of(placed)))
            if missing:
                shape = placed.shard if self._is_divided(placed) else placed.whole
                purpose = f"gradients: over {' and '.join(missing)}"
                yield one(purpose, REDUCE, missing, _pipelined(placed, shape, self), item, ONCE)
        axes = tuple(sorted(BATCH_AXES if self.splits_vocabulary else (*BATCH_AXES, PIPE)))
        for _ in self._losses:
            yield one("losses: sums", REDUCE, axes, (), max(4, self.summed), ONCE)

    def norm(self) -> Iterator[Communication]:
        """The gradients' global norm: a number for all weights that are divided over the same axes."""
        for axes in dict.fromkeys(tuple(sorted(self._axes_of(placed))) for placed in self.trained):
            if axes:
                yield one("gradients: norm", REDUCE, axes, (), self.wide, ONCE)

    def new_weights(self) -> Iterator[Communication]:
        """ZeRO-1 gathers the updated weights; with LoRA those that have adapters, after these."""
        yield from self._gathered_adapters("weights: adapters")
        updated = [placed for placed in self.weights if not self.adapters or self._has_adapter(placed)]
        for placed in filter(self._is_divided, updated) if self.zero == 1 else ():
            yield one("weights: over data", GATHER, BATCH_AXES, _pipelined(placed, placed.shard, self), self.item, ONCE)

    # LoRA (`program/adapters.py`).

    @cached_property
    def adapters(self) -> tuple[Placed, ...]:
        return held(self.config).adapters

    @property
    def trained(self) -> tuple[Placed, ...]:
        return self.adapters or self.weights

    def _gathered_adapters(self, purpose: str) -> Iterator[Communication]:
        for placed in filter(self._is_divided, self.adapters):
            yield one(purpose, GATHER, BATCH_AXES, _pipelined(placed, placed.shard, self), self.wide, ONCE)

    def _product_of(self, placed: Placed) -> Placed:
        """The weight whose gradient that of an adapter is of; of all else itself."""
        path = (*placed.weight.path[:-1], "weight")
        return next(each for each in self.weights if each.weight.path == path) if self.adapters else placed

    def _has_adapter(self, placed: Placed) -> bool:
        return any(self._product_of(adapter) is placed for adapter in self.adapters)

    @cached_property
    def _losses(self) -> list[str]:
        form = batch_form(self.config)
        return [*form.targets, *form.measures]

    def _is_divided(self, placed: Placed) -> bool:
        return self.zero > 0 and placed.data_dim is not None

    @property
    def _divided(self) -> Iterator[Placed]:
        return filter(self._is_divided, self.trained)

    def _axes_of(self, placed: Placed) -> set[str]:
        """Mesh axes that a reduced gradient is divided over."""
        axes = set(spec_axes(placed.spec))
        axes |= {*BATCH_AXES} if self._is_divided(placed) else set()
        return axes | ({PIPE} if placed.weight.stacked else set())

    def _varying(self, placed: Placed) -> set[str]:
        """Mesh axes over which a gradient differs when the loop has ended (`program/bind.py`)."""
        axes = {*BATCH_AXES} | self._axes_of(placed)
        if self.splits_sequence or (placed.weight.stacked and placed.needs_tensor_sum):
            axes.add(TENSOR)
        if not placed.weight.stacked and not self.splits_vocabulary:
            axes.add(PIPE)
        return axes


def is_of_product(placed: Placed) -> bool:
    """Whether a layer multiplies activations with it, so that its gradient can be deferred."""
    return placed.weight.path[-1] == "weight"


def _pipelined(placed: Placed, shape: Shape, step: WeightTraffic) -> Shape:
    """The shape of a weight on a stage, of which a layer has `shape`."""
    if not placed.weight.stacked:
        return shape
    return (step.config.pipeline.chunks, 1, step.layers_of_chunk, *shape)

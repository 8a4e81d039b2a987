"""The theory of what the borders of a step's regions communicate (`parallel/boundary.py`, `parallel/shards.py`)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megajax.axes import BATCH_AXES
from megajax.config import Config
from megajax.parallel.collectives import PIPE, TENSOR
from megajax.plan.shapes import Placed
from megajax.plan.sizes import Shape, Sizes, Times
from megajax.program.communication import Collective

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


class BoundaryTraffic(Sizes):
    """The sizes of a step, and what its borders communicate.

    Attributes:
        of_end, of_layer: how often the loop over ticks has an end of the model and a layer.
    """

    def __init__(self, config: Config):
        super().__init__(config)
        self.of_end = Times(self.ticks, self.microbatches)
        self.of_layer = Times(self.ticks * self.layers_of_chunk, self.microbatches * self.most_layers)

    @cached_property
    def vocabulary(self) -> Axes:
        return (PIPE, TENSOR) if self.splits_vocabulary else (TENSOR,)

    def enter(self, purpose: str, times: Times) -> Iterator[Communication]:
        if self.splits_sequence:
            yield one(purpose, GATHER, (TENSOR,), self.own, self.item, times)

    def enter_backward(self, purpose: str, times: Times, axes: Axes = (TENSOR,)) -> Iterator[Communication]:
        others = axes[:-1] if self.splits_sequence else axes
        if others:
            yield one(purpose, REDUCE, others, self.whole, self.item, times)
        if self.splits_sequence:
            yield one(purpose, SCATTER, (TENSOR,), self.whole, self.item, times)

    def leave(self, purpose: str, times: Times, axes: Axes = (TENSOR,)) -> Iterator[Communication]:
        others = axes[:-1] if self.splits_sequence else axes
        if self.splits_sequence:
            yield one(purpose, SCATTER, (TENSOR,), self.whole, self.item, times)
        if others:
            yield one(purpose, REDUCE, others, self.own, self.item, times)

    def leave_backward(self, purpose: str, times: Times) -> Iterator[Communication]:
        yield from self.enter(purpose, times)

    def broadcast(self, purpose: str) -> Iterator[Communication]:
        """To all stages, which compute an end together."""
        if self.splits_vocabulary:
            yield one(purpose, REDUCE, (PIPE,), self.own, self.item, self.of_end)

    # ZeRO-3 (`parallel/shards.py`).

    def gathered(self, purpose: str, room: str, times: Times) -> Iterator[Communication]:
        for placed in self._sharded(room) if self.zero == 3 else ():
            yield one(purpose, GATHER, BATCH_AXES, placed.shard, self.item, times)

    def scattered(self, purpose: str, room: str, times: Times, later: bool | None = None) -> Iterator[Communication]:
        """Of all weights of a room; of a layer's those whose gradients come `later`, where some do, or the others."""
        for placed in self._sharded(room) if self.zero == 3 else ():
            if later is None or later == (self.defers and is_of_product(placed)):
                yield one(purpose, SCATTER, BATCH_AXES, placed.whole, self.summed, times)

    def _sharded(self, room: str) -> Iterator[Placed]:
        return (placed for placed in self.weights if placed.weight.path[0] == room and placed.data_dim is not None)


def is_of_product(placed: Placed) -> bool:
    """Whether a layer multiplies activations with it, so that its gradient can be deferred."""
    return placed.weight.path[-1] == "weight"

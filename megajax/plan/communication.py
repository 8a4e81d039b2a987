"""The theory of what a training step communicates: arithmetic on a configuration. Nothing is traced.

`communication` has every collective of `program/train_step.py`, as `program/communication.py` counts them on the step's
jaxpr (tests hold the two against each other); beside that how many of them are really sent, since a stage that has
nothing to run in a tick, or not this end of the model, sends nothing.

Letters: T ticks, m microbatches, n layers of a chunk.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from megajax.batch import most_masked
from megajax.config import Config
from megajax.models.family import family_of
from megajax.parallel.collectives import DATA, PIPE, TENSOR, spec_axes
from megajax.pipeline.deferral import Deferring
from megajax.pipeline.schedule import make_schedule
from megajax.plan.shapes import Placed, held
from megajax.plan.sizes import ONCE, Shape, Sizes, Times, settled_microbatches
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


def communication(config: Config) -> list[Communication]:
    """All that a training step of a valid configuration communicates, per device, in the order of the program."""
    step = _Step(config)
    return [
        *step.targets(),
        *step.hand_overs(),
        *step.embedding(),
        *step.layers(),
        *step.head(),
        *step.layers_backward(),
        *step.embedding_backward(),
        *step.weight_gradients(),
        *step.reduction(),
        *step.norm(),
        *step.new_weights(),
    ]


def totals(found: Iterable[Collective]) -> Counter:
    """How often an operand of every kind, axes, shape and bytes is communicated: what two lists are compared by."""
    counts: Counter = Counter()
    for each in found:
        for shape in each.shapes:
            counts[each.kind, each.axes, shape, each.num_bytes // len(each.shapes)] += each.count
    return counts


def bytes_by_axis(found: Iterable[Communication], *, sent: bool = False) -> dict[tuple[str, str], tuple[int, int]]:
    """By axes, as `data,pipe`, and kind: how many collectives a step has, and their operands' bytes; all that stand in
    the program, or those that the busiest device really sends."""
    summed: dict[tuple[str, str], tuple[int, int]] = {}
    for each in found:
        key, times = (",".join(each.axes), each.kind), each.sent if sent else each.count
        count, size = summed.get(key, (0, 0))
        summed[key] = count + times, size + times * each.num_bytes
    return summed


@lru_cache(maxsize=256)
def _loops_of_weight_gradients(schedule: str, pipe: int, microbatches: int, chunks: int, deferring: Deferring) -> int:
    """In how many places of a tick deferred weight gradients run, before the forward or after the backward."""
    deferral = make_schedule(schedule, pipe, microbatches, chunks, deferring).deferral
    assert deferral is not None
    return int(deferral.early.any()) + int(deferral.late.any())


class _Step(Sizes):
    """The sizes of a step, and its parts."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.of_end = Times(self.ticks, self.microbatches)
        self.of_layer = Times(self.ticks * self.layers_of_chunk, self.microbatches * self.most_layers)

    @cached_property
    def weights(self) -> tuple[Placed, ...]:
        return held(self.config).weights

    @cached_property
    def vocabulary(self) -> Axes:
        return (PIPE, TENSOR) if self.splits_vocabulary else (TENSOR,)

    # What stands in the loop over ticks.

    def hand_overs(self) -> Iterator[Communication]:
        """Activations to the next stage, gradients to the one before, in every tick."""
        if self.config.mesh.pipe > 1:
            for what in ("up", "down"):
                yield _one(f"hand-over: {what}", PERMUTE, (PIPE,), self.own, self.item, Times(self.ticks, self.ticks))

    def embedding(self) -> Iterator[Communication]:
        """Of every microbatch forward."""
        yield from self._gathered("embedding: weights", "shared", self.of_end)
        yield from self._leave("embedding: activations", self.of_end, self.vocabulary)

    def embedding_backward(self) -> Iterator[Communication]:
        """Of every microbatch backward; an embedding that is not linear in its weights runs forward again."""
        what = "embedding backward: activations"
        yield from self._broadcast(what)
        if not family_of(self.config.model).linear_embedding(self.config.model):
            yield from self._gathered("embedding backward: weights", "shared", self.of_end)
            yield from self._leave("embedding backward: forward again", self.of_end, self.vocabulary)
        yield from self._leave_backward(what, self.of_end)
        yield from self._scattered("embedding backward: weights' gradients", "shared", self.of_end)

    def head(self) -> Iterator[Communication]:
        """Of every microbatch, forward and backward."""
        yield from self._broadcast("head: activations")
        yield from self._gathered("head: weights", "shared", self.of_end)
        yield from self._predictions()
        yield from self._scattered("head: weights' gradients", "shared", self.of_end)

    def _predictions(self) -> Iterator[Communication]:
        model, times = self.config.model, self.of_end
        bert = model.family == "bert"
        if not bert or model.head == "pretraining":
            places = (self.rows, most_masked(self.tokens) if bert else self.tokens)
            chosen = (*places, model.hidden_size)
            if bert and self.splits_sequence:
                yield _one("head: masked tokens", REDUCE, (TENSOR,), chosen, self.item, times)
            elif not bert:
                yield from self._enter("head: activations", times)
            yield _one("head: numbers of tokens", REDUCE, self.vocabulary, places, self.item, times)
            for _ in range(2):
                yield _one("head: numbers of tokens", REDUCE, self.vocabulary, places, self.wide, times)
            if not bert:
                yield from self._enter_backward("head: activations' gradients", times, self.vocabulary)
            else:
                axes = [(PIPE,)] * self.splits_vocabulary + [(TENSOR,)] if self.splits_sequence else [self.vocabulary]
                for each in axes:
                    yield _one("head: activations' gradients", REDUCE, each, chosen, self.item, times)
        if self.splits_sequence and model.head == "span":
            yield _one("head: numbers of tokens", REDUCE, (TENSOR,), (*self.whole[:2], 2), self.wide, times)
        elif self.splits_sequence and bert:  # of the first token: the loss, and how many are right
            yield _one("head: losses", REDUCE, (TENSOR,), (), self.wide, times)
            yield _one("head: losses", REDUCE, (TENSOR,), (), self._counted, times)

    def layers(self) -> Iterator[Communication]:
        """Of every microbatch forward."""
        yield from self._gathered("layers forward: weights", "blocks", self.of_layer)
        yield from self._layer_forward("layers forward: activations")

    def layers_backward(self) -> Iterator[Communication]:
        """Of every microbatch backward, with what is computed again."""
        config, times, again = self.config, self.of_layer, "layers backward: forward again"
        if self.recomputes_stage:
            yield from self._gathered("layers backward: weights", "blocks", times)
            yield from self._layer_forward(again)
        yield from self._gathered("layers backward: weights", "blocks", times)
        needed = 1 if config.model.layer_order == "post" else 0  # the norm after the MLP needs its result
        if config.train.remat == "layer":
            for _ in range(2):
                yield from self._enter(again, times)
            needed += 1  # that of attention
        elif config.train.remat != "selective":
            needed = 0
        for _ in range(needed):
            yield from self._leave(again, times)
        for _ in range(2):
            yield from self._leave_backward("layers backward: activations", times)
            if self.regathers and not self.defers:
                yield from self._enter("layers backward: inputs of weight gradients", times)
            yield from self._enter_backward("layers backward: activations", times)
        yield from self._scattered("layers backward: weights' gradients", "blocks", times, later=False)

    def weight_gradients(self) -> Iterator[Communication]:
        """Of every microbatch those that are deferred."""
        if not self.defers or not (self.regathers or self.zero == 3):
            return
        pipeline, deferring = self.config.pipeline, self.config.pipeline.deferring()
        assert deferring is not None
        pipe, name = self.config.mesh.pipe, pipeline.schedule
        settled = settled_microbatches(name, pipe, self.microbatches)
        table = name, pipe, settled, pipeline.chunks, deferring
        times = Times(_loops_of_weight_gradients(*table) * self.of_layer.count, self.of_layer.sent)
        for _ in range(2 if self.regathers else 0):
            yield from self._enter("weight gradients: inputs", times)
        yield from self._scattered("weight gradients: weights' gradients", "blocks", times, later=True)

    def _layer_forward(self, purpose: str) -> Iterator[Communication]:
        for _ in range(2):
            yield from self._enter(purpose, self.of_layer)
            yield from self._leave(purpose, self.of_layer)

    # The borders of regions (`parallel/borders.py`).

    def _enter(self, purpose: str, times: Times) -> Iterator[Communication]:
        if self.splits_sequence:
            yield _one(purpose, GATHER, (TENSOR,), self.own, self.item, times)

    def _enter_backward(self, purpose: str, times: Times, axes: Axes = (TENSOR,)) -> Iterator[Communication]:
        others = axes[:-1] if self.splits_sequence else axes
        if others:
            yield _one(purpose, REDUCE, others, self.whole, self.item, times)
        if self.splits_sequence:
            yield _one(purpose, SCATTER, (TENSOR,), self.whole, self.item, times)

    def _leave(self, purpose: str, times: Times, axes: Axes = (TENSOR,)) -> Iterator[Communication]:
        others = axes[:-1] if self.splits_sequence else axes
        if self.splits_sequence:
            yield _one(purpose, SCATTER, (TENSOR,), self.whole, self.item, times)
        if others:
            yield _one(purpose, REDUCE, others, self.own, self.item, times)

    def _leave_backward(self, purpose: str, times: Times) -> Iterator[Communication]:
        yield from self._enter(purpose, times)

    def _broadcast(self, purpose: str) -> Iterator[Communication]:
        """To all stages, which compute an end together."""
        if self.splits_vocabulary:
            yield _one(purpose, REDUCE, (PIPE,), self.own, self.item, self.of_end)

    # ZeRO-3 (`parallel/shards.py`).

    def _gathered(self, purpose: str, room: str, times: Times) -> Iterator[Communication]:
        for placed in self._sharded(room) if self.zero == 3 else ():
            yield _one(purpose, GATHER, (DATA,), placed.shard, self.item, times)

    def _scattered(self, purpose: str, room: str, times: Times, later: bool | None = None) -> Iterator[Communication]:
        """Of all weights of a room; of a layer's those whose gradients come `later`, where some do, or the others."""
        for placed in self._sharded(room) if self.zero == 3 else ():
            if later is None or later == (self.defers and is_of_product(placed)):
                yield _one(purpose, SCATTER, (DATA,), placed.whole, self.summed, times)

    def _sharded(self, room: str) -> Iterator[Placed]:
        return (placed for placed in self.weights if placed.weight.path[0] == room and placed.data_dim is not None)

    @property
    def _counted(self) -> int:
        """Bytes of a count: JAX counts in 64 bits where it computes in them."""
        return 8 if self.config.precision == "fp64" else 4

    # Once a step.

    def targets(self) -> Iterator[Communication]:
        """How many targets the losses have in the global batch."""
        for _ in self._losses:
            yield _one("losses: numbers of targets", REDUCE, (DATA,), (), self._counted, ONCE)

    def reduction(self) -> Iterator[Communication]:
        """Gradients and losses to global sums; with LoRA those of the adapters."""
        yield from self._gathered_adapters("gradients: adapters")
        item = self.wide if self.adapters else self.summed
        for placed in self._divided if self.zero == 1 or self.adapters else ():
            yield _one("gradients: over data", SCATTER, (DATA,), _staged(placed, placed.whole, self), item, ONCE)
        for placed in self.trained:
            missing = tuple(sorted(self._varying(self._product_of(placed)) - self._axes_of(placed)))
            if missing:
                shape = placed.shard if self._is_divided(placed) else placed.whole
                purpose = f"gradients: over {' and '.join(missing)}"
                yield _one(purpose, REDUCE, missing, _staged(placed, shape, self), item, ONCE)
        axes = (DATA,) if self.splits_vocabulary else (DATA, PIPE)
        for _ in self._losses:
            yield _one("losses: sums", REDUCE, axes, (), max(4, self.summed), ONCE)

    def norm(self) -> Iterator[Communication]:
        """The gradients' global norm: a number for all weights that are divided over the same axes."""
        for axes in dict.fromkeys(tuple(sorted(self._axes_of(placed))) for placed in self.trained):
            if axes:
                yield _one("gradients: norm", REDUCE, axes, (), self.wide, ONCE)

    def new_weights(self) -> Iterator[Communication]:
        """ZeRO-1 gathers the updated weights; with LoRA those that have adapters, after these."""
        yield from self._gathered_adapters("weights: adapters")
        updated = [placed for placed in self.weights if not self.adapters or self._has_adapter(placed)]
        for placed in filter(self._is_divided, updated) if self.zero == 1 else ():
            yield _one("weights: over data", GATHER, (DATA,), _staged(placed, placed.shard, self), self.item, ONCE)

    # LoRA (`program/adapters.py`).

    @cached_property
    def adapters(self) -> tuple[Placed, ...]:
        return held(self.config).adapters

    @property
    def trained(self) -> tuple[Placed, ...]:
        return self.adapters or self.weights

    def _gathered_adapters(self, purpose: str) -> Iterator[Communication]:
        for placed in filter(self._is_divided, self.adapters):
            yield _one(purpose, GATHER, (DATA,), _staged(placed, placed.shard, self), self.wide, ONCE)

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
        return axes | ({PIPE} if placed.weight.stacked else set()) | ({DATA} if self._is_divided(placed) else set())

    def _varying(self, placed: Placed) -> set[str]:
        """Mesh axes over which a gradient differs when the loop has ended (`program/bind.py`)."""
        axes = {DATA} | self._axes_of(placed)
        if self.splits_sequence or (placed.weight.stacked and placed.partly_used):
            axes.add(TENSOR)
        if not placed.weight.stacked and not self.splits_vocabulary:
            axes.add(PIPE)
        return axes


def is_of_product(placed: Placed) -> bool:
    """Whether a layer multiplies activations with it, so that its gradient can be deferred."""
    return placed.weight.path[-1] == "weight"


def _staged(placed: Placed, shape: Shape, step: _Step) -> Shape:
    """The shape of a weight on a stage, of which a layer has `shape`."""
    if not placed.weight.stacked:
        return shape
    return (step.config.pipeline.chunks, 1, step.layers_of_chunk, *shape)


def _one(purpose: str, kind: str, axes: Axes, shape: Shape, item: int, times: Times) -> Communication:
    return Communication(kind, axes, (shape,), math.prod(shape) * item, times.count, purpose, times.sent)

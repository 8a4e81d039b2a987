"""The theory of what a training step communicates once, outside its loop over ticks (`program/train_step.py`)."""

from collections.abc import Iterator
from functools import cached_property

from megajax.axes import BATCH_AXES
from megajax.parallel.collectives import PIPE, TENSOR, spec_axes
from megajax.plan.boundary_traffic import GATHER, REDUCE, SCATTER, Communication, one
from megajax.plan.shapes import Placed, held
from megajax.plan.sizes import ONCE, Shape, Sizes
from megajax.program.program import batch_form


class Once(Sizes):
    """The sizes of a step, and what it communicates before and after its loop over ticks."""

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


def _pipelined(placed: Placed, shape: Shape, step: Once) -> Shape:
    """The shape of a weight on a stage, of which a layer has `shape`."""
    if not placed.weight.stacked:
        return shape
    return (step.config.pipeline.chunks, 1, step.layers_of_chunk, *shape)

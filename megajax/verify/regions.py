"""Communication at the boundaries of tensor-parallel regions, for `verify/theory.py`."""

from collections.abc import Iterator

from megajax.core.parallel.collectives import CONTEXT, TENSOR
from megajax.plan.communication import GATHER, REDUCE, SCATTER, Axes, Communication, WeightTraffic, one
from megajax.plan.sizes import Occurrences


class Regions(WeightTraffic):
    """The sizes of a step, and what the boundaries of its regions communicate."""

    @property
    def regathers(self) -> bool:
        """Whether a product's input is gathered again for its weight gradient."""
        return self.splits_sequence and self.config.train.remat != "layer"

    @property
    def shared_over(self) -> Axes:
        """The axes whose devices share the tokens between regions."""
        return (CONTEXT,) * (self.way != "none") + (TENSOR,) * self.splits_sequence

    def enter(self, purpose: str, times: Occurrences) -> Iterator[Communication]:
        if self.splits_sequence:
            yield one(purpose, GATHER, (TENSOR,), self.own, self.item, times)

    def enter_backward(self, purpose: str, times: Occurrences, axes: Axes = (TENSOR,)) -> Iterator[Communication]:
        others = axes[:-1] if self.splits_sequence else axes
        if others:
            yield one(purpose, REDUCE, others, self.whole, self.item, times)
        if self.splits_sequence:
            yield one(purpose, SCATTER, (TENSOR,), self.whole, self.item, times)

    def leave(self, purpose: str, times: Occurrences, axes: Axes = (TENSOR,)) -> Iterator[Communication]:
        others = axes[:-1] if self.splits_sequence else axes
        if self.splits_sequence:
            yield one(purpose, SCATTER, (TENSOR,), self.whole, self.item, times)
        if others:
            yield one(purpose, REDUCE, others, self.own, self.item, times)

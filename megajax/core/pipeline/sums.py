"""Sums of gradients on a stage: by path, from the pullbacks to the update."""

from typing import NamedTuple, Protocol

import jax
from jax import Array, lax

from megajax.core.pipeline.model import Factors
from megajax.core.trees import Path

Gradients = dict[Path, Array]
"""By the paths of weights, which begin with `shared` for those of the ends and with `blocks` for those of layers."""


class Reduction(Protocol):
    """Global sums of gradients, in their owners' shards, from local ones. Layers may be stacked or not."""

    def on_stage(self, gradients: Gradients) -> Gradients:
        """Over the devices that share a stage, one large weight after the other."""
        ...

    def over_stages(self, gradients: Gradients) -> Gradients:
        """Of what `on_stage` made of the ends'."""
        ...

    def everywhere(self, gradients: Gradients) -> Gradients:
        """Of the ends', at once."""
        ...


class Last(NamedTuple):
    """What happens to sums that are complete after the last gradients: they are reduced, with those of the weights that
    only the head uses."""

    of_head: Gradients
    reduction: Reduction


class Sums(NamedTuple):
    """Local sums of gradients: of both ends, or of a stage's layers.

    Attributes:
        gradients: those of layers stacked, [v · n, …].
        factors: of weight gradients that are deferred: a ring buffer, [slots, n, …]; None if none are.
    """

    gradients: Gradients
    factors: Factors = None

    @jax.named_scope("gradient_sums")
    def add(self, gradients: Gradients, layer: Array | None = None) -> "Sums":
        """With gradients of some of the weights, or of those of one layer."""
        before = self.gradients
        if layer is None:
            return self._replace(gradients=before | {path: before[path] + grad for path, grad in gradients.items()})
        return self._replace(
            gradients=before | {path: before[path].at[layer].add(grad) for path, grad in gradients.items()}
        )

    def finish(self) -> Gradients:
        """All gradients."""
        # XLA inlines a loop of one tick. Without the barriers, one for each since their types differ, every reader of
        # the sums would stack the gradients of all layers anew.
        return {path: lax.optimization_barrier(sum_) for path, sum_ in self.gradients.items()}


def some_layers(stacks: dict[Path, Array], at: int | slice) -> dict[Path, Array]:
    """One of the layers in stacks, or some."""
    return {path: stack[at] for path, stack in stacks.items()}

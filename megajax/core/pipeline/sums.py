"""Sums of gradients on a stage: by path, from the pullbacks to the update."""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.core.parallel.checksum import checksum
from megajax.core.parallel.collectives import vary, vary_as, varying_axes
from megajax.core.parallel.integer_sums import floats, integers, not_summed
from megajax.core.pipeline.model import Factors
from megajax.core.precision import at_least_fp32
from megajax.core.trees import Path

_LOSS_EXPONENT, _LOSS_DIGITS = 30, 4

Gradients = dict[Path, Array]
"""By the paths of weights, which begin with `shared` for those of the ends and with `blocks` for those of layers."""


NOT_SUMMED = "not_summed"
"""The name, beside the paths of weights, of how many numbers were not finite, and how many too large for integers, [2];
of layers [n, 2]."""


CHECKSUM = "checksum"
"""And the name of a checksum of gradients before they are summed; of layers [n]."""


class Summation(Protocol):
    """How gradients and losses are represented in sums over microbatches and devices."""

    def zeros(self, weights: dict[Path, Array]) -> Gradients:
        """Sums of nothing, of the gradients of weights."""

    def terms(self, gradients: Gradients) -> Gradients:
        """Gradients of a microbatch as what is summed."""

    def no_loss(self) -> Array:
        """A sum of no losses."""

    def loss(self, loss: Array) -> Array:
        """A microbatch's loss as what is summed."""

    def figures(self, figures: dict[str, Array]) -> dict[str, Array]:
        """A layer's figures as what is summed."""


class Floats(NamedTuple):
    """Sums in a floating-point dtype."""

    dtype: Any
    checked: bool = False  # with `CHECKSUM`

    def zeros(self, weights: dict[Path, Array]) -> Gradients:
        zeros = {path: _zeros(w, w.shape, self.dtype) for path, w in weights.items()}
        return zeros | (_beside(weights, CHECKSUM, jnp.uint32) if self.checked else {})

    def terms(self, gradients: Gradients) -> Gradients:
        terms = {path: grad.astype(self.dtype) for path, grad in gradients.items()}
        return terms | (_checksum(terms) if self.checked else {})

    def no_loss(self) -> Array:
        return jnp.zeros((), at_least_fp32(self.dtype))

    def loss(self, loss: Array) -> Array:
        return loss.astype(at_least_fp32(self.dtype))

    def figures(self, figures: dict[str, Array]) -> dict[str, Array]:
        return figures


class Integers(NamedTuple):
    """Sums of integers, which have the same bits on every mesh (`parallel/integer_sums.py`)."""

    exponent: Array  # of the bound of gradients
    bits: int  # of a digit
    checked: bool = False  # with `CHECKSUM`

    def zeros(self, weights: dict[Path, Array]) -> Gradients:
        zeros = _beside(weights, NOT_SUMMED, jnp.int32, 2)
        for path, w in weights.items():
            layers = w.shape[:1] if path[0] == "blocks" else ()
            zeros[path] = _zeros(w, (*layers, 2, *w.shape[len(layers) :]), jnp.int32)
        return zeros | (_beside(weights, CHECKSUM, jnp.uint32) if self.checked else {})

    def terms(self, gradients: Gradients) -> Gradients:
        terms = {path: integers(grad, self.exponent, self.bits) for path, grad in gradients.items()}
        counts = [not_summed(grad, self.exponent) for grad in gradients.values()]
        terms |= {(next(iter(gradients))[0], NOT_SUMMED): sum(counts[1:], start=counts[0])}
        return terms | (_checksum(terms) if self.checked else {})

    def no_loss(self) -> Array:
        return jnp.zeros((_LOSS_DIGITS + 1,), jnp.int32)

    def loss(self, loss: Array) -> Array:
        digits = integers(loss, _LOSS_EXPONENT, self.bits, _LOSS_DIGITS)
        return jnp.append(digits, not_summed(loss, _LOSS_EXPONENT).sum(dtype=jnp.int32))

    def figures(self, figures: dict[str, Array]) -> dict[str, Array]:
        return {name: x if jnp.issubdtype(x.dtype, jnp.integer) else self.loss(x) for name, x in figures.items()}

    def gradient(self, path: Path, sums: Array) -> Array:
        """A sum of a weight's gradients on the stages, as floats."""
        return floats(sums, self.exponent, self.bits, 3 if path[0] == "blocks" else 0)

    def total(self, losses: Array) -> Array:
        """A sum of losses as a float: not a number if one was none, or too large."""
        return jnp.where(losses[-1] == 0, floats(losses[:-1], _LOSS_EXPONENT, self.bits), jnp.nan)


def _beside(weights: dict[Path, Array], name: str, dtype: Any, *shape: int) -> Gradients:
    """Zeros with a name beside the paths of weights."""
    axes = sorted({axis for w in weights.values() for axis in varying_axes(w)})
    layers = {path[0]: w.shape[:1] if path[0] == "blocks" else () for path, w in weights.items()}
    return {(first, name): vary(jnp.zeros((*each, *shape), dtype), axes) for first, each in layers.items()}


def _checksum(terms: Gradients) -> Gradients:
    return {(next(iter(terms))[0], CHECKSUM): checksum([*terms.values()])}


def _zeros(like: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    return vary_as(jnp.zeros(shape, dtype), like)


class Reduction(Protocol):
    """Global sums of gradients, in their owners' shards, from local ones. Layers may be stacked or not."""

    def on_stage(self, gradients: Gradients) -> Gradients:
        """Over the devices that share a stage, one large weight after the other."""

    def over_stages(self, gradients: Gradients) -> Gradients:
        """Of what `on_stage` made of the ends'."""

    def everywhere(self, gradients: Gradients) -> Gradients:
        """Of the ends', at once."""


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


def one_layer(stacks: dict[Path, Array], at: int) -> dict[Path, Array]:
    """One of the layers in stacks."""
    return {path: stack[at] for path, stack in stacks.items()}

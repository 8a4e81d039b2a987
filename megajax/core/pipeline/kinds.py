"""What a stage does with a microbatch if its layers are of two kinds: `stages.Layers` of each, period by period.

To one kind, its layers in a period are a chunk, so it has several of these in every chunk of the stage. Which kind is
next is known while tracing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.core.pipeline.buffers import idle
from megajax.core.pipeline.model import Factors, Figures
from megajax.core.pipeline.rows import Number
from megajax.core.pipeline.stages import Layers, Output, summed
from megajax.core.pipeline.sums import Gradients, Last, Reduction, Summation, Sums
from megajax.core.trees import Path, Tree


@dataclass(frozen=True)
class LayersOfKinds:
    """A stage's layers by the names of their kinds, in the order in which a period has these; with the functions of
    `Layers`."""

    kinds: Mapping[str, Layers]
    num_chunks: int

    @property
    def _first(self) -> Layers:
        return next(iter(self.kinds.values()))

    @property
    def _periods(self) -> int:
        """Of a chunk."""
        return self._first.num_chunks // self.num_chunks

    @property
    def summation(self) -> Summation:
        return self._first.summation

    @property
    def recompute_stage(self) -> bool:
        return self._first.recompute_stage

    @property
    def weights(self) -> Tree:
        return {kind: layers.weights for kind, layers in self.kinds.items()}

    def with_weights(self, weights: Tree, **how: bool) -> "LayersOfKinds":
        kinds = self.kinds.items()
        return replace(self, kinds={kind: layers.with_weights(weights[kind], **how) for kind, layers in kinds})

    def no_gradients(self) -> Gradients:
        return _of_all({kind: layers.no_gradients() for kind, layers in self.kinds.items()})

    def slots(self, path: Path) -> int:
        return self._periods * self.kinds[path[1]].layers_per_chunk

    def factor_types(self, x: Array, context: Tree) -> Factors:
        types = {kind: layers.factor_types(x, context) for kind, layers in self.kinds.items()}
        return jax.eval_shape(lambda: idle(types, self._periods))

    def run(self, chunk: Number, x: Array, context: Tree) -> Output:
        x, figures = self._scan(lambda kind, number, x, _: self.kinds[kind].run(number, x, context), x, chunk)
        return x, _total(figures)

    def forward_with_residuals(self, chunk: Number, x: Array, context: Tree) -> tuple[Output, Tree]:
        def run(kind: str, number: Array, x: Array, _: None) -> tuple[Array, tuple[Figures, list[Array]]]:
            (x, figures), residuals = self.kinds[kind].forward_with_residuals(number, x, context)
            return x, (figures, residuals)

        x, results = self._scan(run, x, chunk)
        figures, residuals = ({kind: result[part] for kind, result in results.items()} for part in (0, 1))
        return (x, _total(figures)), residuals

    def pull_back(
        self,
        chunk: Number,
        residuals: Tree,
        context: Tree,
        grad: Array,
        sums: Sums,
        slot: Number = 0,
        last: Last | None = None,
    ) -> tuple[Array, Sums]:
        def pull_back(kind: str, number: Array, residuals: list[Array], *args: Any) -> tuple[Array, Sums]:
            return self.kinds[kind].pull_back(number, residuals, context, *args)

        return self._summed_up(pull_back, grad, chunk, residuals, sums, slot, last)

    def add_weight_gradients(self, chunk: Number, sums: Sums, slot: Number, last: Last | None = None) -> Sums:
        def add(kind: str, number: Array, _: None, grad: None, *args: Any) -> tuple[None, Sums]:
            return grad, self.kinds[kind].add_weight_gradients(number, *args)

        return self._summed_up(add, None, chunk, dict.fromkeys(self.kinds), sums, slot, last)[1]

    def _summed_up(
        self, gradients: Callable, grad: Any, chunk: Number, xs: Tree, sums: Sums, slot: Number, last: Last | None
    ) -> tuple[Any, Sums]:
        """Scan `gradients`, which returns its carry and the sums of a period's layers of a kind, over a chunk. The last
        sums are reduced period by period."""
        factors = sums.factors or dict.fromkeys(self.kinds)
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), factors)  # a slot for every period

        def slot_of(number: Array) -> Array:
            return slot * self._periods + number - chunk * self._periods

        if last is None:

            def add(kind: str, number: Array, carry: tuple[Any, Sums], x: Tree) -> tuple[tuple[Any, Sums], None]:
                grad, (total, factors) = carry
                own = Sums(_of_kind(kind, total), factors[kind])
                grad, own = gradients(kind, number, x, grad, own, slot_of(number), None)
                return (grad, Sums(total | _of_all({kind: own.gradients}), factors | {kind: own.factors})), None

            (grad, after), _ = self._scan(add, (grad, Sums(sums.gradients, flat)), chunk, xs, reverse=True)
            stored = jax.tree.map(lambda x, like: x.reshape(like.shape), after.factors, factors)
            return grad, Sums(after.gradients, sums.factors and stored)

        def reduce(kind: str, number: Array, grad: Any, x: tuple[Tree, Gradients]) -> tuple[Any, Gradients]:
            own, end = Sums(x[1], flat[kind]), Last({}, cast(Reduction, _ReductionOfKind(kind, last.reduction)))
            grad, reduced = gradients(kind, number, x[0], grad, own, slot_of(number), end)
            return grad, reduced.gradients

        of_head, periods = last.reduction.on_stage(last.of_head), self._periods
        own = jax.tree.map(lambda x: x.reshape(periods, -1, *x.shape[1:]), sums.gradients)
        xs = {kind: (xs[kind], _of_kind(kind, own)) for kind in self.kinds}
        grad, reduced = self._scan(reduce, grad, chunk, xs, reverse=True)
        return grad, Sums(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), _of_all(reduced)) | of_head)

    def _scan(
        self, run: Callable, carry: Tree, chunk: Number, xs: Tree = None, reverse: bool = False
    ) -> tuple[Tree, dict[str, Tree]]:
        """Scan `run(kind, chunk of the kind's layers, carry, x)` over a chunk's periods and their kinds."""
        order, xs = [*self.kinds][:: -1 if reverse else 1], xs or dict.fromkeys(self.kinds)

        def period(carry: Tree, numbered: tuple[Array, Tree]) -> tuple[Tree, dict[str, Tree]]:
            (number, x), results = numbered, {}
            for kind in order:
                carry, results[kind] = run(kind, number, carry, x[kind])
            return carry, results

        numbers = chunk * self._periods + jnp.arange(self._periods, dtype=jnp.int32)
        return lax.scan(period, carry, (numbers, xs), reverse=reverse, unroll=self._first.unroll)


@dataclass(frozen=True)
class _ReductionOfKind:
    """The part of a `Reduction` that `Layers` needs; paths are those among a kind's layers."""

    kind: str
    reduction: Reduction

    def on_stage(self, gradients: Gradients) -> Gradients:
        return _of_kind(self.kind, self.reduction.on_stage(_of_all({self.kind: gradients})))


def _of_all(gradients: Mapping[str, Gradients]) -> Gradients:
    """The gradients of kinds, by their paths among those of all layers."""
    kinds = gradients.items()
    return {(first, kind, *path): x for kind, of_kind in kinds for (first, *path), x in of_kind.items()}


def _of_kind(kind: str, gradients: Gradients) -> Gradients:
    """A kind's gradients among those of all."""
    return {(first, *path): x for (first, own, *path), x in gradients.items() if own == kind}


def _total(figures: Mapping[str, Figures]) -> Figures:
    """The figures of all kinds, summed over periods."""
    first, *others = (summed(of_kind) for of_kind in figures.values())
    return jax.tree.map(lambda *each: sum(each[1:], start=each[0]), first, *others)

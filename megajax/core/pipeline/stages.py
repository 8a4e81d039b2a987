"""What a stage does with a microbatch: run a chunk's layers forward, and backward from the residuals.

A layer's forward is `jax.vjp`. The pullback that it returns is a pytree whose leaves are either the layer's own
weights, recognized by identity and not saved, or residuals, which are saved. The backward puts the weights back. So
`jax.checkpoint` around the layer decides what is saved, no weights are ever saved, and no layer runs an extra time.

If weight gradients are deferred, the pullback returns their factors instead (`parallel/products.py`), which are
buffered until `add_weight_gradients`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax import Array, lax

from megajax.core.parallel.shards import Shards
from megajax.core.pipeline.buffers import idle, stored, taken, when
from megajax.core.pipeline.model import Factors, Figures, Products
from megajax.core.pipeline.pullback import LayerFunction, with_pullback
from megajax.core.pipeline.rows import Number, Predicate
from megajax.core.pipeline.sums import Gradients, Last, Reduction, Summation, Sums, one_layer
from megajax.core.private import tied
from megajax.core.trees import Path, Tree

Output = tuple[Array, Figures]


def rematerialized(function: LayerFunction, policy: Callable[..., bool] | None, *, prevent_cse: bool) -> LayerFunction:
    """`function` whose backward pass recomputes everything but what the policy saves; without a policy, only what the
    layer itself recomputes."""
    return function if policy is None else jax.checkpoint(function, prevent_cse=prevent_cse, policy=policy)


@dataclass(frozen=True)
class Layers:
    """A stage's layers, one chunk at a time, as a pair of functions: forward and backward."""

    function: LayerFunction  # one layer: `LoopModel.layer`, of which the backward pass may recompute something
    weights: Tree  # stacked [v · n, …]: n slots per chunk, chunk after chunk; or a tuple of the slots', not copied then
    layer_index: Array  # of each of this stage's slots, -1 if padded (it passes its input on); int32 [v, n]
    unroll: bool  # unroll the loop over layers in the compiled program
    summation: Summation  # of gradients
    padded: bool  # at least one slot on some stage holds no layer
    storage: Shards  # how weights are sharded; a layer's are gathered just before its forward, and again for backward
    recompute_stage: bool = False  # save only a stage's input, and run its forward again in the backward pass
    deferred: Products | None = None  # those whose weight gradients are computed later, from their factors
    frozen: frozenset[Path] = frozenset()  # weights that have no gradient
    first_trained: int = 0  # the backward pass leaves out the layers before this one
    awaits: bool = False  # a layer's forward waits for all of its weights, and those of the next layer arrive meanwhile
    _known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)  # see `_traced_once`

    @property
    def num_chunks(self) -> int:
        return self.layer_index.shape[0]

    @property
    def layers_per_chunk(self) -> int:
        return self.layer_index.shape[1]

    def with_weights(self, weights: Tree, *, awaits: bool = False, stack: bool = False) -> "Layers":
        """The same with other weights, which `stack` makes one stack."""
        return replace(self, weights=stacked(weights) if stack else weights, awaits=awaits)

    def no_gradients(self) -> Gradients:
        """Sums of nothing."""
        flat = flatten_dict(self.weights)
        return self.summation.zeros({("blocks", *path): w for path, w in flat.items() if path not in self.frozen})

    def slots(self, path: Path) -> int:
        """How many of the layers in the stack of a weight a chunk has."""
        return self.layers_per_chunk

    # Forward.

    def run(self, chunk: Number, x: Array, context: Tree) -> Output:
        """Run a chunk forward without saving residuals."""
        x, figures = self._scan(partial(self._in_slot, self._layer, context), x, chunk)
        return x, summed(figures)

    def forward_with_residuals(self, chunk: Number, x: Array, context: Tree) -> tuple[Output, list[Array]]:
        """`run`, plus everything that `pull_back` needs, stacked over the chunk's layers."""
        x, (figures, residuals) = self._scan(partial(self._in_slot, self._layer_with_residuals, context), x, chunk)
        return (x, summed(figures)), residuals

    def _in_slot(
        self, layer: Callable, context: Tree, x: Array, weights: Tree, index: Array, _: None
    ) -> tuple[Array, Tree]:
        return _or_passed_on(index >= 0 if self.padded else True, layer, weights, index, context, x)

    def _layer(self, weights: Tree, index: Array, context: Tree, x: Array) -> Output:
        x, weights = tied((x, weights)) if self.awaits else (x, weights)
        return self.function(self.storage.gather(weights), None, index, x, context)

    def _layer_with_residuals(
        self, weights: Tree, index: Array, context: Tree, x: Array
    ) -> tuple[Array, tuple[Figures, list[Array]]]:
        x, weights = tied((x, weights)) if self.awaits else (x, weights)
        gathered = self.storage.gather(weights)
        args = gathered, self._dummies(gathered, x, context), index, x, context
        (y, figures), residuals, pullback = with_pullback(self.function, self._excluded, *args)
        self._known["pullback", _types(args)] = pullback
        return y, (figures, residuals)

    # Backward.

    def pull_back(
        self,
        chunk: Number,
        residuals: list[Array],
        context: Tree,
        grad: Array,
        sums: Sums,
        slot: Number = 0,
        last: Last | None = None,
    ) -> tuple[Array, Sums]:
        """Pull `grad` back through a chunk, and add its weight gradients to `sums`, or store their factors. If they are
        the `last`, the sums of the chunk, [n, …], and of the head are returned reduced: each layer's while the layers
        before it compute, and the head's while the last layer does."""
        gradients, xs = partial(self._pull_back, context, slot), (self._numbers, residuals)
        (grad, factors), sums = self._summed_up(gradients, (grad, sums.factors), chunk, xs, sums, last, reverse=True)
        return grad, sums._replace(factors=factors)

    @jax.named_scope("weight_gradients")
    def add_weight_gradients(self, chunk: Number, sums: Sums, slot: Number, last: Last | None = None) -> Sums:
        """Add a chunk's deferred weight gradients, from the factors that its backward stored in `slot`; `last` as in
        `pull_back`."""
        gradients = partial(self._weight_gradients, sums.factors, slot)
        return self._summed_up(gradients, None, chunk, self._numbers, sums, last)[1]

    def _pull_back(
        self, context: Tree, slot: Number, carry: tuple[Array, Factors], weights: Tree, index: Array, xs: Tree
    ) -> tuple[tuple[Array, Factors], Gradients]:
        """The carry after a layer's backward, and the gradients of its weights."""
        (grad, buffer), (layer, residuals) = carry, xs
        # Sums stay outside: inside the conditional, all of a stack would be copied for every layer.
        operands = weights, index, context, residuals, grad
        grad, (factors, grads) = _or_passed_on(self._is_reached(index), self._pulled, *operands)
        return (grad, stored(buffer, (slot, layer), factors)), grads

    def _pulled(
        self, weights: Tree, index: Array, context: Tree, residuals: list[Array], grad: Array
    ) -> tuple[Array, tuple[Factors, Gradients]]:
        gathered = self.storage.gather(weights)
        dummies = self._dummies(gathered, grad, context)  # the gradient has the same type as the input
        args = gathered, dummies, index, grad, context
        pullback = self._traced_once("pullback", self._pullback, *args)
        grads, factors, grad = pullback.restore((gathered, dummies), residuals)(grad)
        return grad, (factors, self._scattered(grads))

    def _pullback(self, *args: Tree) -> Any:
        return with_pullback(self.function, self._excluded, *args)[2]

    def _weight_gradients(
        self, factors: Factors, slot: Number, carry: None, weights: Tree, index: Array, layer: Array
    ) -> tuple[None, Gradients]:
        reached = self._is_reached(index)
        return _or_passed_on(reached, self._from_factors, weights, factors, slot, layer, carry)

    def _from_factors(
        self, weights: Tree, factors: Factors, slot: Number, layer: Array, carry: None
    ) -> tuple[None, Gradients]:
        assert self.deferred is not None
        of_layer = jax.tree.map(lambda buffer: buffer[slot, layer], factors)
        return carry, self._scattered(
            self.deferred.weight_gradients(jax.eval_shape(self.storage.gather, weights), of_layer)
        )

    def _is_reached(self, index: Array) -> Predicate:
        """Whether the backward pass does not end before a layer; a padded slot has none."""
        return index >= self.first_trained if self.padded or self.first_trained else True

    def _scattered(self, grads: dict[Path, Array]) -> Gradients:
        """Gradients of gathered weights, scattered to the stored shards."""
        terms = self.summation.terms({("blocks", *path): grad for path, grad in grads.items()})
        return self.storage.some(terms, "blocks").scatter(terms)

    def _summed_up(
        self,
        gradients: Callable,
        carry: Tree,
        chunk: Number,
        xs: Tree,
        sums: Sums,
        last: Last | None,
        reverse: bool = False,
    ) -> tuple[Tree, Sums]:
        """Scan `gradients`, which returns its carry and a layer's gradients, over a chunk, and add these up."""
        if last is None:
            start, xs = (carry, Sums(sums.gradients)), (self._slots(chunk), xs)
            (carry, after), _ = self._scan(partial(_added_up, gradients), start, chunk, xs, reverse)
            return carry, after._replace(factors=sums.factors)
        nothing = idle(jax.eval_shape(lambda: last.reduction.on_stage(one_layer(sums.gradients, 0))))
        done, xs = (nothing, last.reduction.on_stage(last.of_head)), (sums.gradients, xs)
        (carry, (end, of_head)), reduced = self._scan(
            partial(_reduced, gradients, last.reduction), (carry, done), chunk, xs, reverse
        )
        return carry, Sums({path: _shifted(reduced[path], grad, reverse) for path, grad in end.items()} | of_head)

    # What both need.

    @property
    def _excluded(self) -> frozenset[Path]:
        """Weights whose gradients the pullback does not return: deferred or frozen."""
        return self.frozen if self.deferred is None else self.frozen | self.deferred.products

    def factor_types(self, x: Array, context: Tree) -> Factors:
        """Types of the factors of a chunk's layers; nothing is computed."""
        weights = jax.eval_shape(lambda: self.storage.gather(taken(self.weights, 0)))
        types = self._layer_factors(weights, x, context)
        return jax.eval_shape(lambda: idle(types, self.layers_per_chunk))

    def _dummies(self, gathered: Tree, x: Array, context: Tree) -> Factors:
        return idle(self._layer_factors(gathered, x, context))

    def _layer_factors(self, gathered: Tree, x: Array, context: Tree) -> Factors:
        return self.deferred and self._traced_once("factors", self.deferred.factors, gathered, x, context)

    def _traced_once(self, name: str, function: Callable, *args: Any) -> Any:
        """What a function returns, its arrays as types; it is known if it was asked for arguments of these types."""
        key = name, _types(args)
        if key not in self._known:
            self._known[key] = jax.eval_shape(function, *args)
        return self._known[key]

    @property
    def _numbers(self) -> Array:
        """Of the layers of a chunk."""
        return jnp.arange(self.layers_per_chunk, dtype=jnp.int32)

    def _slots(self, chunk: Number) -> Array:
        """Indices of a chunk's layers in the stack."""
        return chunk * self.layers_per_chunk + self._numbers

    def _scan(
        self, layer: Callable, carry: Tree, chunk: Number, xs: Tree = None, reverse: bool = False
    ) -> tuple[Tree, Tree]:
        """Scan `layer(carry, weights, layer index, x)` over a chunk's layers."""
        stack = stacked(self.weights), self.layer_index.reshape(-1)
        several = self.num_chunks > 1
        body = partial(_scan_stack, layer, stack) if several else partial(_scan_slot, layer)
        return lax.scan(
            body, carry, (self._slots(chunk) if several else stack, xs), reverse=reverse, unroll=self.unroll
        )


def stacked(layers: Tree) -> Tree:
    """A stack of layers' weights, given as one or as a tuple of each layer's. XLA takes slices of a stack made beside
    them from the tuple, and copies nothing."""
    return jax.tree.map(lambda *each: jnp.stack(each), *layers) if isinstance(layers, tuple) else layers


def _scan_slot(layer: Callable, carry: Tree, slot: tuple[tuple[Tree, Array], Tree]) -> tuple[Tree, Tree]:
    (weights, index), x = slot
    return layer(carry, weights, index, x)


def _scan_stack(layer: Callable, stack: Tree, carry: Tree, slot: tuple[Array, Tree]) -> tuple[Tree, Tree]:
    index, x = slot
    return layer(carry, *taken(stack, index), x)


def _or_passed_on(runs: Predicate, layer: Callable, *operands: Tree) -> tuple[Tree, Tree]:
    """What a layer makes of its last operand, and what else; elsewhere that operand, and zeros, which sums add."""
    return when(runs, _call, layer, *operands, otherwise=_passed_on)


def _call(layer: Callable, *operands: Tree) -> tuple[Tree, Tree]:
    return layer(*operands)


def _passed_on(layer: Callable, *operands: Tree) -> tuple[Tree, Tree]:
    *others, x = operands
    return x, idle(jax.eval_shape(partial(layer, *others), x)[1])


def _added_up(gradients: Callable, carry: Tree, weights: Tree, index: Array, xs: Tree) -> tuple[Tree, None]:
    """Add a layer's gradients to a stack of sums."""
    (carry, sums), (slot, x) = carry, xs
    carry, grads = gradients(carry, weights, index, x)
    return (carry, sums.add(grads, slot)), None


def _reduced(
    gradients: Callable, reduction: Reduction, carry: Tree, weights: Tree, index: Array, xs: Tree
) -> tuple[Tree, Tree]:
    """Complete a layer's sums and reduce them; returns those of the layer before."""
    (carry, done), (sums, x) = carry, xs
    carry, grads = gradients(carry, weights, index, x)
    # Otherwise XLA would add the gradients of all layers in one kernel, and reduce all of them, at the end. The next
    # layer waits for the sums, and with it the layer after that for what was reduced before.
    carry, (before, of_head), sums = tied((carry, done, Sums(sums).add(grads).gradients))
    return (carry, (reduction.on_stage(sums), of_head)), before


def _shifted(reduced: Array, end: Array, reverse: bool) -> Array:
    """What `_reduced` returned for each layer, which is another one's, and at the end."""
    return jnp.concatenate([end[None], reduced[:-1]] if reverse else [reduced[1:], end[None]])


def summed(figures: Figures) -> Figures:
    """Sum figures over a chunk's layers."""
    return jax.tree.map(lambda stacked: jnp.sum(stacked, axis=0, dtype=stacked.dtype), figures)


def _types(args: Tree) -> tuple[Any, ...]:
    """The types of arrays in a tree, hashable."""
    leaves, structure = jax.tree.flatten(jax.eval_shape(lambda args: args, args))
    return structure, *leaves

"""What a stage does with a microbatch: run a chunk's layers forward, and backward from the residuals.

A layer's forward is `jax.vjp`. The pullback that it returns is a pytree whose leaves are either the layer's own
weights, recognized by identity and not saved, or residuals, which are saved. The backward puts the weights back. So
`jax.checkpoint` around the layer decides what is saved, no weights are ever saved, and no layer runs an extra time.

If weight gradients are deferred, the pullback returns their factors instead (`parallel/products.py`), which are
buffered until `add_weight_gradients`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array, lax

from megajax.core.parallel.collectives import zeros_like_type
from megajax.core.parallel.products import NO_FACTORS
from megajax.core.parallel.shards import Shards
from megajax.core.pipeline.model import Factors, Figures, Path, Products
from megajax.core.pipeline.pullback import LayerFunction, with_pullback
from megajax.core.pipeline.rows import Number
from megajax.core.private import tied

Tree = Any
Output = tuple[Array, Figures]
Reduce = Callable[[str, Tree], Tree]
"""Sums, over the devices that share a stage, of gradients: of `blocks`, one layer's or several stacked layers', or of
`shared`, some of the ends'."""


def when(predicate: Array | bool, then: Callable, otherwise: Callable, *operands):
    """`lax.cond`, decided while tracing if the predicate is known."""
    if isinstance(predicate, bool):
        return (then if predicate else otherwise)(*operands)
    return lax.cond(predicate, then, otherwise, *operands)


def idle(type_: Any, leading: tuple[int, ...] = ()) -> Array:
    """A placeholder for a value that was not computed. It is never used: NaN for zero changes nothing (tested)."""
    return zeros_like_type(type_, leading)


def rematerialized(function: LayerFunction, policy: Callable[..., bool] | None, *, prevent_cse: bool) -> LayerFunction:
    """`function` whose backward pass recomputes everything but what the policy saves; without a policy, only what the
    layer itself recomputes."""
    return function if policy is None else jax.checkpoint(function, prevent_cse=prevent_cse, policy=policy)


class Sums(NamedTuple):
    """What a stage's backward passes accumulate."""

    total: Tree  # gradient sums of the layers' weights, [v · n, …]
    factors: Factors  # ring buffer of factors of pending weight gradients, [slots, n, …]; empty if none are deferred
    of_head: Tree = None  # of the weights that only the head uses, where the last backward pass reduces them


@dataclass(frozen=True)
class Layers:
    """A stage's layers, one chunk at a time, as a pair of functions: forward and backward."""

    function: LayerFunction  # one layer: `LoopModel.layer`, of which the backward pass may recompute something
    weights: Tree  # stacked [v · n, …]: n slots per chunk, chunk after chunk; or a tuple of the slots', not copied then
    layer_index: Array  # of each of this stage's slots, -1 if padded (it passes its input on); int32 [v, n]
    unroll: bool  # unroll the loop over layers in the compiled program
    padded: bool  # at least one slot on some stage holds no layer
    storage: Shards  # how weights are sharded; a layer's are gathered just before its forward, and again for backward
    recompute_stage: bool = False  # save only a stage's input, and run its forward again in the backward pass
    products: Products | None = None  # those whose weight gradients are deferred; None: none are
    frozen: frozenset[Path] = frozenset()  # weights that have no gradient
    first_trained: int = 0  # the backward pass leaves out the layers before this one
    awaits: bool = False  # a layer's forward waits for all of its weights, and those of the next layer arrive meanwhile

    @property
    def num_chunks(self) -> int:
        return self.layer_index.shape[0]

    @property
    def layers_per_chunk(self) -> int:
        return self.layer_index.shape[1]

    def forward(self, chunk: Number, x: Array, context: Tree) -> tuple[Output, list[Array]]:
        """A chunk's output with its figures, and what to save for its backward (`restored`)."""
        if self.recompute_stage:
            return self.run(chunk, x, context), [x]
        return self.forward_with_residuals(chunk, x, context)

    def restored(self, chunk: Number, saved: list[Array], context: Tree) -> list[Array]:
        """The residuals for `pull_back`, from what `forward` saved."""
        return self.forward_with_residuals(chunk, saved[0], context)[1] if self.recompute_stage else saved

    @jax.named_scope("weight_gradients")
    def add_weight_gradients(self, chunk: Number, sums: Sums, slot: Number, reduce: Reduce | None = None) -> Sums:
        """Add a chunk's deferred weight gradients, from the factors that its backward stored in `slot`; `reduce` as in
        `pull_back`."""
        products = self.products
        assert products is not None

        def layer(carry: tuple[Tree, Tree], own: Tree, index: Array, places: tuple[Array, Array]) -> tuple[Tree, Tree]:
            (total, done), (place, number) = carry, places

            def gradients() -> dict[Path, Array]:
                factors = jax.tree.map(lambda buffer: buffer[slot, number], sums.factors)
                found = products.weight_gradients(jax.eval_shape(self.storage.gather, own), factors)
                return self._scattered(found, total)

            none = lambda: jax.tree.map(zeros_like_type, jax.eval_shape(gradients))  # noqa: E731
            found = when(self._ends_before(index), none, gradients)
            if reduce is None:
                return (_added(total, found, place), None), None
            (total, (before, of_head)), reduced = _reduced(reduce, (total, done), total, found, place)
            return (total, (reduced, of_head)), before

        numbers = jnp.arange(self.layers_per_chunk, dtype=jnp.int32)
        carry = sums.total, None if reduce is None else _head_reduced(reduce, sums)
        (total, done), reduced = self._scan(layer, carry, chunk, (self._slots(chunk), numbers))
        if done is None:
            return sums._replace(total=total)
        return Sums(_joined(reduced, done[0]), sums.factors, done[1])

    def factor_types(self, x: Array, context: Tree) -> Factors:
        """Types of the factors of one layer; nothing is computed."""
        own = jax.eval_shape(lambda: self.storage.gather(jax.tree.map(lambda leaf: leaf[0], self.weights)))
        return self._layer_factors(own, x, context)

    def _layer_factors(self, gathered: Tree, x: Array, context: Tree) -> Factors:
        return NO_FACTORS if self.products is None else jax.eval_shape(self.products.factors, gathered, x, context)

    def run(self, chunk: Number, x: Array, context: Tree) -> Output:
        """Run a chunk forward without saving residuals."""

        def layer(x: Array, own: Tree, index: Array, _):
            def run(x: Array) -> Output:
                x, weights = tied((x, own)) if self.awaits else (x, own)
                return self.function(self.storage.gather(weights), NO_FACTORS, index, x, context)

            skip = lambda x: (x, _zeros(jax.eval_shape(run, x)[1]))  # noqa: E731
            return when(index < 0 if self.padded else False, skip, run, x)

        x, figures = self._scan(layer, x, chunk)
        return x, _summed(figures)

    def forward_with_residuals(self, chunk: Number, x: Array, context: Tree) -> tuple[Output, list[Array]]:
        """`run`, plus everything that `pull_back` needs, stacked over the chunk's layers."""

        def layer(x: Array, own: Tree, index: Array, _):
            def run(x: Array) -> tuple[Array, tuple[Figures, list[Array]]]:
                x, weights = tied((x, own)) if self.awaits else (x, own)
                gathered = self.storage.gather(weights)
                dummies = self._dummies(gathered, x, context)
                (y, figures), residuals, _ = with_pullback(
                    self.function, self._apart, gathered, dummies, index, x, context
                )
                return y, (figures, residuals)

            if not self.padded:
                return run(x)
            types, residuals = jax.eval_shape(run, x)[1]
            skip = lambda x: (x, (_zeros(types), [idle(residual) for residual in residuals]))  # noqa: E731
            return lax.cond(index >= 0, run, skip, x)

        x, (figures, residuals) = self._scan(layer, x, chunk)
        return (x, _summed(figures)), residuals

    def pull_back(
        self,
        chunk: Number,
        residuals: list[Array],
        context: Tree,
        grad: Array,
        sums: Sums,
        slot: Number = 0,
        reduce: Reduce | None = None,
    ) -> tuple[Array, Sums]:
        """Pull `grad` back through a chunk, and add its weight gradients to `sums`, or store their factors in `slot`.
        With `reduce` this completes the chunk's sums: in their place it returns the reduced ones, [n, …], each layer's
        reduced while the layers before it compute, and the head's while the last layer does."""

        def layer(carry: tuple[Array, Tree, Factors, Tree], own: Tree, index: Array, xs: tuple[Array, Array, list]):
            (grad, total, buffer, done), (place, number, residuals) = carry, xs

            def pull(grad: Array) -> tuple[dict[Path, Array], Factors, Array]:
                gathered = self.storage.gather(own)
                # The gradient has the same type as the input.
                dummies = self._dummies(gathered, grad, context)
                structure = lambda *args: with_pullback(self.function, self._apart, *args)[2]  # noqa: E731
                pullback = jax.eval_shape(structure, gathered, dummies, index, grad, context)
                grads, factors, grad = pullback.restore((gathered, dummies), residuals)(grad)
                return self._scattered(grads, total), factors, grad

            def skip(grad: Array) -> tuple[dict[Path, Array], Factors, Array]:
                grads, factors, _ = jax.eval_shape(pull, grad)
                return jax.tree.map(zeros_like_type, grads), jax.tree.map(idle, factors), grad

            # The sums stay outside: inside the conditional, all of them would be copied for every layer.
            grads, factors, grad = when(self._ends_before(index), skip, pull, grad)
            buffer = jax.tree.map(lambda slots, new: slots.at[slot, number].set(new), buffer, factors)
            if reduce is None:
                return (grad, _added(total, grads, place), buffer, None), None
            (grad, (before, of_head)), reduced = _reduced(reduce, (grad, done), total, grads, place)
            return (grad, total, buffer, (reduced, of_head)), before

        numbers = jnp.arange(self.layers_per_chunk, dtype=jnp.int32)
        done = None if reduce is None else _head_reduced(reduce, sums)
        carry, xs = (grad, sums.total, sums.factors, done), (self._slots(chunk), numbers, residuals)
        (grad, total, factors, done), reduced = self._scan(layer, carry, chunk, xs, reverse=True)
        if done is None:
            return grad, sums._replace(total=total, factors=factors)
        return grad, Sums(_joined(reduced, done[0], reverse=True), factors, done[1])

    def _scattered(self, grads: dict[Path, Array], total: Tree) -> dict[Path, Array]:
        """Scatter gradients of gathered weights to the stored shards, in the dtype of the sums."""
        shardings = flatten_dict(self.storage.shardings)
        storage = Shards({path: shardings[path] for path in grads})
        return storage.scatter(grads, jax.tree.leaves(total)[0].dtype)

    @property
    def _apart(self) -> frozenset[Path]:
        """Weights whose gradients the pullback does not return: deferred or frozen."""
        return self.frozen if self.products is None else self.frozen | self.products.products

    def trained(self) -> Tree:
        """The weights that have gradients."""
        flat = flatten_dict(self.weights)
        return unflatten_dict({path: weight for path, weight in flat.items() if path not in self.frozen})

    def _dummies(self, gathered: Tree, x: Array, context: Tree) -> Factors:
        return jax.tree.map(idle, self._layer_factors(gathered, x, context))

    def _ends_before(self, index: Array) -> Array | bool:
        """Whether the backward pass ends before a layer; a padded slot has none."""
        return index < self.first_trained if self.padded or self.first_trained else False

    def _slots(self, chunk: Number) -> Array:
        """Indices of a chunk's layers in the stack."""
        return chunk * self.layers_per_chunk + jnp.arange(self.layers_per_chunk, dtype=jnp.int32)

    def _scan(
        self, layer: Callable, carry: Tree, chunk: Number, xs: Tree = None, reverse: bool = False
    ) -> tuple[Tree, Tree]:
        """Scan `layer(carry, weights, layer index, x)` over a chunk's layers."""
        stack = stacked(self.weights), self.layer_index.reshape(-1)

        def body(carry: Tree, slot: tuple[Any, Tree]):
            own = slot[0]
            if self.num_chunks > 1:
                own = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, slot[0], keepdims=False), stack)
            return layer(carry, *own, slot[1])

        slots = stack if self.num_chunks == 1 else self._slots(chunk)
        return lax.scan(body, carry, (slots, xs), reverse=reverse, unroll=self.unroll)


def stacked(weights: Tree) -> Tree:
    """A stack of layers' weights, given as one or as a tuple. XLA takes slices of a stack made beside them from the
    tuple, and copies nothing."""
    return jax.tree.map(lambda *layers: jnp.stack(layers), *weights) if isinstance(weights, tuple) else weights


def _zeros(types: Figures) -> Figures:
    return jax.tree.map(zeros_like_type, types)


def _summed(figures: Figures) -> Figures:
    """Sum figures over a chunk's layers."""
    return jax.tree.map(lambda stacked: jnp.sum(stacked, axis=0, dtype=stacked.dtype), figures)


@jax.named_scope("gradient_sums")
def _reduced(reduce: Reduce, carry: Tree, total: Tree, grads: dict[Path, Array], place: Array) -> tuple[Tree, Tree]:
    """`carry`, and one layer's sums with its last gradients, reduced. These are not stored."""
    sums = {path: stack[place] for path, stack in flatten_dict(total).items()}
    sums |= {path: sums[path] + grad for path, grad in grads.items()}
    # Otherwise XLA would add the gradients of all layers in one kernel, and reduce all of them, at the end. The next
    # layer waits for the sums, `carry`, and with it the layer after that, for what was reduced before.
    carry, sums = tied((carry, sums))
    return carry, reduce("blocks", unflatten_dict(sums))


def _head_reduced(reduce: Reduce, sums: Sums) -> tuple[Tree, Tree]:
    """What stands for the reduced gradients of the layer before the first; and those of the head, for which the second
    layer waits."""
    types = jax.eval_shape(lambda: reduce("blocks", jax.tree.map(lambda stack: stack[0], sums.total)))
    return jax.tree.map(zeros_like_type, types), reduce("shared", sums.of_head)


def _joined(before: Tree, last: Tree, reverse: bool = False) -> Tree:
    """The reduced gradients of layers, given for each those of the layer `before` it in a scan, and of the `last`."""

    def join(before: Array, last: Array) -> Array:
        return jnp.concatenate([last[None], before[:-1]] if reverse else [before[1:], last[None]])

    return jax.tree.map(join, before, last)


@jax.named_scope("gradient_sums")
def _added(total: Tree, grads: dict[Path, Array], place: Array) -> Tree:
    """Add one layer's gradients to the sums, at its index in the stack."""
    flat = flatten_dict(total)
    return unflatten_dict(flat | {path: flat[path].at[place].add(grad) for path, grad in grads.items()})

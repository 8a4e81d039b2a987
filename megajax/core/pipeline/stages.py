"""What a stage does with a microbatch: run a chunk's layers forward, and backward from the residuals.

A layer's forward is `jax.vjp`. The pullback that it returns is a pytree whose leaves are either the layer's own
weights, recognized by identity and not saved, or residuals, which are saved. The backward puts the weights back. So
`jax.checkpoint` around the layer decides what is saved, no weights are ever saved, and no layer runs an extra time.

If weight gradients are deferred, the pullback returns their factors instead (`parallel/products.py`), which are
buffered until `add_weight_gradients`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array, lax

from megajax.core.parallel.collectives import at_place, zeros_like_type
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
    factors: Factors  # ring buffer of factors of pending weight gradients, [slots, n, …]; None if none are deferred
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
        products = self.deferred
        assert products is not None

        def layer(carry: tuple[Tree, Tree], own: Tree, index: Array, xs: Tree) -> tuple[Tree, Tree]:
            (total, done), (place, number, sum_) = carry, xs

            def gradients(sum_: Tree) -> Tree:
                factors = jax.tree.map(lambda buffer: buffer[slot, number], sums.factors)
                grads = products.weight_gradients(jax.eval_shape(self.storage.gather, own), factors)
                return self._plus(sum_, grads, sums.total)

            none = lambda sum_: _unchanged(sum_, jax.eval_shape(gradients, sum_))  # noqa: E731
            found = when(self._ends_before(index), none, gradients, sum_)
            if reduce is None:
                return (_added(total, found, place), None), None
            (before, of_head), reduced = _reduced(reduce, done, found)
            return (None, (reduced, of_head)), before

        numbers = jnp.arange(self.layers_per_chunk, dtype=jnp.int32)
        total, each, done = _divided(sums, reduce)
        (total, done), each = self._scan(layer, (total, done), chunk, (self._slots(chunk), numbers, each))
        return _joined(sums, total, each, done)

    def factor_types(self, x: Array, context: Tree) -> Factors:
        """Types of the factors of one layer; nothing is computed."""
        own = jax.eval_shape(lambda: self.storage.gather(jax.tree.map(lambda leaf: leaf[0], self.weights)))
        return self._layer_factors(own, x, context)

    def _layer_factors(self, gathered: Tree, x: Array, context: Tree) -> Factors:
        if self.deferred is None:
            return None
        return self._traced_once("factors", self.deferred.factors, gathered, x, context)

    def _traced_once(self, name: str, function: Callable, *args: Any) -> Any:
        """What a function returns, its arrays as types; it is known if it was asked for arguments of these types."""
        key = name, _types(args)
        if key not in self._known:
            self._known[key] = jax.eval_shape(function, *args)
        return self._known[key]

    def run(self, chunk: Number, x: Array, context: Tree) -> Output:
        """Run a chunk forward without saving residuals."""

        def layer(x: Array, own: Tree, index: Array, _):
            def run(x: Array) -> Output:
                x, weights = tied((x, own)) if self.awaits else (x, own)
                return self.function(self.storage.gather(weights), None, index, x, context)

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
                args = gathered, dummies, index, x, context
                (y, figures), residuals, pullback = with_pullback(self.function, self._apart, *args)
                self._known["pullback", _types(args)] = pullback
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

        def layer(carry: tuple[Array, Tree, Factors, Tree], own: Tree, index: Array, xs: Tree):
            (grad, total, buffer, done), (place, number, residuals, sum_) = carry, xs

            def pull(grad: Array, sum_: Tree) -> tuple[Tree, Factors, Array]:
                gathered = self.storage.gather(own)
                # The gradient has the same type as the input.
                dummies = self._dummies(gathered, grad, context)
                found = lambda *args: with_pullback(self.function, self._apart, *args)[2]  # noqa: E731
                pullback = self._traced_once("pullback", found, gathered, dummies, index, grad, context)
                grads, factors, grad = pullback.restore((gathered, dummies), residuals)(grad)
                return self._plus(sum_, grads, sums.total), factors, grad

            def skip(grad: Array, sum_: Tree) -> tuple[Tree, Factors, Array]:
                found, factors, _ = jax.eval_shape(pull, grad, sum_)
                return _unchanged(sum_, found), jax.tree.map(idle, factors), grad

            # A stack of sums stays outside: inside the conditional, all of it would be copied for every layer.
            found, factors, grad = when(self._ends_before(index), skip, pull, grad, sum_)
            buffer = jax.tree.map(lambda slots, new: slots.at[slot, number].set(new), buffer, factors)
            if reduce is None:
                return (grad, _added(total, found, place), buffer, None), None
            (grad, (before, of_head)), reduced = _reduced(reduce, (grad, done), found)
            return (grad, None, buffer, (reduced, of_head)), before

        numbers = jnp.arange(self.layers_per_chunk, dtype=jnp.int32)
        total, each, done = _divided(sums, reduce)
        carry, xs = (grad, total, sums.factors, done), (self._slots(chunk), numbers, residuals, each)
        (grad, total, factors, done), each = self._scan(layer, carry, chunk, xs, reverse=True)
        return grad, _joined(sums._replace(factors=factors), total, each, done, reverse=True)

    def _plus(self, sum_: Tree, grads: dict[Path, Array], total: Tree) -> Tree:
        """One layer's sums with gradients of gathered weights, which are scattered to the stored shards in the dtype of
        `total`; if there are no sums here, only these."""
        shardings = flatten_dict(self.storage.shardings)
        grads = Shards({path: shardings[path] for path in grads}).scatter(grads, _dtype(total))
        return grads if sum_ is None else _added(sum_, grads)

    @property
    def _apart(self) -> frozenset[Path]:
        """Weights whose gradients the pullback does not return: deferred or frozen."""
        return self.frozen if self.deferred is None else self.frozen | self.deferred.products

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
                own = jax.tree.map(lambda leaf: at_place(leaf, slot[0]), stack)
            return layer(carry, *own, slot[1])

        slots = stack if self.num_chunks == 1 else self._slots(chunk)
        return lax.scan(body, carry, (slots, xs), reverse=reverse, unroll=self.unroll)


def _types(args: Tree) -> tuple[Any, ...]:
    """The types of arrays in a tree, hashable."""
    leaves, structure = jax.tree.flatten(jax.eval_shape(lambda args: args, args))
    return structure, *leaves


def stacked(layers: Tree) -> Tree:
    """A stack of layers' weights, given as one or as a tuple of each layer's. XLA takes slices of a stack made
    beside them from the tuple, and copies nothing."""
    return jax.tree.map(lambda *each: jnp.stack(each), *layers) if isinstance(layers, tuple) else layers


def _zeros(types: Figures) -> Figures:
    return jax.tree.map(zeros_like_type, types)


def _summed(figures: Figures) -> Figures:
    """Sum figures over a chunk's layers."""
    return jax.tree.map(lambda stacked: jnp.sum(stacked, axis=0, dtype=stacked.dtype), figures)


def _unchanged(sum_: Tree, types: Tree) -> Tree:
    """A layer's sums without gradients, or gradients of zero."""
    return jax.tree.map(zeros_like_type, types) if sum_ is None else sum_


def _dtype(total: Tree) -> Any:
    return jax.tree.leaves(total)[0].dtype


def _divided(sums: Sums, reduce: Reduce | None) -> tuple[Tree, Tree, Tree]:
    """The sums of layers for a scan: to carry or, with `reduce`, as each layer's own. Then also what is reduced before
    it: what stands for the gradients of the layer before the first, and those of the head, for which the second layer
    waits."""
    if reduce is None:
        return sums.total, None, None
    types = jax.eval_shape(lambda: reduce("blocks", jax.tree.map(lambda stack: stack[0], sums.total)))
    return None, sums.total, (jax.tree.map(zeros_like_type, types), reduce("shared", sums.of_head))


def _joined(sums: Sums, total: Tree, each: Tree, done: Tree, reverse: bool = False) -> Sums:
    """The sums after the scan; or the reduced gradients, given for `each` layer those of the layer before it, and
    `done`, those of the last and of the head."""
    if total is not None:
        return sums._replace(total=total)
    last, of_head = done

    def join(before: Array, last: Array) -> Array:
        return jnp.concatenate([last[None], before[:-1]] if reverse else [before[1:], last[None]])

    return sums._replace(total=jax.tree.map(join, each, last), of_head=of_head)


def _reduced(reduce: Reduce, carry: Tree, sums: Tree) -> tuple[Tree, Tree]:
    """`carry`, and one layer's complete sums, reduced."""
    # Otherwise XLA would add the gradients of all layers in one kernel, and reduce all of them, at the end. The next
    # layer waits for the sums, `carry`, and with it the layer after that, for what was reduced before.
    carry, sums = tied((carry, sums))
    return carry, reduce("blocks", sums)


@jax.named_scope("gradient_sums")
def _added(sums: Tree, grads: dict[Path, Array], place: Array | None = None) -> Tree:
    """Add one layer's gradients to its sums, or to a stack of sums at its place."""
    flat = flatten_dict(sums)

    def added(path: Path, grad: Array) -> Array:
        return flat[path] + grad if place is None else flat[path].at[place].add(grad)

    return unflatten_dict(flat | {path: added(path, grad) for path, grad in grads.items()})

"""How an optimizer of the user's updates stacked layers and ZeRO's shards.

It sees one layer of the stacked ones, so that labels and masks go by a layer's dims. Its program, traced so, runs for
all layers, [L, …]; where it adds up numbers of several weights, as for a norm, those of all layers are added up.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.extend.core import ClosedJaxpr, Literal

from megajax.core.errors import UserError, told
from megajax.core.optim.adam import choose
from megajax.core.optim.own import path_in
from megajax.core.trees import Path, Tree

_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")
_TOTALS: dict[str, Callable[..., Array]] = {"add": jnp.sum, "add_any": jnp.sum, "max": jnp.max, "min": jnp.min}
# Primitives that compute every number from those at its own place.
_ELEMENTWISE = (
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy copy_p cos "
    "cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p "
    "logistic lt max min mul ne neg nextafter not or population_count pow reduce_precision rem round rsqrt select_n "
    "shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor"
)


@dataclass(frozen=True)
class _Value:
    """An array; the weights whose numbers it was computed from; and whether each of their layers has its own."""

    x: Any
    weights: frozenset[Path] = frozenset()
    layered: bool = False


class ByLayer:
    """An optax transformation for weights of which some are `layered`, [L, …]; for `adam.update`. If it needs numbers
    of several layers but for their sum, maximum or minimum, or draws random ones, it sees stacked layers.

    Attributes:
        mixing: the first operation of an update by which a number depends on numbers at other places, in words; empty
            if there is none, so that `shards`, the shapes that a device has, are enough.
        copied: which leaves of its state depend on the weights.
    """

    def __init__(self, own: Any, weights: Tree, layered: Collection[Path], shards: Tree):
        self._own, self._layered = own, frozenset(layered)
        try:
            self.mixing, operations = self._traced(weights)
        except ValueError as error:  # of `_computed`, or of vmap: what is not of a layer differs between layers
            if isinstance(error, UserError):
                raise
            self._layered = frozenset()
            self.mixing, operations = self._traced(weights)
            self.mixing += ", and sees stacked layers"
        if not self.mixing and operations != self._traced(shards)[1]:
            self.mixing = "operations that depend on the sizes of weights"

    def _traced(self, weights: Tree) -> tuple[str, list[str]]:
        """What mixes numbers in an update, and its operations."""
        state = jax.eval_shape(self.init, weights)
        self.copied = jax.tree.unflatten(jax.tree.structure(state), self._depends)
        jax.eval_shape(self.update, weights, state, weights, taken=True)
        return next(iter(self._mixes), ""), self._operations

    def init(self, params: Tree) -> tuple[Tree]:
        """The state before the first step."""
        return (self._call(self._own.init, params),)

    def update(self, grads: Tree, state: Tree, params: Tree, *, taken: Array | bool) -> tuple[Tree, tuple[Tree]]:
        """Updates, and a state that does not change if the step is not `taken`."""
        updates, new = self._call(self._own.update, grads, state[0], params)
        return updates, (choose(taken, new, state[0]),)

    def _call(self, function: Callable[..., Tree], *trees: Tree) -> Tree:
        """`function` of trees, of which the last one is like the weights."""
        self._mixes, self._operations = list[str](), list[str]()
        weights = flatten_dict(trees[-1])
        layered = self._layered & weights.keys()
        arrays, tree, inputs = *jax.tree.flatten(trees), _labels(trees, weights)
        one = jax.eval_shape(lambda: [x[0] if path in layered else x for x, path in zip(arrays, inputs, strict=True)])
        with told("optimizer", "an optax transformation"), jax.numpy_dtype_promotion("standard"):
            program, out = jax.make_jaxpr(function, return_shape=True)(*jax.tree.unflatten(tree, one))
        results, out = jax.tree.flatten(out)
        outputs = _labels(jax.tree.unflatten(out, results), weights)
        for x, path in zip(one + results, inputs + outputs, strict=True):
            if x.shape != (weights[path].shape[path in layered :] if path else ()):
                self._mixes.append(f"an array {[*x.shape]} in its state")

        def run(*arrays: Array) -> list[Array]:
            pairs = zip(arrays, inputs, strict=True)
            values = (_Value(x, frozenset([path] if path else []), path in layered) for x, path in pairs)
            results = self._run(program, *values)
            self._depends = [bool(value.weights) for value in results]
            mixed = (value for value, path in zip(results, outputs, strict=True) if not value.weights <= {path})
            self._mixes += [f"numbers of {_names(value)} in others" for value in mixed]
            return [value.x for value in results]

        for size in {weights[path].shape[0] for path in layered}:
            stacked = {path for path in layered if weights[path].shape[0] == size}
            in_axes, out_axes = ([0 if path in stacked else None for path in paths] for paths in (inputs, outputs))
            run = jax.vmap(run, in_axes, out_axes)
        return jax.tree.unflatten(out, run(*arrays))

    def _run(self, program: ClosedJaxpr, *values: _Value) -> list[_Value]:
        """The results of one layer's program, while all layers run."""
        self._mixes += [f"a constant {[*array.shape]}" for array in program.consts if array.shape]
        names = [*program.jaxpr.constvars, *program.jaxpr.invars]
        known = dict(zip(names, [*map(_Value, program.consts), *values], strict=True))
        for equation in program.jaxpr.eqns:
            known |= zip(equation.outvars, self._computed(equation, *_read(known, equation.invars)), strict=True)
        return _read(known, program.jaxpr.outvars)

    def _computed(self, equation: Any, *values: _Value) -> list[_Value]:
        """The results of an operation."""
        name, params = equation.primitive.name, equation.params
        self._operations.append(f"{name} {[var.val for var in equation.invars if isinstance(var, Literal)]}")
        if name in _CALLS:
            return self._run(params.get("jaxpr") or params["call_jaxpr"], *values)
        if name == "cond" and not values[0].weights:
            ways = (self._run(branch, *values[1:]) for branch in params["branches"])
            return [_derived(lax.select_n(values[0].x, *(x.x for x in one)), *one) for one in zip(*ways, strict=True)]
        if self._layered and (name.startswith("random_") or name == "threefry2x32"):
            raise ValueError("layers would draw the same numbers")
        inputs, outputs = ([var.aval.shape for var in some] for some in (equation.invars, equation.outvars))
        labels = {value.weights for value in values if value.weights}
        if name in _TOTALS and not any(inputs) and len(labels) > 1:
            total = custom_vmap(lambda x: x)
            total.def_vmap(lambda size, batched, x: (_TOTALS[name](x, axis=0), False))
            values = (*(_Value(total(value.x), value.weights) if value.layered else value for value in values),)
        results = equation.primitive.bind(*(value.x for value in values), **params)
        if name == "optimization_barrier":
            return [*map(_derived, results, values)]
        spread = name == "broadcast_in_dim" and not inputs[0]
        alone = len(labels) < 2 and all(shape in ((), outputs[0]) for shape in inputs)
        if (labels or any(inputs + outputs)) and not (alone and (name in _ELEMENTWISE.split() or spread)):
            self._mixes.append(f"{name} of {_names(*values) or 'no weight'}")
        return [_derived(x, *values) for x in (results if equation.primitive.multiple_results else [results])]


def _derived(x: Any, *values: _Value) -> _Value:
    """What was computed from values."""
    layered = [value for value in values if value.layered]
    return _Value(x, frozenset[Path]().union(*(value.weights for value in layered or values)), bool(layered))


def _labels(tree: Tree, weights: Mapping[Path, Any]) -> list[Path | None]:
    """The weight that each leaf belongs to."""
    return [path_in(path, weights) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _read(known: Mapping[Any, _Value], variables: Sequence[Any]) -> list[_Value]:
    """The values of variables and literals."""
    return [_Value(var.val) if isinstance(var, Literal) else known[var] for var in variables]


def _names(*values: _Value) -> str:
    """The weights that values were computed from."""
    return " and ".join(sorted("/".join(path) for path in _derived(None, *values).weights))

"""An optimizer of the user's: any optax transformation, and whether ZeRO's shards are enough for it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import optax
from flax.traverse_util import flatten_dict
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.tree_util import DictKey

from megajax.core.errors import UserError, told
from megajax.core.optim.adam import choose, learning_rate
from megajax.core.optim.config import OPTIMIZERS, OWN, OptimizerConfig

Tree = Any
Path = tuple[str, ...]
Label = str | None  # the weight at whose places a value has its numbers; None: it is the same at all places

# Primitives that compute every number from those at its own place.
_ELEMENTWISE = (
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy copy_p cos "
    "cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p "
    "logistic lt max min mul ne neg nextafter not or population_count pow reduce_precision rem round rsqrt select_n "
    "shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor"
)


@dataclass(frozen=True)
class OwnOptimizer:
    """An optimizer in place of those that `optimizer.name` can name.

    Attributes:
        given: an optax transformation, or a function of a schedule that makes one, such as `optax.lion`.
        elementwise: whether it updates every number by itself; None: it is traced to see.
    """

    given: Any
    elementwise: bool | None = None

    def __post_init__(self) -> None:
        if not callable(self.given) and not _is_transformation(self.given):
            valid = "an optax transformation, or a function that makes one from a schedule, such as optax.lion"
            raise UserError(f"optimizer {self.given!r:.80}; valid: {valid}")

    @property
    def has_our_rate(self) -> bool:
        """Whether it follows the configuration's schedule."""
        return not _is_transformation(self.given)

    def transformation(self, config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
        """The transformation, in its form with further arguments, which it ignores."""
        made = self.given(partial(learning_rate, config=config)) if self.has_our_rate else self.given
        if not _is_transformation(made):
            raise UserError(f"optimizer: the function returned {made!r:.80}; valid: an optax transformation")
        return optax.GradientTransformationExtraArgs(_as_optax(made.init), _as_optax(made.update))


def _is_transformation(given: Any) -> bool:
    return hasattr(given, "init") and hasattr(given, "update")


def _as_optax(function: Callable[..., Tree]) -> Callable[..., Tree]:
    """A function that mixes integer counters with floats."""
    return jax.numpy_dtype_promotion("standard")(function)


def own_optimizer(config: OptimizerConfig, given: OwnOptimizer | None) -> OwnOptimizer | None:
    """The optimizer that is given or registered; None for AdamW and Muon. If a run had one that is not there, weights
    can be read all the same; its place is taken by one that does nothing."""
    made = optax.identity() if config.name == OWN else OPTIMIZERS[config.name]
    return given or (made and OwnOptimizer(made))


def kept_if_skipped(own: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """The same with a state that does not change if the step is not `taken`; for `adam.update`."""

    def init(params: Tree) -> tuple[Tree]:
        return (own.init(params),)

    def advance(grads: Tree, state: Tree, params: Tree = None, *, taken: Array | bool) -> tuple[Tree, tuple[Tree]]:
        updates, new = own.update(grads, state[0], params)
        return updates, (choose(taken, new, state[0]),)

    return optax.GradientTransformationExtraArgs(init, advance)


class _Mixes(Exception):
    """A number depends on others than those at its own place."""


def first_mixing(own: optax.GradientTransformationExtraArgs, weights: Tree, shards: Tree) -> str:
    """The first operation of an update by which a number depends on numbers at other places, in words; empty if there
    is none. `weights` are the shapes with which the update is traced, and `shards` those that a device has of them."""
    program, inputs, out = _traced(own, weights)
    shapes = {path: leaf.shape for path, leaf in flatten_dict(weights).items()}
    try:
        labels, results = (_labels_of(tree, shapes) for tree in (inputs, out))
        for name, found in zip(results, _through(program.jaxpr, labels), strict=True):
            if found not in (name, None):
                raise _Mixes(f"numbers of {found} in {name or 'a counter'}")
    except _Mixes as mixes:
        return str(mixes)
    same = [*_operations(program.jaxpr)] == [*_operations(_traced(own, shards)[0].jaxpr)]
    return "" if same else "operations that depend on the sizes of weights"


def _traced(own: optax.GradientTransformationExtraArgs, weights: Tree) -> tuple[ClosedJaxpr, Tree, Tree]:
    """An update, and the types of what it takes and returns."""
    with told("optimizer", "an optax transformation of gradients, state and weights"):
        inputs = weights, jax.eval_shape(own.init, weights), weights
        program, out = jax.make_jaxpr(own.update, return_shape=True)(*inputs)
    return program, inputs, out


def _operations(jaxpr: Jaxpr) -> Iterator[tuple[str, ...]]:
    """The operations of a program and of all programs in it, with their constants."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name, *(str(var.val) for var in equation.invars if isinstance(var, Literal))
        for inner in jax.tree.leaves([*equation.params.values()]):
            if isinstance(inner, ClosedJaxpr | Jaxpr):
                yield from _operations(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)


def path_in(path: Sequence[Any], weights: Mapping[Path, Any]) -> Path | None:
    """The path of the weight that a leaf of a state belongs to: the longest end of the leaf's own that is one."""
    names = tuple(key.key for key in path if isinstance(key, DictKey))
    return next((names[start:] for start in range(len(names)) if names[start:] in weights), None)


def _labels_of(tree: Tree, shapes: Mapping[Path, tuple[int, ...]]) -> list[Label]:
    found: list[Label] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        weight = path_in(path, shapes)
        if leaf.shape != (() if weight is None else shapes[weight]):
            raise _Mixes(f"an array {[*leaf.shape]} in its state")
        found.append("/".join(weight) if weight else None)
    return found


def _through(jaxpr: Jaxpr, inputs: Sequence[Label]) -> list[Label]:
    """The labels of a program's results."""
    known: dict[Any, Label] = dict(zip(jaxpr.invars, inputs, strict=True))
    for var in jaxpr.constvars:
        if shape := _shape(var):
            raise _Mixes(f"a constant {[*shape]}")
    label: Callable[[Any], Label] = lambda var: None if isinstance(var, Literal) else known.get(var)  # noqa: E731
    for equation in jaxpr.eqns:
        known |= zip(equation.outvars, _outputs(equation, [label(var) for var in equation.invars]), strict=True)
    return [label(var) for var in jaxpr.outvars]


def _shape(var: Any) -> tuple[int, ...]:
    return var.aval.shape


def _outputs(equation: Any, labels: list[Label]) -> list[Label]:
    """The labels of an operation's results."""
    name, shapes = equation.primitive.name, [var.aval.shape for var in equation.outvars]
    weights = {label for label in labels if label}
    if not weights and not any(shapes) and not any(var.aval.shape for var in equation.invars):
        return [None] * len(shapes)
    if name == "cond" and not labels[0]:
        ways = [_through(branch.jaxpr, labels[1:]) for branch in equation.params["branches"]]
        merged = [{way for way in each if way} for each in zip(*ways, strict=True)]
        if all(len(each) < 2 for each in merged):
            return [next(iter(each), None) for each in merged]
    inner = [each for each in equation.params.values() if isinstance(each, ClosedJaxpr | Jaxpr)]
    if len(inner) == 1 and name not in ("while", "scan"):
        return _through(inner[0].jaxpr if isinstance(inner[0], ClosedJaxpr) else inner[0], labels)
    if name == "optimization_barrier":
        return labels
    of_one = all(var.aval.shape in ((), shapes[0]) for var in equation.invars)
    spread = name == "broadcast_in_dim" and not equation.invars[0].aval.shape
    if len(weights) < 2 and of_one and (name in _ELEMENTWISE.split() or spread):
        return [next(iter(weights), None)] * len(shapes)
    raise _Mixes(f"{name} of {' and '.join(sorted(weights)) or 'no weight'}")

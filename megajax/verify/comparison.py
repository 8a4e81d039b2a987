"""Losses and gradients of a few training steps in mesh-independent form, how much two runs may differ, and how much
they do."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.tree_util import DictKey, keystr

from megajax.core.program.program import Program
from megajax.core.program.state import TrainState
from megajax.core.program.train_step import train_step_with_gradients
from megajax.core.trees import Tree
from megajax.data.synthetic import placed_batch
from megajax.settings.config import Config

Leaves = dict[str, np.ndarray]  # by name; layers are [L, …]
LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 1e-5
GRADIENT_FLOOR = 1e-3


@dataclass(frozen=True)
class Trace:
    """Losses and gradients of a few training steps, taken before each step's update."""

    losses: list[float]  # one per step
    gradients: list[Leaves]  # one per step, in canonical form


def trace(
    config: Config,
    steps: int,
    devices: Sequence[jax.Device] | None = None,
    *,
    canonical: TrainState | None = None,
    quick_compile: bool = False,
) -> Trace:
    """Train `config` for `steps` steps on random batches, on the first of `devices`, starting from the `canonical`
    state or a fresh one. `quick_compile` does not optimize the CPU's machine code."""
    program = Program.on(config, list(jax.devices() if devices is None else devices)[: config.mesh.num_devices])
    options: dict[str, Any] = {"xla_backend_optimization_level": 0} if quick_compile else {}
    state = program.layout.init() if canonical is None else program.layout.from_canonical(canonical)
    losses, gradients = [], []
    train_step = train_step_with_gradients(program).lower(state, placed_batch(program, 0)).compile(options)
    for step in range(steps):
        state, metrics, grads = train_step(state, placed_batch(program, step))
        losses.append(float(metrics["loss"]))
        gradients.append(named_leaves(program.layout.canonical_weights(jax.device_get(grads))))
    return Trace(losses, gradients)


def named_leaves(tree: Tree) -> Leaves:
    """Leaves by path: `blocks/mlp/up/weight`."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {"/".join(str(key.key) for key in path): np.asarray(leaf) for path, leaf in paths}


def beside_the_scale(state: TrainState) -> dict[str, Any]:
    """Leaves of a state by path, except the loss scale."""
    return {keystr(path, simple=True, separator="/"): leaf for path, leaf in _beside_the_scale(state)}


def _beside_the_scale(state: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(dataclasses.replace(state, loss_scale=None))


def named_parts(state: TrainState) -> dict[str, Leaves]:
    """The leaves of a canonical state, except the loss scale, by part and name: `optimizer/0/mu` and
    `blocks/mlp/up/weight`."""
    parts: dict[str, Leaves] = defaultdict(dict)
    for path, leaf in _beside_the_scale(state):
        inside = tuple(key for key in path if isinstance(key, DictKey)) or path[-1:]
        part, name = (keystr(keys, simple=True, separator="/") for keys in (path[: -len(inside)], inside))
        parts[part][name] = np.asarray(leaf)
    return parts


@dataclass(frozen=True)
class Limits:
    """The largest errors that count as rounding."""

    loss: float  # relative error of a step's loss
    gradient: float  # ‖error‖ / max(‖leaf‖, floor × global norm) of a leaf's gradient
    weight: float  # the same for weights after one step


LIMITS = {  # relative to one device in fp64; for half precision they are the same as in the parity tests
    "fp64": Limits(1e-12, 1e-12, 1e-12),
    "fp32": Limits(LOSS_TOLERANCE, GRADIENT_TOLERANCE, GRADIENT_TOLERANCE),
    "fp16": Limits(2e-5, 5e-3, 5e-3),
    "bf16": Limits(2e-4, 4e-2, 4e-2),
}
HALF = ("fp16", "bf16", "fp8")  # less than fp32: rounding may change which experts a token gets
_ROUNDING = 2.0**-8  # by which a bf16 number differs between meshes: about a rounding on each, relative to the number
_STEP = 2.0**-3.5  # from a float8 number to the next, relative to it: 1/16 to 1/8
_PRODUCTS = 4  # one after the other in a layer, forward, and as many backward


def limits_of_edges(num_layers: int) -> Limits:
    """Limits for fp8, compared with one device in fp8: an estimate, not a bound.

    A number that differs by `_ROUNDING` crosses the edge between two float8 numbers with probability `_ROUNDING /
    _STEP`, and then differs by `_STEP`. So an operand's squared relative error is the product of the two. Errors of
    different numbers are independent: those of all products that a gradient's values passed add up, together with what
    bf16 may have. The loss's limit grows by the same factor.

    Later operands differ by more than a rounding and cross more edges, in the extreme like two operands rounded
    independently: `_STEP`² / 6 each, four times as much. Against this, residual connections dilute a product's error.
    """
    usual = LIMITS["bf16"]
    edges = math.sqrt(2 * _PRODUCTS * num_layers * _ROUNDING * _STEP)
    gradient = math.hypot(usual.gradient, edges)
    factor = gradient / usual.gradient
    return Limits(factor * usual.loss, gradient, factor * usual.weight)


@dataclass(frozen=True)
class CompiledComparison:
    """How much a trace differs from the reference."""

    loss_error: float  # largest relative error of a step's loss
    gradient_error: float  # largest ‖error‖ / max(‖leaf‖, floor × global norm) of any gradient leaf in any step
    worst_leaf: str  # the leaf with that error

    def within(self, scale: float = 1.0) -> bool:
        """Whether both errors are within the fp32 tolerances times `scale`."""
        return self.loss_error <= LOSS_TOLERANCE * scale and self.gradient_error <= GRADIENT_TOLERANCE * scale


def compare(reference: Trace, other: Trace) -> CompiledComparison:
    """The largest errors of `other` over all steps; see `CompiledComparison`. Any NaN counts as an infinite error."""
    assert len(reference.losses) == len(other.losses)
    losses = max(map(relative, other.losses, reference.losses))
    pairs = zip(reference.gradients, other.gradients, strict=True)
    errors = [(error, leaf) for pair in pairs for leaf, error in leaf_errors(*pair).items()]
    worst, leaf = max(errors, key=lambda each: each[0])
    return CompiledComparison(losses, worst, leaf)


def leaf_errors(expected: Leaves, actual: Leaves) -> dict[str, float]:
    """‖error‖ divided by `scales`, for every leaf."""
    assert expected.keys() == actual.keys()
    return {leaf: finite(distance(actual[leaf], expected[leaf]) / scale) for leaf, scale in scales(expected).items()}


def scales(leaves: Leaves) -> dict[str, float]:
    """max(‖leaf‖, floor × global norm), for every leaf."""
    norms = {name: distance(leaf, np.zeros(())) for name, leaf in leaves.items()}
    floor = GRADIENT_FLOOR * math.sqrt(sum(size**2 for size in norms.values()))
    return {name: max(size, floor) for name, size in norms.items()}


def relative(value: float, expected: float) -> float:
    """Relative error, or absolute error if `expected` is 0."""
    return finite(abs(value - expected) / abs(expected) if expected else abs(value))


def finite(error: float) -> float:
    """The error, or infinity if it is NaN."""
    return math.inf if math.isnan(error) else error


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """The norm of the difference, computed in double precision."""
    return float(np.linalg.norm(a.astype(np.float64) - b.astype(np.float64)))

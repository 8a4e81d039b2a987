"""Does the mesh change the numbers, and what does the program communicate? The same code answers tests and users.

`trace` trains a few steps and keeps every loss and gradient in mesh-independent form; `compare` holds two traces
against each other by the project's rule. `collectives` lists the communication of a program from its jaxpr, without
running or compiling it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from megajax.config import Config
from megajax.program.program import Program
from megajax.program.state import TrainState
from megajax.program.synthetic import random_batch
from megajax.program.train_step import train_step_with_gradients

Tree = Any

LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 1e-5
GRADIENT_FLOOR = 1e-3


@dataclass(frozen=True)
class Trace:
    """Losses and gradients of a few training steps, before each step's update.

    Attributes:
        losses: one per step.
        gradients: per step, leaf name -> array in natural form (layers `[L, …]`).
    """

    losses: list[float]
    gradients: list[dict[str, np.ndarray]]


@dataclass(frozen=True)
class Comparison:
    """How far a trace is from the reference.

    Attributes:
        loss_error: largest relative error of a step's loss.
        gradient_error: largest ‖error‖ / max(‖leaf‖, floor × global norm) of a gradient leaf in any step.
        worst_leaf: the leaf that has it.
    """

    loss_error: float
    gradient_error: float
    worst_leaf: str

    def within(self, scale: float = 1.0) -> bool:
        """Whether both errors are within the fp32 tolerances times `scale`."""
        return self.loss_error <= LOSS_TOLERANCE * scale and self.gradient_error <= GRADIENT_TOLERANCE * scale


def trace(
    config: Config,
    steps: int,
    devices: Sequence[jax.Device] | None = None,
    *,
    natural: TrainState | None = None,
    quick_compile: bool = False,
) -> Trace:
    """Train `config` for `steps` steps on random batches.

    Args:
        config: its mesh is made of the first devices.
        steps: how many.
        devices: all there are if None.
        natural: the state to begin with, in mesh-independent form; a fresh one if None.
        quick_compile: leave the CPU's machine code unoptimised.
    """
    size = config.mesh
    devices = list(jax.devices() if devices is None else devices)[: size.num_devices]
    program = Program.on(config, devices)
    options: dict[str, Any] = {"xla_backend_optimization_level": 0} if quick_compile else {}
    state = program.layout.init(options) if natural is None else program.layout.from_natural(natural)
    losses, gradients = [], []
    train_step = None
    for step in range(steps):
        rows = program.local_rows
        local = {name: array[rows] for name, array in random_batch(config, step).items()}
        batch = program.put_batch(local, rows)
        train_step = train_step or train_step_with_gradients(program).lower(state, batch).compile(options)
        state, metrics, grads = train_step(state, batch)
        losses.append(float(metrics["loss"]))
        gradients.append(named_leaves(program.layout.natural_weights(jax.device_get(grads))))
    return Trace(losses, gradients)


def named_leaves(tree: Tree) -> dict[str, np.ndarray]:
    """Leaves by path: `blocks/mlp/up/weight`."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {"/".join(str(key.key) for key in path): np.asarray(leaf) for path, leaf in paths}


def compare(reference: Trace, other: Trace) -> Comparison:
    """The largest errors of `other` over all steps; see `Comparison`. A NaN anywhere counts as an infinite error."""
    assert len(reference.losses) == len(other.losses)
    loss_errors = [abs(b - a) / abs(a) for a, b in zip(reference.losses, other.losses, strict=True)]
    worst, worst_leaf = -1.0, ""
    for expected, actual in zip(reference.gradients, other.gradients, strict=True):
        assert expected.keys() == actual.keys()
        floor = GRADIENT_FLOOR * math.sqrt(sum(_norm(leaf) ** 2 for leaf in expected.values()))
        for name, leaf in expected.items():
            error = _norm(actual[name].astype(np.float64) - leaf) / max(_norm(leaf), floor)
            error = math.inf if math.isnan(error) else error
            if error > worst:
                worst, worst_leaf = error, name
    return Comparison(max(math.inf if math.isnan(e) else e for e in loss_errors), worst, worst_leaf)


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x.astype(np.float64)))


COLLECTIVES = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum_scatter": "reduce-scatter",
    "ppermute": "permute",
    "all_to_all": "all-to-all",
}


@dataclass(frozen=True)
class Collective:
    """One communication in a program.

    Attributes:
        kind: all-reduce, all-gather, reduce-scatter, permute or all-to-all.
        axes: mesh axes it runs over.
        shapes: shapes of its operands on one device.
        num_bytes: bytes of its operands on one device.
        count: how often it runs, from the lengths of the scans around it; every branch of a conditional counts as
        taken, and a loop of unknown length, as that of deferred weight gradients, as run once.
    """

    kind: str
    axes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: int
    count: int


def collectives(function: Callable, *args: Any) -> list[Collective]:
    """Communication of `function(*args)`; the arguments may be `ShapeDtypeStruct`."""
    return collectives_of(jax.make_jaxpr(function)(*args))


def collectives_of(traced: ClosedJaxpr) -> list[Collective]:
    """Communication of a function that was traced."""
    return list(_walk(traced.jaxpr, 1))


def _walk(jaxpr: Jaxpr, count: int) -> Iterator[Collective]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in COLLECTIVES:
            axes: Any = eqn.params.get("axes", eqn.params.get("axis_name"))
            axes = (axes,) if isinstance(axes, str) else tuple(axes)
            avals: list[Any] = [var.aval for var in eqn.invars]
            num_bytes = sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)
            yield Collective(COLLECTIVES[name], axes, tuple(aval.shape for aval in avals), num_bytes, count)
        inner = count * eqn.params["length"] if name == "scan" else count
        for value in eqn.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(part, ClosedJaxpr):
                    yield from _walk(part.jaxpr, inner)
                elif isinstance(part, Jaxpr):
                    yield from _walk(part, inner)

"""Losses and gradients of a few training steps, in mesh-independent form."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from megajax.config import Config
from megajax.program.program import Program
from megajax.program.state import TrainState
from megajax.program.synthetic import placed_batch
from megajax.program.train_step import train_step_with_gradients

Tree = Any
Leaves = dict[str, np.ndarray]  # by name, layers [L, …]


@dataclass(frozen=True)
class Trace:
    """Losses and gradients of a few training steps, before each step's update.

    Attributes:
        losses: one per step.
        gradients: per step, in canonical form.
    """

    losses: list[float]
    gradients: list[Leaves]


def trace(
    config: Config,
    steps: int,
    devices: Sequence[jax.Device] | None = None,
    *,
    canonical: TrainState | None = None,
    quick_compile: bool = False,
) -> Trace:
    """Train `config` for `steps` steps on random batches.

    Args:
        config: its mesh uses the first devices.
        steps: number of steps.
        devices: defaults to all devices.
        canonical: the initial state in mesh-independent form; a fresh one if None.
        quick_compile: leave the CPU's machine code unoptimised.
    """
    size = config.mesh
    devices = list(jax.devices() if devices is None else devices)[: size.num_devices]
    program = Program.on(config, devices)
    options: dict[str, Any] = {"xla_backend_optimization_level": 0} if quick_compile else {}
    state = program.layout.init(options) if canonical is None else program.layout.from_canonical(canonical)
    losses, gradients = [], []
    train_step = None
    for step in range(steps):
        batch = placed_batch(program, step)
        train_step = train_step or train_step_with_gradients(program).lower(state, batch).compile(options)
        state, metrics, grads = train_step(state, batch)
        losses.append(float(metrics["loss"]))
        gradients.append(named_leaves(program.layout.canonical_weights(jax.device_get(grads))))
    return Trace(losses, gradients)


def named_leaves(tree: Tree) -> Leaves:
    """Leaves by path: `blocks/mlp/up/weight`."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {"/".join(str(key.key) for key in path): np.asarray(leaf) for path, leaf in paths}

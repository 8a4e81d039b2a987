"""An initial state that is the same on every mesh and needs no compiled program: numpy draws the weights."""

import dataclasses
from typing import Any

import jax
import numpy as np

from megajax.program.program import Program
from megajax.program.state import TrainState

Tree = Any


def drawn_weights(program: Program) -> Tree:
    """Weights in canonical form, the same on every mesh and in every precision, with realistic sizes. No bias is zero
    and no scale is one, so that omitting one or applying it twice is noticed."""
    rng, size = np.random.default_rng(0), program.config.model.init_std

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        mean, deviation = {"scale": (1.0, size), "bias": (0.0, size / 10)}.get(path[-1].key, (0.0, size))
        return rng.normal(mean, deviation, leaf.shape).astype(np.float32).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, program.layout.canonical_shapes.params)


def drawn_state(program: Program) -> TrainState:
    """The canonical state before the first step, with these weights."""
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), program.layout.canonical_shapes)
    return dataclasses.replace(zeros, params=drawn_weights(program))

"""States to begin with that need no compiled program: numpy draws the weights, and they are put where they belong."""

import dataclasses

import jax
import numpy as np

from megajax.mesh import shardings
from megajax.program.program import Program
from megajax.program.state import TrainState


def drawn_weights(program: Program) -> dict:
    """Weights in natural form, the same on every mesh, about as large as a model's own; but no bias is zero."""
    rng, size = np.random.default_rng(0), program.config.model.init_std

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        mean, deviation = {"scale": (1.0, size), "bias": (0.0, size / 10)}.get(path[-1].key, (0.0, size))
        return rng.normal(mean, deviation, leaf.shape).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, program.layout.natural_shapes.params)


def drawn_params(program: Program) -> dict:
    """These weights in their shards, in the dtype that layers compute with."""
    layout, weights = program.layout, drawn_weights(program)
    staged = {"shared": weights["shared"], "blocks": jax.tree.map(layout.placement.to_stages, weights["blocks"])}
    return jax.device_put(layout.computed(staged), shardings(layout.mesh, layout.specs.params))


def drawn_state(program: Program) -> TrainState:
    """The natural state before the first step, with these weights."""
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), program.layout.natural_shapes)
    return dataclasses.replace(zeros, params=drawn_weights(program))

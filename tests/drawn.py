"""States to begin with that need no compiled program: numpy draws the weights, and they are put where they belong."""

import jax

from megajax.mesh import shardings
from megajax.program.program import Program
from megajax.verify.run import drawn_state, drawn_weights

__all__ = ["drawn_params", "drawn_state", "drawn_weights"]


def drawn_params(program: Program) -> dict:
    """These weights in their shards, in the dtype that layers compute with."""
    return placed(program, drawn_weights(program))


def placed(program: Program, weights: dict) -> dict:
    """Weights in canonical form in their shards, in the dtype that layers compute with."""
    layout = program.layout
    pipelined = {"shared": weights["shared"], "blocks": jax.tree.map(layout.placement.to_stages, weights["blocks"])}
    return jax.device_put(layout.computed(pipelined), shardings(layout.mesh, layout.specs.params))

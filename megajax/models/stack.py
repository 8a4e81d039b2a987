"""Layers stacked along a leading dim `layers`, of which every weight is one array [L, …]."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array


def stacked(make: Callable[[Array], nnx.Module], num_layers: int) -> Any:
    """The layers `make(0)` … as one module."""
    layers = nnx.vmap(make, transform_metadata={nnx.PARTITION_NAME: "layers"})
    return layers(jnp.arange(num_layers, dtype=jnp.int32))


def layer_of(blocks: nnx.Module, number: int | Array) -> Any:
    """One layer of a stack."""
    graph, weights = nnx.split(blocks)
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf[number], weights))

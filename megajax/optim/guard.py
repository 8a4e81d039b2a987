"""Which steps are taken: those with finite gradients, and, if asked for, without a spike of their norm."""

import jax.numpy as jnp
from jax import Array

WINDOW = 64  # recent norms that the median is taken of
FEWEST = 16  # and how many there must be before it counts


def initial_norms() -> Array:
    """The recent norms of a new run: none yet, which is 0."""
    return jnp.zeros((WINDOW,), jnp.float32)


def is_spike(norm: Array, recent: Array, skip_above: float) -> Array:
    """Whether a gradient norm is more than `skip_above` times the median of the recent ones; 0: never."""
    if skip_above == 0:
        return jnp.zeros((), bool)
    there = recent > 0
    median = jnp.nanmedian(jnp.where(there, recent, jnp.nan))
    return (jnp.sum(there) >= FEWEST) & (norm > skip_above * median)


def remember(norm: Array, recent: Array, step: Array) -> Array:
    """The recent norms with that of step number `step`, counted from 0, in place of the oldest."""
    return recent.at[step % WINDOW].set(norm.astype(recent.dtype))

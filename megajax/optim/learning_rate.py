"""The learning-rate schedules: linear warm-up, and then what `optimizer.schedule` says."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.optim.config import OptimizerConfig


def learning_rate(step: Array | int, config: OptimizerConfig) -> Array:
    """The rate of the update that follows `step` finished ones, as a scalar.

    It rises linearly from 0 at step 0 to the peak at `warmup_steps`. Then

    - `cosine` (the paper's) and `linear` fall to the floor at `decay_steps` and stay there;
    - `wsd` stays at the peak, falls to the floor in the last `cooldown_steps` before `decay_steps`, and stays there;
    - `inverse-square-root` falls as 1 / sqrt(step), never below the floor;
    - `constant` stays at the peak.
    """
    now = jnp.asarray(step, dtype=float)
    peak, floor = config.learning_rate, config.min_learning_rate
    warmup, decay = config.warmup_steps, config.decay_steps
    rising = peak * now / max(1, warmup)
    if config.schedule == "constant":
        falling = jnp.full_like(now, peak)
    elif config.schedule == "inverse-square-root":
        falling = jnp.maximum(floor, peak * jnp.sqrt(max(1, warmup) / jnp.maximum(now, 1.0)))
    else:
        cools = config.schedule == "wsd"
        begin = max(warmup, decay - config.cooldown_steps) if cools else warmup
        progress = jnp.clip((now - begin) / max(1, decay - begin), 0.0, 1.0)
        left = _left(progress, config.cooldown_shape if cools else config.schedule)
        falling = floor + (peak - floor) * left
    return jnp.where(now < warmup, rising, falling)


def _left(progress: Array, shape: str) -> Array:
    """The remaining share of the way from peak to floor after a share `progress` of the decay."""
    match shape:
        case "linear":
            return 1.0 - progress
        case "cosine":
            return 0.5 * (1.0 + jnp.cos(np.pi * progress))
        case "1-sqrt":
            return 1.0 - jnp.sqrt(progress)
    assert shape == "exponential", shape
    return 2.0 * 0.5**progress - 1.0

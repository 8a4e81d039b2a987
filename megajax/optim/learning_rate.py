"""The learning-rate schedules: linear warm-up, then a cosine (the paper's), a line, or nothing more."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.optim.config import OptimizerConfig


def learning_rate(step: Array | int, config: OptimizerConfig) -> Array:
    """The rate of the update that follows `step` finished ones, as a scalar.

    Rises linearly from 0 at step 0 to the peak at `warmup_steps`, falls as half a cosine or on a line to the floor at
    `decay_steps`, and stays there; a constant schedule stays at the peak.
    """
    now = jnp.asarray(step, dtype=float)
    peak, floor = config.learning_rate, config.min_learning_rate
    warmup, decay = config.warmup_steps, config.decay_steps
    rising = peak * now / max(1, warmup)
    progress = jnp.clip((now - warmup) / max(1, decay - warmup), 0.0, 1.0)
    if config.schedule == "constant":
        falling = jnp.full_like(now, peak)
    else:
        left = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + jnp.cos(np.pi * progress))
        falling = floor + (peak - floor) * left
    return jnp.where(now < warmup, rising, falling)

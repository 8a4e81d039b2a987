"""The learning-rate schedule of the paper: linear warm-up, one cosine, a floor."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.config import OptimizerConfig


def learning_rate(step: Array | int, config: OptimizerConfig) -> Array:
    """The rate of the update that follows `step` finished ones, as a scalar.

    Rises linearly from 0 at step 0 to the peak at `warmup_steps`, falls as half a cosine to the floor at `decay_steps`,
    and stays there.
    """
    now = jnp.asarray(step, dtype=float)
    peak, floor = config.learning_rate, config.min_learning_rate
    warmup, decay = config.warmup_steps, config.decay_steps
    rising = peak * now / max(1, warmup)
    progress = jnp.clip((now - warmup) / max(1, decay - warmup), 0.0, 1.0)
    falling = floor + (peak - floor) * 0.5 * (1.0 + jnp.cos(np.pi * progress))
    return jnp.where(now < warmup, rising, falling)

"""Dynamic loss scaling for fp16 (REFERENCE §5): gradients too small for fp16 are made larger before they are computed.

The loss is multiplied by the scale at the start of the backward pass, gradients are divided by it, in fp32, before
anything looks at them. The other precisions keep scale 1.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from megajax.config import LossScaleConfig

_LARGEST = 2.0**64  # far above any use, far below where a scale or its inverse would not be a normal number


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """The scale of the next step.

    Attributes:
        scale: fp32 scalar.
        good_steps: steps since the scale last changed, int32 scalar.
    """

    scale: Array
    good_steps: Array

    @classmethod
    def start(cls, config: LossScaleConfig, precision: str) -> "LossScale":
        """The scale of the first step: 1 but in fp16."""
        return cls(jnp.float32(config.initial if precision == "fp16" else 1.0), jnp.int32(0))

    def after(self, finite: Array, config: LossScaleConfig, precision: str) -> "LossScale":
        """The scale after a step whose gradients were `finite`, or overflowed."""
        if precision != "fp16":
            return self
        good_steps = self.good_steps + 1
        grows = good_steps >= config.growth_every
        grown = jnp.where(grows, jnp.minimum(self.scale * config.growth, _LARGEST), self.scale)
        shrunk = jnp.maximum(self.scale * config.backoff, config.floor)
        return LossScale(
            jnp.where(finite, grown, shrunk), jnp.where(finite & ~grows, good_steps, jnp.zeros_like(good_steps))
        )

"""Dynamic loss scaling for fp16 (Micikevicius et al., arXiv 1710.03740): the backward pass starts from the scale, and
gradients are divided by it in fp32 before anything uses them. Without a configuration the scale stays 1."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from megajax.core.optim.config import LossScaleConfig

SMALLEST, LARGEST = 1.0, 2.0**64  # far above any use, and its inverse is still a normal number


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """The scale for the next step."""

    scale: Array  # fp32 scalar; 0 in the checkpoint of a run not in fp16, so that an fp16 run starts with its own
    good_steps: Array  # consecutive steps without overflow since it last grew, int32 scalar

    @classmethod
    def start(cls, config: LossScaleConfig | None) -> "LossScale":
        """The scale for the first step."""
        return cls(jnp.float32(config.initial if config else 1.0), jnp.int32(0))

    def after(self, finite: Array, config: LossScaleConfig | None) -> "LossScale":
        """The scale after a step, given whether its gradients were `finite`."""
        if config is None:
            return self
        good_steps = self.good_steps + 1
        grows = good_steps >= config.growth_every
        grown = jnp.where(grows, jnp.minimum(self.scale * 2, LARGEST), self.scale)
        scale = jnp.where(finite, grown, jnp.maximum(self.scale / 2, SMALLEST))
        return LossScale(scale, jnp.where(finite & ~grows, good_steps, jnp.zeros_like(good_steps)))

    def stored(self, config: LossScaleConfig | None) -> "LossScale":
        """The form stored in a checkpoint."""
        return self if config else LossScale(jnp.zeros_like(self.scale), self.good_steps)

    def resumed(self, config: LossScaleConfig | None) -> "LossScale":
        """The scale to resume with from a checkpoint of any precision."""
        fresh = LossScale.start(config)
        return jax.tree.map(lambda old, new: jnp.where(self.scale > 0, old, new), self, fresh) if config else fresh

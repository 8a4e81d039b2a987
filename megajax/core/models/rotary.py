"""Rotary positions (Su et al., arXiv 2104.09864): each pair of features of a query or key, one from either half of the
head, is rotated by an angle that grows with the token's position.

Letters: B batch, T tokens, H heads, K head size, P pairs of features.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array

from megajax.core.models.config import ModelConfig
from megajax.core.precision import at_least_fp32


def _angles_P(config: ModelConfig, pairs: int) -> npt.NDArray[np.float64]:
    """Rotation per position of each pair, in radians: theta^(-p/P) for pair p of P.

    With "linear" scaling all rotate `rope_factor` times more slowly. With "llama3" scaling only pairs that make fewer
    than `rope_low_frequency` rotations in `rope_original_length` tokens do; those with more than `rope_high_frequency`
    rotations are unchanged, and those in between are interpolated.
    """
    plain_P = config.rope_theta ** (-np.arange(pairs) / pairs)
    if config.rope_scaling == "none":
        return plain_P
    slower_P = plain_P / config.rope_factor
    if config.rope_scaling == "linear":
        return slower_P
    low, high = config.rope_low_frequency, config.rope_high_frequency
    turns_P = config.rope_original_length * plain_P / (2 * math.pi)
    return slower_P + np.clip((turns_P - low) / (high - low), 0, 1) * (plain_P - slower_P)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def rotated(x_BTHK: Array, position_BT: Array, config: ModelConfig) -> Array:
    """Rotate queries or keys of tokens at these positions, int32, B possibly 1. Only the positions are saved for the
    backward pass."""
    return _turned(x_BTHK, position_BT, config, 1)


rotated.defvjp(
    lambda x_BTHK, position_BT, config: (_turned(x_BTHK, position_BT, config, 1), position_BT),
    lambda config, position_BT, grad_BTHK: (_turned(grad_BTHK, position_BT, config, -1), None),
)


def _turned(x_BTHK: Array, position_BT: Array, config: ModelConfig, direction: int) -> Array:
    dtype = at_least_fp32(x_BTHK.dtype)
    angle_P = jnp.asarray(direction * _angles_P(config, x_BTHK.shape[-1] // 2), dtype)
    angle_BTHP = position_BT.astype(dtype)[..., None, None] * angle_P[None, None, None]
    cos_BTHP, sin_BTHP = jnp.cos(angle_BTHP), jnp.sin(angle_BTHP)
    first_BTHP, second_BTHP = jnp.split(x_BTHK.astype(dtype), 2, axis=-1)
    turned = first_BTHP * cos_BTHP - second_BTHP * sin_BTHP, second_BTHP * cos_BTHP + first_BTHP * sin_BTHP
    return jnp.concatenate(turned, axis=-1).astype(x_BTHK.dtype)

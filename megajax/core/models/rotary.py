"""Rotary positions (Su et al., arXiv 2104.09864): each pair of features of a query or key, one from either half of the
head or of its first `rotary_size` features, is rotated by an angle that grows with the token's position.

Letters: B batch, T tokens, H heads, K head size, P pairs of features.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array

from megajax.core.models.config import ModelConfig
from megajax.core.precision import at_least_fp32

_Pairs = npt.NDArray[np.float64]  # a number for each pair


def rotations(config: ModelConfig, pairs: int) -> tuple[_Pairs, float]:
    """Rotation per position of each pair, in radians, and the factor of what is rotated.

    Unscaled, pair p of P rotates by theta^(-p/P). Scaling divides all or a part of each rotation by `rope_factor`.
    """
    plain_P = config.rope_theta ** (-np.arange(pairs) / pairs)
    turns_P = config.rope_original_length * plain_P / (2 * math.pi)
    kept_P, factor = _SCALINGS[config.rope_scaling](config, turns_P)
    slower_P = plain_P / config.rope_factor
    return slower_P + kept_P * (plain_P - slower_P), factor


def _llama3(config: ModelConfig, turns_P: _Pairs) -> tuple[_Pairs, float]:
    """The share grows with a pair's number of rotations."""
    low, high = config.rope_low_frequency, config.rope_high_frequency
    return np.clip((turns_P - low) / (high - low), 0, 1), 1.0


def _yarn(config: ModelConfig, turns_P: _Pairs) -> tuple[_Pairs, float]:
    """The share falls with a pair's index (Peng et al., arXiv 2309.00071; bounds and rounding as in their code)."""
    pairs, bounds = len(turns_P), (config.rope_beta_fast, config.rope_beta_slow)
    first, last = (pairs * math.log(turns_P[0] / turns, config.rope_theta) for turns in bounds)
    if config.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    kept_P = 1 - np.clip((np.arange(pairs) - first) / (last - first or 0.001), 0, 1)
    return kept_P, config.rope_attention_factor or 0.1 * math.log(config.rope_factor) + 1


# By kind of scaling: from the rotations of each pair in `rope_original_length` tokens, the share of its rotation that
# is not scaled, and the factor of what is rotated.
_SCALINGS: dict[str, Callable[[ModelConfig, _Pairs], tuple[_Pairs | float, float]]] = {
    "none": lambda config, turns_P: (1.0, 1.0),
    "linear": lambda config, turns_P: (0.0, 1.0),
    "llama3": _llama3,
    "yarn": _yarn,
}


def score_scale(config: ModelConfig) -> float:
    """The factor of attention's scores besides `head_size ** -0.5`."""
    growth = config.rope_score_scale * math.log(config.rope_factor) if config.rope_scaling == "yarn" else 0.0
    return (0.1 * growth + 1) ** 2 * (config.head_size / (config.query_scalar or config.head_size)) ** 0.5


def rotated(x_BTHK: Array, position_BT: Array, config: ModelConfig, windowed: Array | bool | None = False) -> Array:
    """Rotate queries or keys of tokens at these positions, int32, B possibly 1, and multiply them by the factor of
    `rotations`; `windowed`: the layer has the window. Only the positions are saved for the backward pass."""
    if 0 < config.rotary_size < x_BTHK.shape[-1]:
        turned_BTHK, plain_BTHK = jnp.split(x_BTHK, [config.rotary_size], axis=-1)
        return jnp.concatenate([rotated(turned_BTHK, position_BT, config, windowed), plain_BTHK], axis=-1)
    if not config.window_rope_theta:
        return _rotated(x_BTHK, position_BT, None, (config,))
    kinds = config, replace(config, rope_theta=config.window_rope_theta, rope_scaling="none")
    if not isinstance(windowed, Array):
        return _rotated(x_BTHK, position_BT, None, (kinds[bool(windowed)],))
    return _rotated(x_BTHK, position_BT, windowed, kinds)


@partial(jax.jit, static_argnums=(3, 4), inline=True)  # traced once for all its uses
def _turned(
    x_BTHK: Array, position_BT: Array, kind: Array | None, kinds: tuple[ModelConfig, ...], direction: int
) -> Array:
    dtype = at_least_fp32(x_BTHK.dtype)
    each = [rotations(config, x_BTHK.shape[-1] // 2) for config in kinds]
    angles = [jnp.asarray(direction * rotation_P, dtype) for rotation_P, _ in each]
    angle_P: Array = angles[0]
    factor: Array | float = each[0][1]
    if kind is not None:
        angle_P = jnp.where(kind, angles[1], angles[0])
        factor = jnp.where(kind, jnp.asarray(each[1][1], dtype), jnp.asarray(factor, dtype))
    angle_BTHP = position_BT.astype(dtype)[..., None, None] * angle_P[None, None, None]
    cos_BTHP, sin_BTHP = factor * jnp.cos(angle_BTHP), factor * jnp.sin(angle_BTHP)
    first_BTHP, second_BTHP = jnp.split(x_BTHK.astype(dtype), 2, axis=-1)
    turned = first_BTHP * cos_BTHP - second_BTHP * sin_BTHP, second_BTHP * cos_BTHP + first_BTHP * sin_BTHP
    return jnp.concatenate(turned, axis=-1).astype(x_BTHK.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _rotated(x_BTHK: Array, position_BT: Array, kind: Array | None, kinds: tuple[ModelConfig, ...]) -> Array:
    """`kind`: which of the `kinds` rotates; None if there is one."""
    return _turned(x_BTHK, position_BT, kind, kinds, 1)


_rotated.defvjp(
    lambda x_BTHK, position_BT, kind, kinds: (_turned(x_BTHK, position_BT, kind, kinds, 1), (position_BT, kind)),
    lambda kinds, saved, grad_BTHK: (_turned(grad_BTHK, saved[0], saved[1], kinds, -1), None, None),
)

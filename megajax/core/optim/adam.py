"""AdamW, the learning rate, gradient clipping and skipped steps, for sharded weights inside the `shard_map`
region."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from megajax.core.optim.config import SCHEDULES, OptimizerConfig
from megajax.core.parallel.collectives import sum_over, varying_axes
from megajax.core.precision import at_least_fp32
from megajax.core.trees import Tree

# Of our norms, attention sinks, linear attention's decays and all biases.
NOT_DECAYED = ("bias", "logit_bias", "scale", "sinks", "decay_rate", "decay_bias")
WINDOW = 64  # recent gradient norms whose median is taken
FEWEST = 16  # norms needed before the median counts


def scale_by_adam(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_adam` whose state does not change if the step is not `taken`."""
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)

    def advance(grads: Tree, state: Tree, params: Tree = None, *, taken: Array | bool) -> tuple[Tree, Tree]:
        mu = optax.tree.update_moment(grads, state.mu, config.beta1, 1)
        nu = optax.tree.update_moment_per_elem_norm(grads, state.nu, config.beta2, 2)
        counted = state._replace(count=optax.safe_increment(state.count), mu=mu, nu=nu)
        advanced = choose(taken, counted, state)
        mean = optax.tree.bias_correction(advanced.mu, config.beta1, advanced.count)
        square = optax.tree.bias_correction(advanced.nu, config.beta2, advanced.count)
        steps = jax.tree.map(lambda mean, square: mean / (jnp.sqrt(square) + config.epsilon), mean, square)
        return steps, advanced

    return optax.GradientTransformationExtraArgs(adam.init, advance)


@jax.named_scope("optimizer")
def update(
    optimizer: optax.GradientTransformationExtraArgs, grads: Tree, state: Tree, params: Tree, taken: Array | bool
) -> tuple[Tree, Tree]:
    """One step: new parameters and optimizer state; bit for bit the old ones if the step is not `taken`."""
    with jax.numpy_dtype_promotion("standard"):  # optax mixes its integer counter with floats
        updates, (first, *others) = optimizer.update(grads, state, params, taken=taken)
    new = optax.apply_updates(params, updates), tuple(others)
    new_params, rest = choose(taken, new, (params, state[1:]))
    return new_params, (first, *rest)


@jax.named_scope("optimizer")
def averaged(average: Tree, params: Tree, decay: float, taken: Array | bool) -> Tree:
    """The moving average of parameters after a step; bit for bit the old one if the step is not `taken`."""
    moved = jax.tree.map(lambda old, new: old + (1.0 - decay) * (new - old), average, params)
    return choose(taken, moved, average)


def choose(taken: Array | bool, new: Tree, old: Tree) -> Tree:
    """The new values if a step is taken, otherwise the old ones."""
    return jax.tree.map(lambda new, old: jnp.where(taken, new, old), new, old)


@jax.named_scope("gradient_norm")
def global_norm(grads: Tree) -> Array:
    """Norm over all logical elements, each counted once: a reduced gradient varies over exactly the axes that its
    weight is sharded over, so its sum of squares is summed over these axes only."""
    sums: dict[frozenset[str], Array] = {}
    for grad in jax.tree.leaves(grads):
        axes = varying_axes(grad)
        square = jnp.sum(jnp.square(grad.astype(at_least_fp32(grad.dtype))))
        sums[axes] = sums[axes] + square if axes in sums else square
    return jnp.sqrt(sum(sum_over(square, sorted(axes)) for axes, square in sums.items()))


@jax.named_scope("gradient_norm")
def clip_by_norm(grads: Tree, norm: Array, limit: float) -> Tree:
    """Scale gradients, whose global norm is `norm`, down to at most `limit`."""
    scale = jnp.where(norm < limit, jnp.ones((), norm.dtype), limit / norm)
    return jax.tree.map(lambda grad: grad * scale.astype(grad.dtype), grads)


def initial_norms() -> Array:
    """The recent norms of a new run, in which 0 stands for none yet."""
    return jnp.zeros((WINDOW,), jnp.float32)


def is_spike(norm: Array, recent: Array, skip_above: float) -> Array:
    """Whether a gradient norm exceeds `skip_above` times the median of the recent ones; never if that is 0."""
    if skip_above == 0:
        return jnp.zeros((), bool)
    there = recent > 0
    median = jnp.nanmedian(jnp.where(there, recent, jnp.nan))
    return (jnp.sum(there) >= FEWEST) & (norm > skip_above * median)


def remember(norm: Array, recent: Array, step: Array) -> Array:
    """The recent norms with that of step number `step` (from 0) in place of the oldest."""
    return recent.at[step % WINDOW].set(norm.astype(recent.dtype))


def learning_rate(step: Array | int, config: OptimizerConfig) -> Array:
    """The learning rate of the update after `step` finished ones, a scalar.

    It rises linearly from 0 at step 0 to its peak at the end of the warm-up. Then

    - `cosine` (the paper's) and `linear` fall to the floor at `decay_steps` and stay there;
    - `wsd` stays at the peak, falls to the floor in the last `cooldown_steps` before `decay_steps`, and stays there;
    - `inverse-square-root` falls as 1 / sqrt(step), never below the floor;
    - `constant` stays at the peak.
    """
    now = jnp.asarray(step, dtype=float)
    peak, floor = config.learning_rate, config.min_learning_rate
    warmup, decay = config.warmup, config.decay_steps
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
    """The share of the way from peak to floor that remains after a share `progress` of the decay."""
    if own := SCHEDULES.get(shape):
        return jnp.asarray(own(progress), progress.dtype)
    match shape:
        case "linear":
            return 1.0 - progress
        case "cosine":
            return 0.5 * (1.0 + jnp.cos(np.pi * progress))
        case "1-sqrt":
            return 1.0 - jnp.sqrt(progress)
    assert shape == "exponential", shape
    return 2.0 * 0.5**progress - 1.0

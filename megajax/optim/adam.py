"""AdamW and gradient clipping on sharded weights, inside the `shard_map` region."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from megajax.optim.config import OptimizerConfig
from megajax.optim.learning_rate import learning_rate
from megajax.parallel.collectives import sum_over, varying_axes
from megajax.precision import at_least_fp32

Tree = Any
NOT_DECAYED = ("bias", "scale")  # names of LayerNorm's weights and of all biases


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """AdamW with the run's schedule; weight decay on matrices and embeddings only."""
    return optax.chain(  # optax.adamw's
        _scale_by_adam(config),
        optax.add_decayed_weights(config.weight_decay, decay_mask),
        optax.scale_by_learning_rate(lambda step: learning_rate(step, config)),
    )


def _scale_by_adam(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_adam`, whose state stays the same where the step is not `taken`.

    The barrier has XLA finish the new moments before it computes weights from them: nothing else reads the old ones,
    which are overwritten in place, and not copied.
    """
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)

    def advance(grads: Tree, state: Tree, params: Tree = None, *, taken: Array | bool) -> tuple[Tree, Tree]:
        advanced = _choose(taken, adam.update(grads, state)[1], state)
        moments = jax.tree.map(lambda mu, nu: lax.optimization_barrier((mu, nu)), advanced.mu, advanced.nu)
        mu, nu = (jax.tree.map(lambda _, pair, i=i: pair[i], advanced.mu, moments) for i in range(2))
        mean = optax.tree.bias_correction(mu, config.beta1, advanced.count)
        square = optax.tree.bias_correction(nu, config.beta2, advanced.count)
        steps = jax.tree.map(lambda mean, square: mean / (jnp.sqrt(square) + config.epsilon), mean, square)
        return steps, advanced._replace(mu=mu, nu=nu)

    return optax.GradientTransformationExtraArgs(adam.init, advance)


@jax.named_scope("optimizer")
def update(
    optimizer: optax.GradientTransformationExtraArgs, grads: Tree, state: Tree, params: Tree, taken: Array | bool
) -> tuple[Tree, Tree]:
    """One step: new parameters and optimizer state; bit for bit the old ones where the step is not `taken`."""
    with jax.numpy_dtype_promotion("standard"):  # optax mixes its integer counter with floats
        updates, (adam, *others) = optimizer.update(grads, state, params, taken=taken)
    new = optax.apply_updates(params, updates), tuple(others)
    new_params, rest = _choose(taken, new, (params, state[1:]))
    return new_params, (adam, *rest)


def _choose(taken: Array | bool, new: Tree, old: Tree) -> Tree:
    return jax.tree.map(lambda new, old: jnp.where(taken, new, old), new, old)


def decay_mask(params: Tree) -> Tree:
    """True for the weights that decay."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in NOT_DECAYED, params)


def parameter_groups(params: Tree) -> tuple[int, int]:
    """How many parameters decay, and how many do not."""
    decays, leaves = jax.tree.leaves(decay_mask(params)), jax.tree.leaves(params)
    decayed = sum(leaf.size for decay, leaf in zip(decays, leaves, strict=True) if decay)
    return decayed, sum(leaf.size for leaf in leaves) - decayed


@jax.named_scope("gradient_norm")
def global_norm(grads: Tree) -> Array:
    """Norm over all logical elements, each counted once: a reduced gradient varies over exactly the axes that its
    weight is split over, so its sum of squares is completed over those and no others."""
    sums: dict[frozenset[str], Array] = {}
    for grad in jax.tree.leaves(grads):
        axes = varying_axes(grad)
        square = jnp.sum(jnp.square(grad.astype(at_least_fp32(grad.dtype))))
        sums[axes] = sums[axes] + square if axes in sums else square
    return jnp.sqrt(sum(sum_over(square, sorted(axes)) for axes, square in sums.items()))


@jax.named_scope("gradient_norm")
def clip_by_norm(grads: Tree, norm: Array, limit: float) -> Tree:
    """Scale gradients of global norm `norm` down to at most `limit`."""
    scale = jnp.where(norm < limit, jnp.ones((), norm.dtype), limit / norm)
    return jax.tree.map(lambda grad: grad * scale.astype(grad.dtype), grads)

"""Which optax transformations update every number by itself."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from tiny import user_error

from megajax.core.optim.config import OptimizerConfig
from megajax.core.optim.own import OwnOptimizer, first_mixing

WEIGHTS = {
    "shared": {"table": jax.ShapeDtypeStruct((8, 4), jnp.float32)},
    "blocks": {"up": jax.ShapeDtypeStruct((2, 4, 6), jnp.float32), "bias": jax.ShapeDtypeStruct((2, 6), jnp.float32)},
}
SHARDS = {
    "shared": {"table": jax.ShapeDtypeStruct((4, 4), jnp.float32)},
    "blocks": {"up": jax.ShapeDtypeStruct((1, 4, 3), jnp.float32), "bias": jax.ShapeDtypeStruct((1, 6), jnp.float32)},
}
CONFIG = OptimizerConfig(learning_rate=1e-3, decay_steps=10)


def by_dims(weights):
    return jax.tree.map(lambda x: x.ndim > 2, weights)


def in_two(weights):
    return {"shared": "lion", "blocks": "adam"}


@pytest.mark.parametrize(
    "given",
    [
        optax.lion,
        optax.adamw(1e-3, weight_decay=0.1, mask=by_dims),
        optax.sgd(optax.cosine_decay_schedule(1e-2, 10), momentum=0.9, nesterov=True),
        optax.inject_hyperparams(optax.rmsprop)(learning_rate=1e-3),
        optax.MultiSteps(optax.adam(1e-3), 2),
        optax.multi_transform({"lion": optax.lion(1e-3), "adam": optax.adam(1e-3)}, in_two),
        optax.chain(optax.clip(1.0), optax.adabelief(1e-3), optax.keep_params_nonnegative()),
    ],
)
def test_shards_are_enough(given: object) -> None:
    assert first_mixing(OwnOptimizer(given).transformation(CONFIG), WEIGHTS, SHARDS) == ""


def averaged(updates, params=None):
    return jax.tree.map(lambda x: x - x.mean(), updates)


def reversed_rows(updates, params=None):
    return jax.tree.map(lambda x: x[..., ::-1], updates)


def exchanged(updates, params=None):
    blocks = updates["blocks"]
    return {**updates, "blocks": {"up": blocks["up"], "bias": blocks["bias"] + blocks["up"][:, 0]}}


def by_size(weights):
    return jax.tree.map(lambda x: x.shape[-1] > 4, weights)


def by_width(updates, params=None):
    return jax.tree.map(lambda x: x / x.shape[-1], updates)


def by_count(updates, params=None):
    return jax.tree.map(lambda x: x / jnp.ones_like(x).sum(), updates)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (optax.masked(optax.sgd(0.1), by_size), "depend on the sizes of weights"),
        (optax.stateless(by_width), "depend on the sizes of weights"),
        (optax.stateless(by_count), "reduce_sum of no weight"),
        (optax.lamb(1e-3), "reduce_sum of blocks/bias"),
        (optax.clip_by_global_norm(1.0), "reduce_sum of blocks/bias"),
        (optax.adafactor(1e-3, min_dim_size_to_factor=2), r"an array \[2.* in its state"),
        (optax.add_noise(0.1, 0.5, 0), "random"),
        (optax.stateless(averaged), "reduce_sum of blocks/bias"),
        (optax.stateless(reversed_rows), "rev of blocks/bias"),
        (optax.stateless(exchanged), "of blocks/up"),
    ],
)
def test_whole_weights_are_needed(given: object, why: str) -> None:
    assert re.search(why, first_mixing(OwnOptimizer(given).transformation(CONFIG), WEIGHTS, SHARDS))


def test_what_is_no_optimizer_is_told_in_one_line() -> None:
    assert user_error(OwnOptimizer, 3) == (
        "optimizer 3; valid: an optax transformation, or a function that makes one from a schedule, such as optax.lion"
    )
    assert "the function returned 3; valid" in user_error(OwnOptimizer(lambda rate: 3).transformation, CONFIG)
    broken = optax.stateless(lambda updates, params: updates["nothing"])
    assert "optimizer: KeyError: 'nothing'; valid" in user_error(first_mixing, broken, WEIGHTS, SHARDS)

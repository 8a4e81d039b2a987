"""Which optax transformations update every number by itself."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import full, user_error

from megajax.core.optim.by_layer import ByLayer
from megajax.core.optim.config import OptimizerConfig
from megajax.core.optim.own import OwnOptimizer

WEIGHTS = {
    "shared": {"table": jax.ShapeDtypeStruct((8, 4), jnp.float32)},
    "blocks": {"up": jax.ShapeDtypeStruct((2, 4, 6), jnp.float32), "bias": jax.ShapeDtypeStruct((2, 6), jnp.float32)},
}
SHARDS = {
    "shared": {"table": jax.ShapeDtypeStruct((4, 4), jnp.float32)},
    "blocks": {"up": jax.ShapeDtypeStruct((1, 4, 3), jnp.float32), "bias": jax.ShapeDtypeStruct((1, 6), jnp.float32)},
}
LAYERED = ("blocks", "up"), ("blocks", "bias")
CONFIG = OptimizerConfig(learning_rate=1e-3, decay_steps=10)


def by_dims(weights):
    return jax.tree.map(lambda x: x.ndim > 1, weights)


def by_layer(given: object) -> ByLayer:
    return ByLayer(OwnOptimizer(given).transformation(CONFIG), WEIGHTS, LAYERED, SHARDS)


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
    assert by_layer(given).mixing == ""


NANO_GPT = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1, weight_decay=0.1, mask=by_dims))


@pytest.mark.parametrize(
    "given",
    [
        NANO_GPT,
        full(optax.contrib.muon(0.1, adam_weight_decay=0.1)),
        optax.MultiSteps(NANO_GPT, 2),
        full(optax.chain(optax.clip_by_global_norm(0.5), optax.lamb(0.1))),
        full(optax.contrib.prodigy()),
        full(optax.apply_if_finite(optax.lion(0.1), 3)),
    ],
)
def test_layers_are_updated_as_if_they_were_not_stacked(given: optax.GradientTransformation) -> None:
    """Labels, masks and norms are those that optax has for layers apart."""

    def drawn(number: int) -> Any:
        keys = iter(jax.random.split(jax.random.key(number), 3))
        return jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), WEIGHTS)

    def apart(tree: Any) -> Any:
        of_layer = lambda layer: jax.tree.map(lambda x: x[layer], tree["blocks"])  # noqa: E731
        return [tree["shared"], of_layer(0), of_layer(1)]

    stacked, own, layers = drawn(0), by_layer(given), apart(drawn(0))
    state, theirs = own.init(stacked), given.init(layers)
    with jax.numpy_dtype_promotion("standard"):
        for number in range(1, 4):
            updates, state = own.update(drawn(number), state, stacked, taken=True)
            stacked = optax.apply_updates(stacked, updates)
            updates, theirs = given.update(apart(drawn(number)), theirs, layers)
            layers = optax.apply_updates(layers, updates)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), apart(stacked), layers)


def averaged(updates, params=None):
    return jax.tree.map(lambda x: x - x.mean(), updates)


def reversed_rows(updates, params=None):
    return jax.tree.map(lambda x: x[..., ::-1], updates)


def exchanged(updates, params=None):
    blocks = updates["blocks"]
    return {**updates, "blocks": {"up": blocks["up"], "bias": blocks["bias"] + blocks["up"][0]}}


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
        (optax.adafactor(1e-3, min_dim_size_to_factor=2), r"an array \[.* in its state"),
        (optax.add_noise(0.1, 0.5, 0), r"an array \[2\] in its state, and sees stacked layers"),
        (optax.stateless(averaged), "reduce_sum of blocks/bias"),
        (optax.stateless(reversed_rows), "rev of blocks/bias"),
        (optax.stateless(exchanged), "of blocks/up"),
    ],
)
def test_whole_weights_are_needed(given: object, why: str) -> None:
    assert re.search(why, by_layer(given).mixing)


def test_what_is_no_optimizer_is_told_in_one_line() -> None:
    assert user_error(OwnOptimizer, 3) == (
        "optimizer 3; valid: an optax transformation, or a function that makes one from a schedule, such as optax.lion"
    )
    assert "the function returned 3; valid" in user_error(OwnOptimizer(lambda rate: 3).transformation, CONFIG)
    broken = optax.stateless(lambda updates, params: updates["nothing"])
    assert "optimizer: KeyError: 'nothing' (" in user_error(by_layer, broken)

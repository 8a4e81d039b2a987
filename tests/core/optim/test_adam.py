"""AdamW and clipping on sharded weights are optax's on the whole tree; which steps are taken; fp16's loss scale."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from tiny import full, tiny_config, tiny_program

from megajax.core.mesh import shardings
from megajax.core.models.norms import LayerNorm
from megajax.core.optim.adam import (
    FEWEST,
    WINDOW,
    clip_by_norm,
    global_norm,
    initial_norms,
    is_spike,
    learning_rate,
    remember,
    update,
)
from megajax.core.optim.config import LossScaleConfig
from megajax.core.optim.loss_scale import LossScale
from megajax.core.parallel.layers import param
from megajax.core.program.program import Program
from megajax.settings.registration import register
from megajax.verify import named_leaves

PRODUCTS = ("attention/query", "attention/key", "attention/value", "attention/output", "mlp/up", "mlp/down")
DECAYED = {"shared/table", "shared/positions", *(f"blocks/{name}/weight" for name in PRODUCTS)}
STEPS = 3


@pytest.fixture(
    scope="module",
    params=[((1, 1, 1), 0), *(full(((2, 2, 2), zero)) for zero in (0, 1))],
    ids=["one device", "zero-0", "zero-1"],
)
def program(request) -> Program:
    """Two devices on every axis; layers that the pipe does not divide, so that some slots are padding. By default one
    device: any mesh is one exactly (`test_field.py`)."""
    mesh, zero = request.param
    return tiny_program(tiny_config(mesh, num_layers=5, zero=zero))


@pytest.fixture(scope="module")
def sharded_step(program):
    """(grads, optimizer state, params) -> norm, clipped gradients, new state and params, in the region of the step."""
    weights, moments = program.layout.trained_specs, program.layout.specs.optimizer

    def step(grads, state, params):
        norm = global_norm(grads)
        clipped = clip_by_norm(grads, norm, program.config.optimizer.clip_norm)
        params, state = update(program.optimizer, clipped, state, params, True)
        return norm, clipped, state, params

    in_specs = (weights, moments, weights)
    out_specs = (P(), weights, moments, weights)
    return jax.jit(jax.shard_map(step, mesh=program.mesh, in_specs=in_specs, out_specs=out_specs))


def random_tree(program: Program, seed: int, std: float) -> dict:
    """Weights or gradients in canonical form."""
    rng = np.random.default_rng(seed)
    shapes = program.layout.canonical_shapes.params
    return jax.tree.map(lambda leaf: rng.normal(0, std, leaf.shape).astype(np.float32), shapes)


def place(program: Program, tree: dict) -> dict:
    """The same in its shards, zeros in padded slots."""
    blocks = jax.tree.map(program.layout.placement.to_stages, tree["blocks"])
    specs = program.layout.trained_specs
    return jax.device_put({"shared": tree["shared"], "blocks": blocks}, shardings(program.mesh, specs))


def zero_state(program: Program, steps: int = 0) -> tuple:
    """Optimizer state of moments that are zero, its counters at `steps`."""
    shapes = program.layout.shapes.optimizer
    state = jax.tree.map(lambda leaf: np.full(leaf.shape, 0 if leaf.shape else steps, leaf.dtype), shapes)
    return jax.device_put(state, shardings(program.mesh, program.layout.specs.optimizer))


def assert_same(program: Program, actual: dict, expected: dict) -> None:
    actual = named_leaves(jax.device_get(program.layout.canonical_weights(actual)))
    expected = named_leaves(expected)
    assert actual.keys() == expected.keys()
    for name, leaf in expected.items():
        np.testing.assert_allclose(actual[name], leaf, rtol=1e-6, atol=1e-6 * np.abs(leaf).max(), err_msg=name)


@pytest.mark.parametrize("std", [1e-4, 1.0], ids=["small", "clipped"])
def test_sharded_steps_are_optax_s(program, sharded_step, std):
    """Global norm, clipping and three AdamW steps: split, duplicated and tied weights each count once, to 1e-6."""
    config = program.config.optimizer
    reference = optax.adamw(
        lambda step: learning_rate(step, config),
        *(config.beta1, config.beta2, config.epsilon),
        weight_decay=config.weight_decay,
        mask=lambda tree: jax.tree_util.tree_map_with_path(
            lambda path, _: "/".join(str(key.key) for key in path) in DECAYED, tree
        ),
    )
    clip = optax.clip_by_global_norm(config.clip_norm)

    @jax.jit
    def expected_step(grads, state, params):
        with jax.numpy_dtype_promotion("standard"):
            clipped, _ = clip.update(grads, None)
            updates, state = reference.update(clipped, state, params)
        return clipped, state, optax.apply_updates(params, updates)

    expected_params = random_tree(program, 0, 0.5)
    expected_state = reference.init(expected_params)
    params, state = place(program, expected_params), zero_state(program)
    for step in range(STEPS):
        canonical = random_tree(program, step + 1, std)
        norm, clipped, state, params = sharded_step(place(program, canonical), state, params)
        expected, expected_state, expected_params = expected_step(canonical, expected_state, expected_params)
        expected_norm = float(np.sqrt(sum((leaf.astype(np.float64) ** 2).sum() for leaf in jax.tree.leaves(canonical))))
        assert float(norm) == pytest.approx(expected_norm, rel=1e-6)
        assert (expected_norm > config.clip_norm) == (std == 1.0)
        assert_same(program, clipped, expected)
        assert_same(program, params, expected_params)
    assert_same(program, state[0].mu, expected_state[0].mu)
    assert_same(program, state[0].nu, expected_state[0].nu)


@pytest.mark.parametrize("norm", [0.0, 0.5, 1.0, 1.0 + 2**-20, 4.0])
def test_clipping_keeps_what_is_within_the_limit(norm):
    """At or below the limit nothing changes, not by a bit; above it, the norm becomes the limit."""
    grads = {"a": jnp.asarray([0.6 * norm]), "b": jnp.asarray([0.8 * norm])}
    clipped = clip_by_norm(grads, jnp.asarray(norm), 1.0)
    if norm <= 1:
        jax.tree.map(np.testing.assert_array_equal, clipped, grads)
    else:
        assert float(optax.tree.norm(clipped)) == pytest.approx(1.0, rel=1e-6)


def test_only_matrices_and_embeddings_decay():
    """Exactly these eight kinds of weights; no bias, nothing of a LayerNorm."""
    mask = named_leaves(tiny_program(tiny_config()).layout.decays)
    assert {name for name, decays in mask.items() if decays} == DECAYED
    assert all(name.endswith(("/bias", "/scale")) for name in mask.keys() - DECAYED)


@pytest.mark.usefixtures("no_names_stay")
def test_nothing_of_a_registered_norm_decays():
    """Whatever its weights are called, also in a norm that it contains."""

    class Norm(nnx.Module):
        def __init__(self, config):
            self.gain, self.inner = param((config.hidden_size,), ("embed",), jnp.ones), LayerNorm(config.hidden_size, 1)

    register("norm", "gained", Norm)
    decays = named_leaves(tiny_program(tiny_config(norm="gained")).layout.decays)
    assert {name for name, each in decays.items() if each} == DECAYED
    assert "blocks/mlp_norm/gain" in decays and "shared/final_norm/inner/scale" in decays


def test_weight_decay_is_decoupled(program, sharded_step):
    """With no gradient, matrices shrink by learning rate × decay, biases and LayerNorms stay."""
    config = program.config.optimizer
    before = random_tree(program, 0, 0.5)
    zeros = place(program, jax.tree.map(np.zeros_like, before))
    *_, after = sharded_step(zeros, zero_state(program, steps=2), place(program, before))  # warm-up is done
    after = named_leaves(jax.device_get(program.layout.canonical_weights(after)))
    for name, leaf in named_leaves(before).items():
        factor = 1 - config.learning_rate * config.weight_decay if name in DECAYED else 1
        np.testing.assert_allclose(after[name], leaf * factor, rtol=1e-6, err_msg=name)


SCALE = LossScaleConfig(initial=256.0, growth_every=3)


def after(outcome: str, config: LossScaleConfig | None = SCALE) -> LossScale:
    """The scale after steps that were good or overflowed: `+` and `-`."""
    scale = LossScale.start(config)
    for sign in outcome:
        scale = scale.after(jnp.asarray(sign == "+"), config)
    return scale


@pytest.mark.parametrize(
    ("outcome", "scale", "good_steps"),
    [
        ("", 256, 0),
        ("++", 256, 2),
        ("+++", 512, 0),
        ("++++++", 1024, 0),
        ("-", 128, 0),
        ("++-++", 128, 2),  # only good steps in a row count
        ("++-+++", 256, 0),
        ("-" * 8, 1, 0),
        ("-" * 20, 1, 0),  # the floor
        ("-" * 20 + "+++", 2, 0),
    ],
)
def test_the_scale_grows_and_shrinks(outcome, scale, good_steps):
    found = after(outcome)
    assert (float(found.scale), int(found.good_steps)) == (scale, good_steps)


def test_the_scale_stays_finite_and_invertible():
    found = after("+" * 400)
    assert np.isfinite(found.scale) and float(found.scale) * (1 / float(found.scale)) == 1 and 1 / found.scale > 1e-30


def test_without_a_configuration_nothing_is_scaled():
    found = after("+++-+++", None)
    assert (float(found.scale), int(found.good_steps)) == (1, 0)


def seen(norms: list[float]) -> jax.Array:
    recent = initial_norms()
    for step, norm in enumerate(norms):
        recent = remember(jnp.float32(norm), recent, jnp.int32(step))
    return recent


def test_a_spike_is_far_above_the_recent_median():
    """Neither before enough norms were seen nor without a threshold; outliers do not move the median."""
    norms = [1.0, 2.0, 3.0] * 5 + [1000.0]
    assert len(norms) == FEWEST
    recent = seen(norms)
    assert bool(is_spike(jnp.float32(8.1), recent, 4.0))
    assert not bool(is_spike(jnp.float32(7.9), recent, 4.0))
    assert not bool(is_spike(jnp.float32(8.1), recent, 0.0))
    assert not bool(is_spike(jnp.float32(8.1), seen(norms[1:]), 4.0))


def test_the_oldest_norm_makes_room():
    recent = seen([5.0] * WINDOW + [1.0] * (WINDOW - 1))
    assert np.sort(recent).tolist() == [1.0] * (WINDOW - 1) + [5.0]
    assert bool(is_spike(jnp.float32(2.5), recent, 2.0))

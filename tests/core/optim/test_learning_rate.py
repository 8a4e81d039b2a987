"""The learning-rate schedule at its key points, and against optax's."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from megajax.core.optim.adam import learning_rate
from megajax.core.optim.config import OptimizerConfig

PAPER = OptimizerConfig(learning_rate=1.5e-4, min_learning_rate=1e-5, warmup_steps=3000, decay_steps=300_000)


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 0.0),
        (1, 5e-8),
        (1500, 7.5e-5),
        (3000, 1.5e-4),
        (3000 + 297_000 // 4, 1e-5 + 1.4e-4 * (2 + 2**0.5) / 4),
        (3000 + 297_000 // 2, 8e-5),
        (300_000, 1e-5),
        (300_001, 1e-5),
        (2_000_000, 1e-5),
    ],
)
def test_the_paper_s_schedule(step: int, rate: float) -> None:
    assert float(learning_rate(step, PAPER)) == pytest.approx(rate, rel=1e-6)
    assert float(jax.jit(lambda step: learning_rate(step, PAPER))(step)) == pytest.approx(rate, rel=1e-6)


@pytest.mark.parametrize(("warmup", "rates"), [(0, (3.0, 2.0, 1.0, 1.0)), (2, (0.0, 1.5, 3.0, 1.0))])
def test_without_warm_up_or_without_decay(warmup: int, rates: tuple[float, ...]) -> None:
    config = OptimizerConfig(learning_rate=3.0, min_learning_rate=1.0, warmup_steps=warmup, decay_steps=2)
    assert [float(learning_rate(step, config)) for step in range(4)] == pytest.approx(rates)


@pytest.mark.parametrize(("schedule", "warmup"), [("cosine", 3000), ("linear", 0), ("linear", 3000)])
def test_it_is_optax_s(schedule: str, warmup: int) -> None:
    config = dataclasses.replace(PAPER, schedule=schedule, warmup_steps=warmup)
    rise, fall = optax.linear_schedule(0.0, 1.5e-4, warmup), optax.linear_schedule(1.5e-4, 1e-5, 300_000 - warmup)
    theirs = optax.join_schedules([rise, fall], [warmup])
    if schedule == "cosine":
        theirs = optax.warmup_cosine_decay_schedule(0.0, 1.5e-4, warmup, 300_000, 1e-5)
    steps = np.arange(0, 310_000, 997, dtype=np.int32)
    with jax.numpy_dtype_promotion("standard"):
        expected = jax.jit(jax.vmap(theirs))(steps)
    found = jax.jit(jax.vmap(lambda step: learning_rate(step, config)))(steps)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


WSD = dataclasses.replace(PAPER, schedule="wsd", warmup_steps=100, decay_steps=1000, cooldown_steps=200)
SHAPES = {
    "linear": lambda t: 1 - t,
    "cosine": lambda t: (1 + np.cos(np.pi * t)) / 2,
    "1-sqrt": lambda t: 1 - np.sqrt(t),
    "exponential": lambda t: 2 * np.power(0.5, t) - 1,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_warm_up_stable_decay(shape: str) -> None:
    """Against Megatron-LM's formulas (optimizer_param_scheduler.py), in numpy: 100 steps up, 700 at the peak, 200 down,
    then the floor."""
    config = dataclasses.replace(WSD, cooldown_shape=shape)
    down = 1e-5 + (1.5e-4 - 1e-5) * SHAPES[shape](np.arange(1, 201) / 200)
    expected = [1.5e-4 * np.arange(100) / 100, np.full(701, 1.5e-4), down, np.full(99, 1e-5)]
    rates = jax.jit(jax.vmap(lambda step: learning_rate(step, config)))(np.arange(1100, dtype=np.int32))
    np.testing.assert_allclose(rates, np.concatenate(expected), rtol=2e-6)


def test_a_branch_of_a_stable_run_has_its_rates_until_it_decays() -> None:
    """Whether the stable run was constant, or a decay that is far away."""
    steps = np.arange(900, dtype=np.int32)
    branch = jax.jit(jax.vmap(lambda step: learning_rate(step, WSD)))(steps[:801])
    for stable in (
        dataclasses.replace(WSD, schedule="constant", cooldown_steps=0),
        dataclasses.replace(WSD, decay_steps=10**6, cooldown_steps=10**5),
    ):
        rates = jax.jit(jax.vmap(lambda step, config=stable: learning_rate(step, config)))(steps)
        np.testing.assert_array_equal(rates[:801], branch)
        assert rates[-1] == rates[800]


@pytest.mark.parametrize("warmup", [0, 1, 100])
def test_inverse_square_root(warmup: int) -> None:
    """Megatron-LM's formula, in numpy; the floor where it would be less, and no end."""
    config = dataclasses.replace(PAPER, schedule="inverse-square-root", warmup_steps=warmup, decay_steps=0)
    steps = np.array([0, 1, 2, 50, 99, 100, 101, 400, 10**4, 10**6], dtype=np.int32)
    falling = np.maximum(1e-5, 1.5e-4 * np.sqrt(max(warmup, 1)) / np.sqrt(np.maximum(steps, 1)))
    expected = np.where(steps < warmup, 1.5e-4 * steps / max(warmup, 1), falling)
    np.testing.assert_allclose(jax.vmap(lambda step: learning_rate(step, config))(steps), expected, rtol=2e-6)


def test_constant_stays_at_the_peak() -> None:
    """After the warm-up, with neither floor nor end."""
    config = dataclasses.replace(PAPER, schedule="constant", warmup_steps=4, decay_steps=5)
    rates = [float(learning_rate(step, config)) for step in (0, 2, 4, 5, 10**6)]
    assert rates == pytest.approx([0, 0.75e-4, 1.5e-4, 1.5e-4, 1.5e-4])

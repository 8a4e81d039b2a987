"""Which steps are taken, and the loss scale of fp16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.optim.adam import FEWEST, WINDOW, initial_norms, is_spike, remember
from megajax.optim.config import LossScaleConfig
from megajax.optim.loss_scale import LossScale

SCALE = LossScaleConfig(initial=256.0, growth_every=3, floor=2.0)


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
        ("-" * 7, 2, 0),
        ("-" * 20, 2, 0),  # the floor
        ("-" * 20 + "+++", 4, 0),
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

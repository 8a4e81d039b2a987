"""A step that cannot be used is left out on every device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_config, tiny_program

from megajax.config import Config
from megajax.optim.guard import FEWEST
from megajax.parallel.collectives import axis_index
from megajax.pipeline.executor import Pipeline
from megajax.program.program import Program
from megajax.program.state import TrainState
from megajax.program.synthetic import random_batch
from megajax.program.train_step import train_step

QUICKLY = {"xla_backend_optimization_level": 0}


def named(state: TrainState) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(state))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def step(config: Config, state: TrainState | None = None) -> tuple[Program, TrainState, dict, TrainState]:
    """A program, a state after no or some steps, and the metrics and state of one step from there."""
    program = tiny_program(config)
    state = state or program.layout.init(QUICKLY)
    before = jax.device_get(state)
    batch = program.put_batch(random_batch(config, 0), program.local_rows)
    run = train_step(program).lower(state, batch).compile(QUICKLY)
    state, metrics = run(state, batch)
    return program, before, jax.device_get(metrics), state


def differing(before: TrainState, after: TrainState) -> set[str]:
    """Names of the leaves that are not bit for bit the same."""
    old, new = named(before), named(after)
    assert old.keys() == new.keys() and len(old) > 40
    return {name for name in old if old[name].tobytes() != np.asarray(new[name]).tobytes()}


@pytest.fixture
def overflow_on_one_device(monkeypatch):
    """The last device's gradient of one weight has one element too large for its format."""
    real = Pipeline.losses_and_gradients

    def overflowing(self, *args):
        losses, grads = real(self, *args)
        here = jnp.asarray(True)
        for axis in ("data", "pipe", "tensor"):
            here &= axis_index(axis) == 1
        leaf = grads["blocks"]["mlp"]["up"]["weight"]
        broken = leaf.at[(0,) * leaf.ndim].set(jnp.asarray(jnp.inf, leaf.dtype))
        grads["blocks"]["mlp"]["up"]["weight"] = jnp.where(here, broken, leaf)
        return losses, grads

    monkeypatch.setattr(Pipeline, "losses_and_gradients", overflowing)


@pytest.mark.parametrize(
    ("precision", "zero", "sequence_parallel"),
    [
        ("fp16", 1, True),
        pytest.param("bf16", 3, True, marks=pytest.mark.full),
        pytest.param("fp16", 0, False, marks=pytest.mark.full),
        pytest.param("fp16", 3, True, marks=pytest.mark.full),
    ],
)
def test_an_overflow_on_one_device_skips_the_step_on_all(overflow_on_one_device, precision, zero, sequence_parallel):
    """The state stays bit for bit, but for fp16's loss scale, which is halved."""
    options = {"precision": precision, "zero": zero, "sequence_parallel": sequence_parallel}
    _, before, metrics, after = step(tiny_config((2, 2, 2), **options))
    assert metrics["skipped"] and not np.isfinite(metrics["grad_norm"]) and np.isfinite(metrics["loss"])
    assert differing(before, after) == ({".loss_scale.scale"} if precision == "fp16" else set())
    scale = 2.0**16 if precision == "fp16" else 1.0
    assert metrics["loss_scale"] == scale and float(after.loss_scale.scale) == (scale / 2 if scale > 1 else 1)


def test_a_good_step_is_taken():
    """The same without the overflow: everything that should move does, and the scale waits for more good steps."""
    config = tiny_config((2, 2, 2), precision="fp16")
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, warmup_steps=0))
    _, before, metrics, after = step(config)
    assert not metrics["skipped"] and int(after.step) == 1
    assert float(after.loss_scale.scale) == 2.0**16 and int(after.loss_scale.good_steps) == 1
    moved = differing(before, after)
    assert {".step", ".recent_norms", ".loss_scale.good_steps"} <= moved and ".loss_scale.scale" not in moved
    leaves = [name for name in named(before) if name.startswith((".main", ".params", ".optimizer"))]
    still = {name for name in leaves if name not in moved}
    assert len(leaves) > 60 and not any(name.startswith((".main", ".optimizer")) for name in still), still
    assert len([name for name in leaves if name.startswith(".params")]) > 2 * len(still)  # some are rounded away


def test_a_scale_that_is_too_large_comes_down():
    """From a scale that overflows in fp16, steps are skipped until it does not; the good ones are numbered from 1."""
    config = tiny_config((1, 1, 2), precision="fp16")
    config = dataclasses.replace(config, loss_scale=dataclasses.replace(config.loss_scale, initial=2.0**40))
    program = tiny_program(config)
    state = program.layout.init(QUICKLY)
    batch = program.put_batch(random_batch(config, 0), program.local_rows)
    run = train_step(program).lower(state, batch).compile(QUICKLY)
    skipped, scales = [], []
    while len(skipped) < 40 and not (skipped and not skipped[-1]):
        state, metrics = run(state, batch)
        skipped.append(bool(metrics["skipped"]))
        scales.append(float(metrics["loss_scale"]))
    assert skipped == [True] * (len(skipped) - 1) + [False] and len(skipped) > 5
    assert scales == [2.0 ** (40 - n) for n in range(len(scales))]
    assert int(state.step) == 1 and int(state.optimizer[0].count) == 1


def test_a_spike_is_skipped_if_asked_for():
    """The first gradients are about 3 in norm: far above a median of 0.1, within reach of one of 1."""
    config = tiny_config((2, 1, 1))
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, skip_above=10.0))
    program = tiny_program(config)
    state = program.layout.init(QUICKLY)
    fresh, places = jax.device_get(state), jax.tree.map(lambda leaf: leaf.sharding, state)
    batch = program.put_batch(random_batch(config, 0), program.local_rows)
    run = train_step(program).lower(state, batch).compile(QUICKLY)
    for median, skips in ((0.1, True), (1.0, False)):
        recent = np.where(np.arange(fresh.recent_norms.size) < FEWEST, np.float32(median), fresh.recent_norms)
        before = dataclasses.replace(fresh, recent_norms=recent)
        after, metrics = run(jax.device_put(before, places), batch)
        assert 1.0 < metrics["grad_norm"] < 10.0
        assert bool(metrics["skipped"]) == skips
        assert (differing(before, after) == set()) == skips

"""A step that cannot be used is left out on every device."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import MIXTURE, full, tiny_config, tiny_program

from megajax.core.optim.adam import FEWEST
from megajax.core.optim.loss_scale import LossScale
from megajax.core.parallel.collectives import axis_index
from megajax.core.program import train_step as program_of_a_step
from megajax.core.program.program import Program
from megajax.core.program.state import TrainState
from megajax.core.program.train_step import train_step
from megajax.data.synthetic import random_batch
from megajax.verify.run import drawn_state

BROKEN = 7  # the step in which a gradient overflows on the last device
SKIP_ABOVE, EMA = 10.0, 0.75
OFTEN = "fp16", 1, True, "muon"


@dataclass(frozen=True)
class Compiled:
    """A train step that is compiled once for all tests."""

    program: Program
    fresh: TrainState  # before the first step, on the host
    places: Any  # where its leaves lie
    batch: Any
    run: Callable  # (state, batch) -> (state, metrics)

    def step(self, before: TrainState) -> tuple[TrainState, dict]:
        """The state and the metrics after a step from `before`."""
        after, metrics = self.run(jax.device_put(before, self.places), self.batch)
        return jax.device_get(after), jax.device_get(metrics)


@cache
def compiled(precision: str, zero: int, sequence_parallel: bool, name: str) -> Compiled:
    """The step on (2, 2, 2), or on (2, 1, 2), that skips spikes; in step BROKEN one element of one weight's gradient on
    the last device is too large for its format. Muon, whose other weights are AdamW's, trains in bf16 a mixture with
    biases of its experts, which `test_field.py` skips by default."""
    options = {"precision": precision, "zero": zero, "sequence_parallel": sequence_parallel, "ema": EMA}
    options |= {"num_layers": 1, "dropout": 0.0} if name == "muon" else {}
    options |= MIXTURE | {"balance": "bias"} if name == "muon" and precision == "bf16" else {}
    mesh = (2, 1, 2) if name == "muon" else (2, 2, 2)
    config = tiny_config(mesh, optimizer={"name": name, "warmup_steps": 0, "skip_above": SKIP_ABOVE}, **options)
    program = tiny_program(config)
    state = program.layout.from_canonical(drawn_state(program))
    batch = program.put_batch(random_batch(program.config, 0), program.local_rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program_of_a_step, "training_pipeline", overflowing)
        run = train_step(program).lower(state, batch).compile()
    return Compiled(program, jax.device_get(state), jax.tree.map(lambda leaf: leaf.sharding, state), batch, run)


real = program_of_a_step.training_pipeline
BROKEN_WEIGHT = "blocks", "mlp", "up", "weight"


def overflowing(program, params, batch, step, *others):
    pipeline = real(program, params, batch, step, *others)
    run = pipeline.losses_and_gradients

    def losses_and_gradients(*arguments):
        losses, grads, figures = run(*arguments)
        here = step == BROKEN
        for axis, size in program.config.mesh.sizes.items():
            here &= axis_index(axis) == size - 1
        leaf = grads[BROKEN_WEIGHT]
        broken = leaf.at[(0,) * leaf.ndim].set(jnp.asarray(jnp.inf, leaf.dtype))
        grads[BROKEN_WEIGHT] = jnp.where(here, broken, leaf)
        return losses, grads, figures

    pipeline.losses_and_gradients = losses_and_gradients
    return pipeline


def named(state: TrainState) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def differing(before: TrainState, after: TrainState) -> set[str]:
    """Names of the leaves that are not bit for bit the same."""
    old, new = named(before), named(after)
    assert old.keys() == new.keys() and len(old) > 40
    return {name for name in old if old[name].tobytes() != np.asarray(new[name]).tobytes()}


@pytest.mark.parametrize(
    ("precision", "zero", "sequence_parallel", "name"),
    [
        OFTEN,
        full("fp16", 1, True, "adamw"),
        full("bf16", 3, True, "adamw"),
        full("fp16", 0, False, "adamw"),
        full("bf16", 3, True, "muon"),
    ],
)
def test_an_overflow_on_one_device_skips_the_step_on_all(precision, zero, sequence_parallel, name):
    """The state stays bit for bit, but for fp16's loss scale, which is halved."""
    made = compiled(precision, zero, sequence_parallel, name)
    before = dataclasses.replace(made.fresh, step=np.int32(BROKEN))
    after, metrics = made.step(before)
    assert metrics["skipped"] and not np.isfinite(metrics["grad_norm"]) and np.isfinite(metrics["loss"])
    assert differing(before, after) == ({".loss_scale.scale"} if precision == "fp16" else set())
    scale = 2.0**16 if precision == "fp16" else 1.0
    assert metrics["loss_scale"] == scale and float(after.loss_scale.scale) == (scale / 2 if scale > 1 else 1)


def test_a_good_step_is_taken():
    """The same without the overflow: everything that should move does, the average to where it should, and the scale
    waits for more good steps."""
    made = compiled(*OFTEN)
    before = made.fresh
    after, metrics = made.step(before)
    assert not metrics["skipped"] and int(after.step) == 1
    assert float(after.loss_scale.scale) == 2.0**16 and int(after.loss_scale.good_steps) == 1
    moved = differing(before, after)
    assert {".step", ".recent_norms", ".loss_scale.good_steps"} <= moved and ".loss_scale.scale" not in moved
    leaves = [name for name in named(before) if name.startswith((".main", ".params", ".optimizer", ".average"))]
    still = {*leaves} - moved
    assert len(leaves) > 40 and not any(name.startswith((".main", ".optimizer", ".average")) for name in still), still
    assert len([name for name in leaves if name.startswith(".params")]) > 2 * len(still)  # some are rounded away
    wanted = jax.tree.map(lambda old, new: EMA * old + (1 - EMA) * new, before.average, after.main)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-9), after.average, wanted)


def test_a_scale_that_is_too_large_comes_down():
    """From a scale that overflows in fp16, steps are skipped until it does not; the good ones are numbered from 1."""
    made = compiled(*OFTEN)
    large = LossScale.start(dataclasses.replace(made.program.config.loss_scale, initial=2.0**32))
    state = dataclasses.replace(made.fresh, loss_scale=jax.device_get(large))
    skipped, scales = [], []
    while len(skipped) < 40 and not (skipped and not skipped[-1]):
        state, metrics = made.step(state)
        skipped.append(bool(metrics["skipped"]))
        scales.append(float(metrics["loss_scale"]))
    assert skipped == [True] * (len(skipped) - 1) + [False] and len(skipped) > 5
    assert scales == [2.0 ** (32 - n) for n in range(len(scales))]
    assert int(state.step) == 1 and int(state.optimizer[0].adam.count) == 1


def test_a_spike_is_skipped_if_asked_for():
    """The first gradients are about 0.7 in norm: far above a median of 0.02, within reach of one of 0.2."""
    made = compiled(*OFTEN)
    for median, skips in ((0.02, True), (0.2, False)):
        norms = made.fresh.recent_norms
        recent = np.where(np.arange(norms.size) < FEWEST, np.float32(median), norms)
        before = dataclasses.replace(made.fresh, recent_norms=recent)
        after, metrics = made.step(before)
        assert 0.2 < metrics["grad_norm"] < 2.0
        assert bool(metrics["skipped"]) == skips
        assert (differing(before, after) == {".loss_scale.good_steps"}) == skips

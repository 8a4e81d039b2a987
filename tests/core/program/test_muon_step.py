"""Muon in the train step: on any mesh, with any schedule and every ZeRO, weights after some steps are those of one
device, to rounding in fp64. More meshes are compared exactly in tests/test_field.py."""

import functools

import jax
import numpy as np
import pytest
from parity_grid import DECODERS, GRID, OPTIONS, meeting, on_stages
from tiny import LLAMA, MIXTURE, tiny_config, tiny_program

from megajax.core.program.program import Program
from megajax.core.program.train_step import train_step
from megajax.data.synthetic import placed_batch
from megajax.settings.config import Config
from megajax.verify import named_leaves
from megajax.verify.forms import plain
from megajax.verify.run import QUICK, drawn_state

STEPS = 2  # the second has momentum; at 30 times this rate each makes rounding 20 to 200 times as large
# At once in the steps; rounding in what is almost zero is not to count (`verify.check.steady`).
MUON = {"name": "muon", "warmup_steps": 0, "epsilon": 1e-4, "learning_rate": 1e-4}
FP64 = {"precision": "fp64", "optimizer": MUON}
ROWS = meeting([GRID[0], *OPTIONS, " ".join(["gpt2", "bert-post", *DECODERS])])[::3]
ON_CONTEXT = [  # mesh, what else
    ((2, 1, 2, 2), {"zero": 3, "sequence_parallel": True}),
    ((1, 2, 2, 2), {"schedule": "interleaved", "chunks": 2, "weight_gradients": "deferred"}),
    ((2, 2, 2, 1), {"zero": 0}),
    ((1, 1, 8, 1), {"context_attention": "gather"}),
]
WITH_EXPERTS = [
    ((2, 1, 2), {"expert": 2}),
    ((1, 2, 1), {"expert": 4, "zero": 3}),
    ((1, 2, 2), {"expert": 2, "zero": 0}),
]
FEW = {"num_layers": 5, "global_batch": 4, **FP64}


def weights_after_steps(config: Config) -> dict[str, np.ndarray]:
    with jax.enable_x64(True):
        program: Program = tiny_program(config)
        state = program.layout.from_canonical(drawn_state(program))
        step = train_step(program).lower(state, placed_batch(program, 0)).compile(QUICK)
        for number in range(STEPS):
            state, _ = jax.block_until_ready(step(state, placed_batch(program, number)))
        return named_leaves(jax.device_get(program.layout.canonical_weights(state.params)))


@functools.cache
def alone(config: Config) -> dict[str, np.ndarray]:
    return weights_after_steps(config)


def check(config: Config) -> None:
    actual, expected = weights_after_steps(config), alone(plain(config))
    assert actual.keys() == expected.keys()
    for leaf, wanted in expected.items():
        assert np.linalg.norm(actual[leaf] - wanted) < 1e-12 * np.linalg.norm(wanted), leaf


@pytest.mark.full
@pytest.mark.parametrize("words", ROWS)
def test_grid(words):
    check(tiny_config(**on_stages(words) | FP64))


@pytest.mark.full
@pytest.mark.parametrize(("mesh", "others"), ON_CONTEXT + WITH_EXPERTS)
def test_on_a_context_axis_and_of_experts(mesh, others):
    check(tiny_config(mesh, **FEW | (MIXTURE if "expert" in others else LLAMA) | others))

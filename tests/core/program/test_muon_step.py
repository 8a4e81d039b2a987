"""Muon in the train step: on any mesh, with any schedule and every ZeRO, weights after some steps are those of one
device, to rounding in fp64. More meshes are compared exactly in tests/test_field.py."""

import functools

import jax
import numpy as np
import pytest
from parity_grid import ALL, DECODERS, FURTHER_APART, ROWS, config_of, name, of, pairwise
from tiny import LLAMA, MIXTURE, tiny_config, tiny_program

from megajax.core.program.program import Program
from megajax.core.program.train_step import train_step
from megajax.data.synthetic import placed_batch
from megajax.settings.config import Config
from megajax.verify import named_leaves
from megajax.verify.run import QUICK, drawn_state

STEPS = 2  # the second has momentum; at 30 times this rate each makes rounding 20 to 200 times as large
# At once in the steps; rounding in what is almost zero is not to count (`verify.check.steady`).
MUON = {"name": "muon", "warmup_steps": 0, "epsilon": 1e-4, "learning_rate": 1e-4}
FP64 = {"precision": "fp64", "optimizer": MUON}
MODELS = ("gpt2", "bert-post", *DECODERS)
ROWS_OF_GRID = [(*row[:-1], model) for row in ALL if row[-1] == "gpt2" for model in MODELS]
GRID = pairwise(ROWS_OF_GRID, FURTHER_APART, seed=1)[::3]
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
def reference(num_layers: int, vocab_size: int, model: str) -> dict[str, np.ndarray]:
    size = {"num_layers": num_layers, "vocab_size": vocab_size, **of(model)}
    return weights_after_steps(tiny_config(microbatch=ROWS, global_batch=ROWS, **size, **FP64))


def check(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    for leaf, wanted in expected.items():
        assert np.linalg.norm(actual[leaf] - wanted) < 1e-12 * np.linalg.norm(wanted), leaf


@pytest.mark.full
@pytest.mark.parametrize("row", GRID, ids=name)
def test_grid(row):
    config = config_of(row, **FP64)
    check(weights_after_steps(config), reference(config.model.num_layers, config.model.vocab_size, row[-1]))


@pytest.mark.full
@pytest.mark.parametrize(("mesh", "others"), ON_CONTEXT + WITH_EXPERTS)
def test_on_a_context_axis_and_of_experts(mesh, others):
    mixture = "expert" in others
    actual = weights_after_steps(tiny_config(mesh, **FEW | (MIXTURE if mixture else LLAMA) | others))
    check(actual, reference_of_few(mixture))


@functools.cache
def reference_of_few(mixture: bool) -> dict[str, np.ndarray]:
    return weights_after_steps(tiny_config(**FEW | (MIXTURE if mixture else LLAMA) | {"microbatch": 4}))

"""The average of the weights over the steps (`train.ema`). On a mesh: `tests/test_field.py`; stored:
`tests/runs/test_checkpoint.py`."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny import tiny_config, tiny_program

from megajax.core.program.train_step import train_step
from megajax.data.synthetic import random_batch
from megajax.verify.run import drawn_state


@pytest.mark.slow
def test_it_begins_with_new_weights_and_follows_the_main_ones() -> None:
    """Not those that layers compute with, which are rounded."""
    program = tiny_program(tiny_config(ema=0.75, precision="bf16", num_layers=1, optimizer={"warmup_steps": 0}))
    layout, begun = program.layout, drawn_state(program)
    new = jax.device_get(layout.to_canonical(layout.init()))
    jax.tree.map(np.testing.assert_array_equal, new.average, new.params)
    state = layout.from_canonical(dataclasses.replace(begun, average=begun.params))
    old = jax.device_get(layout.to_canonical(state)).average
    batch = program.put_batch(random_batch(program.config, 0), program.local_rows)
    step = train_step(program).lower(state, batch).compile({"xla_backend_optimization_level": 0})
    stepped = jax.device_get(layout.to_canonical(step(state, batch)[0]))
    expected = jax.tree.map(lambda x, y: 0.75 * x + 0.25 * y, old, stepped.params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6), stepped.average, expected)


def test_it_is_fp32_and_lies_like_the_optimizer_s_state() -> None:
    layout = tiny_program(tiny_config((2, 2, 2), ema=0.75, precision="bf16", zero=1)).layout
    assert layout.specs.average == layout.trained_specs
    assert {leaf.dtype for leaf in jax.tree.leaves(layout.shapes.average)} == {np.dtype("float32")}

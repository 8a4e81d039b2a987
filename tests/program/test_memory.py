"""Bytes per parameter of weights, optimizer state and gradients: Megatron-LM's published rows."""

import dataclasses
import math

import jax
import pytest
from tiny import abstract_batch, tiny_config, tiny_program

from megajax.models.family import count_parameters
from megajax.program.memory import state_bytes
from megajax.program.program import Program
from megajax.program.train_step import train_step

PUBLISHED = {  # (precision, dtype of the gradients): replicated, and distributed as (replicated part, part over data)
    ("fp16", "fp16"): (20, (4, 16)),
    ("fp16", "fp32"): (18, (6, 12)),
    ("bf16", "bf16"): (20, (4, 16)),
    ("bf16", "fp32"): (18, (6, 12)),
    ("fp32", "fp32"): (16, (8, 8)),
}


def program(data: int, zero: int, precision: str, gradient_dtype: str) -> Program:
    """A model whose dims all divide."""
    sizes = {"num_layers": 2, "hidden_size": 64, "num_heads": 8, "sequence_length": 32, "vocab_size": 512}
    config = tiny_config((data, 1, 1), precision=precision, zero=zero, **sizes)
    optimizer = dataclasses.replace(config.optimizer, gradient_dtype=gradient_dtype)
    return tiny_program(dataclasses.replace(config, optimizer=optimizer))


@pytest.mark.parametrize("data", [1, 2, 4, 8])
@pytest.mark.parametrize("row", PUBLISHED, ids="-".join)
def test_bytes_per_parameter(row, data):
    """Within 1% of the published rows; ZeRO-3 divides everything."""
    replicated, (whole, split) = PUBLISHED[row]
    for zero, expected in ((0, replicated), (1, whole + split / data), (3, (whole + split) / data)):
        made = program(data, zero, *row)
        found = sum(state_bytes(made).values()) / count_parameters(made.config.model)
        assert found == pytest.approx(expected, rel=0.01), zero


@pytest.mark.parametrize(
    "row", [("bf16", "fp32"), pytest.param(("fp32", "fp32"), marks=pytest.mark.full)], ids="-".join
)
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_the_compiled_step_takes_that_state(zero, row):
    """Its arguments are the state, less than 1 kB of scalars and recent norms, and the batch."""
    made = program(4, zero, *row)
    batch = abstract_batch(made.config)
    step = train_step(made).lower(jax.eval_shape(made.layout.init), batch)
    compiled = step.compile({"xla_backend_optimization_level": 0}).memory_analysis()
    parts = state_bytes(made)
    rows = sum(math.prod(leaf.shape) * 4 for leaf in batch.values()) // 4
    state = sum(parts.values()) - parts["gradients"]
    assert 0 <= compiled.argument_size_in_bytes - state - rows < 1024
    assert compiled.alias_size_in_bytes >= state  # updated where it lies

"""Bytes per parameter of weights, optimizer state and gradients: Megatron-LM's published rows; and whether they fit."""

import dataclasses
import math
from types import SimpleNamespace

import jax
import pytest
from tiny import abstract_batch, full, tiny_config, tiny_program

from megajax.errors import UserError
from megajax.models.family import count_parameters
from megajax.program import memory
from megajax.program.memory import kept_bytes, state_bytes
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


@pytest.mark.parametrize("data", [1, *(full(data) for data in (2, 4)), 8])
@pytest.mark.parametrize("row", PUBLISHED, ids="-".join)
def test_bytes_per_parameter(row, data):
    """Within 1% of the published rows; ZeRO-3 divides everything."""
    replicated, (whole, split) = PUBLISHED[row]
    for zero, expected in ((0, replicated), (1, whole + split / data), (3, (whole + split) / data)):
        made = program(data, zero, *row)
        found = sum(state_bytes(made).values()) / count_parameters(made.config.model)
        assert found == pytest.approx(expected, rel=0.01), zero


@pytest.mark.parametrize("row", [("bf16", "fp32"), full(("fp32", "fp32"))], ids="-".join)
@pytest.mark.parametrize("zero", [full(0), full(1), 3])
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


@pytest.mark.parametrize(("mesh", "zero"), [((1, 1, 1), 1), ((2, 2, 1), 0), ((2, 1, 2), 3)])
def test_what_does_not_fit_is_refused_to_the_byte(mesh, zero, monkeypatch) -> None:
    """The devices of a CPU share its memory; a GPU has its own, and where it does not say how much, all fits."""
    program = tiny_program(tiny_config(mesh, precision="bf16", zero=zero))
    weights, main, moments = kept_bytes(program.layout).values()
    devices = math.prod(mesh)
    activations = 3 * 16 * 24 * 2 * 4 // mesh[1]  # rows, tokens, width, bytes, layers
    scores, logits = 16 * 16 * 4, 3 * 16 * 128 * 2 // mesh[2]
    for needed, options in (
        (weights + main + moments + activations + scores + logits, {"training": True, "rows": 3}),
        (weights, {"training": False}),
    ):
        monkeypatch.setattr(memory, "_machine_bytes", lambda needed=needed: needed * devices)
        memory.check_memory(program, **options)
        monkeypatch.setattr(memory, "_machine_bytes", lambda needed=needed: needed * devices - 1)
        message = rf"--model\.num-layers 4, .* need .* on each of {devices} devices .*; valid: "
        with pytest.raises(UserError, match=message):
            memory.check_memory(program, **options)


def test_the_memory_of_devices(monkeypatch) -> None:
    def gpus(*limits):
        stats = [None if limit is None else {"bytes_limit": limit} for limit in limits]
        return [SimpleNamespace(platform="gpu", memory_stats=lambda each=each: each) for each in stats]

    assert memory._device_bytes(gpus(5, 3, None)) == 3 and memory._device_bytes(gpus(None)) == math.inf
    monkeypatch.setattr(memory, "_machine_bytes", lambda: 8)
    assert memory._device_bytes([SimpleNamespace(platform="cpu")] * 4) == 2
    monkeypatch.undo()
    assert 2**28 < memory._machine_bytes() < 2**50

"""The executor: memory that does not grow with the microbatches, nothing weight-sized kept, no cost without a pipe."""

import itertools
import sys
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny import abstract_batch, tiny_config, tiny_program

from megajax.pipeline.stages import Layers
from megajax.verify import named_leaves, random_batch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from executor_overhead import hand_written


def fast_compile(lowered):
    """Compiled with little optimisation of machine code, which does not change what buffers there are."""
    return lowered.compile({"xla_backend_optimization_level": 0})


def temp_bytes(compiled) -> int:
    return compiled.memory_analysis().temp_size_in_bytes


def test_buffers_do_not_grow_with_the_microbatches():
    """1F1B with 64 microbatches needs the memory of 8, to 1% (what is left is the tokens themselves)."""

    def train_step_bytes(num_microbatches: int) -> int:
        config = tiny_config((1, 4, 1), global_batch=num_microbatches, hidden_size=128, num_heads=4, sequence_length=64)
        program = tiny_program(config)
        state = jax.eval_shape(program.layout.init)
        return temp_bytes(fast_compile(program.train_step.lower(state, abstract_batch(config))))

    assert train_step_bytes(64) == pytest.approx(train_step_bytes(8), rel=0.01)


# Tokens are a prime number that divides no dim of a weight, so that an array without them is known by its size.
ROWS, TOKENS = 3, 17


@pytest.fixture
def kept_and_weights(monkeypatch) -> list[tuple]:
    """What a stage keeps of a microbatch and its weights, as types, of every program traced from now on."""
    found = []
    kept_types = Layers.kept_types

    def record(self, weights, *others):
        types = kept_types(self, weights, *others)
        found.append((types, jax.tree.leaves(weights)))
        return types

    monkeypatch.setattr(Layers, "kept_types", record)
    return found


KINDS = [
    (remat, num_layers, scan_layers, "bf16" if (num_layers == 5) == (scan_layers == "true") else "fp32")
    for remat, num_layers, scan_layers in itertools.product(["none", "layer"], [4, 5], ["true", "false"])
]


@pytest.mark.parametrize(("remat", "num_layers", "scan_layers", "precision"), KINDS)
def test_nothing_weight_sized_is_kept(kept_and_weights, remat, num_layers, scan_layers, precision):
    """All that is kept has a token dim, but for the states of dropout; with remat of layers it is their input only."""
    layout = {"sequence_length": TOKENS, "microbatch": ROWS, "global_batch": 2 * ROWS, "num_layers": num_layers}
    config = tiny_config((1, 2, 2), remat=remat, precision=precision, scan_layers=scan_layers, **layout)
    program = tiny_program(config)
    params = jax.eval_shape(program.layout.init).params
    jax.eval_shape(program.loss_and_gradients, params, abstract_batch(config), jax.ShapeDtypeStruct((), "int32"))
    ((kept, weights),) = kept_and_weights
    slots = (num_layers + 1) // 2
    assert {leaf.shape[0] for leaf in kept + weights} == {slots}
    small = ROWS * config.model.num_heads // 2  # a state of dropout for every head
    sizes, weight_sizes = ([leaf.size // slots for leaf in leaves] for leaves in (kept, weights))
    assert all(size % TOKENS and size > small for size in weight_sizes)
    assert all(size % TOKENS == 0 or size <= small for size in sizes), kept
    x_size = ROWS * TOKENS * config.model.hidden_size
    if remat == "layer":
        assert [size for size in sizes if size > small] == [x_size]
    else:
        assert sum(sizes) > 5 * x_size


@cache
def compiled(remat: str, scan_layers: str) -> tuple:
    """Program, its loss and gradients compiled, and the hand-written loop compiled; four microbatches."""
    program = tiny_program(
        tiny_config(
            remat=remat, scan_layers=scan_layers, global_batch=4, hidden_size=64, num_heads=4, sequence_length=96
        )
    )
    params = jax.eval_shape(program.layout.init).params
    arguments = (params, abstract_batch(program.config), jax.ShapeDtypeStruct((), "int32"))
    loops = (program.loss_and_gradients, hand_written(program))
    return program, *(fast_compile(loop.lower(*arguments)) for loop in loops)


LOOPS = [("none", "true"), ("layer", "false")]  # remat, scan_layers


@pytest.mark.parametrize(("remat", "scan_layers"), LOOPS)
def test_it_is_the_hand_written_loop(remat, scan_layers):
    """On one device, loss and every gradient are those of accumulating `value_and_grad` over the microbatches."""
    program, ours, plain = compiled(remat, scan_layers)
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(program.layout.init).params
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.1, leaf.shape).astype(np.float32), shapes)
    arguments = (params, random_batch(program.config, 0), np.int32(0))
    (loss, gradients), (expected_loss, expected) = ours(*arguments), plain(*arguments)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    gradients, expected = named_leaves(gradients), named_leaves(expected)
    assert gradients.keys() == expected.keys()
    for name, leaf in expected.items():
        np.testing.assert_allclose(gradients[name], leaf, rtol=1e-5, atol=1e-6 * np.abs(leaf).max(), err_msg=name)


@pytest.mark.parametrize(("remat", "scan_layers"), LOOPS)
def test_it_needs_no_more_memory_than_the_hand_written_loop(remat, scan_layers):
    """Temporary bytes of the compiled programs, within 5%."""
    _, ours, plain = compiled(remat, scan_layers)
    assert temp_bytes(ours) <= 1.05 * temp_bytes(plain)

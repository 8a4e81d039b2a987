"""What a step with products in 8 bits keeps, sends, skips and restores, and what else computes as it does; that it is
the same on every mesh: `tests/test_field.py` and `tests/test_parity.py`."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import collectives_of_a_step
from field import assert_exact
from tiny import MIXTURE, drawn_params, full, tiny_config, tiny_program

from jaxequal.arrays import ARRAYS
from jaxequal.functions import converted
from jaxequal.numbers import Value, estimate, is_zero, joined, oracle
from megajax.core.backend import CPU
from megajax.core.models.lora_config import LoraConfig
from megajax.core.parallel.float8 import FLOAT8
from megajax.core.precision import E4M3
from megajax.core.program.bind import trace_pipeline
from megajax.core.program.communication import collectives_of
from megajax.core.program.memory import kept_bytes
from megajax.core.program.program import Program
from megajax.core.program.scoring import logits
from megajax.core.program.train_step import train_step
from megajax.core.program.transfer import Transfer
from megajax.data.synthetic import placed_batch
from megajax.generation.choice import Sampling
from megajax.generation.decoder import Decoder
from megajax.generation.window import continue_in_windows
from megajax.library.plain import PlainModel
from megajax.plan.communication import communication, totals
from megajax.plan.memory import memory
from megajax.plan.traced import step_cost
from megajax.verify.run import drawn_weights


def rounded(equation: Any, x: Value) -> Value:
    """What is rounded to e4m3 becomes a random function of itself: it matters which numbers are, and by which scale."""
    same = converted(x, equation.invars[0].aval.dtype, dtype := equation.params["new_dtype"])
    return np.where(is_zero(x), x, joined(oracle(x, "e4m3"), estimate(x))) if dtype == E4M3 else same


def test_layers_in_bf16_under_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly, by numbers in the whole model."""
    monkeypatch.setitem(ARRAYS, "convert_element_type", rounded)
    size = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "sequence_length": 4, "global_batch": 2, "dropout": 0.0}
    config = tiny_config((1, 2, 1), precision="fp8", bf16_layers="1,0", **size | {"vocab_size": 21})
    assert_exact(config, branches=False, planned=False)


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": (2, 2, 2), "schedule": "interleaved", "chunks": 2, "num_layers": 5, "zero": 3},
        full({"mesh": (1, 1, 2), "expert": 2, "zero": 1, **MIXTURE}),
        full({"mesh": (2, 1, 1), "expert": 2, "zero": 3, "expert_capacity": 1.0, **MIXTURE}),
    ],
)
def test_the_plan_has_the_bytes_of_the_copies(options: dict) -> None:
    config = tiny_config(**options, precision="fp8")
    program = tiny_program(config)

    def copies(pipeline) -> int:
        flat = jax.tree_util.tree_leaves_with_path(pipeline.layers.weights)
        found = [leaf for path, leaf in flat if jax.tree_util.DictKey(FLOAT8) in path]
        return sum(leaf.size * leaf.dtype.itemsize for leaf in found)

    assert memory(config).copies == trace_pipeline(program, copies) > 0


ADAPTED = {"mesh": (1, 1, 2), "num_layers": 2, "lora": LoraConfig(rank=2), "precision": "fp8", "num_heads": 2}
ADAPTED |= {"dropout": 0.0}


def test_the_step_does_not_round_frozen_weights() -> None:
    """Else it would exchange the largest numbers of their rows."""
    config = tiny_config(**ADAPTED)
    program, planned = tiny_program(config), memory(config, CPU)
    layout = program.layout
    assert 0 == planned.copies < planned.frozen_copies == kept_bytes(layout)["float8 copies"]
    traced = train_step(program).trace(layout.shapes, program.batch_types)
    assert totals(communication(config, step_cost(config, CPU))) == totals(collectives_of(traced.jaxpr))


@pytest.mark.full
def test_their_copies_are_what_a_step_uses_and_are_made_again_after_a_restore() -> None:
    program = tiny_program(tiny_config(**ADAPTED | {"mesh": (2, 2, 2)}, zero=3))
    transfer, state = Transfer(program.layout), program.layout.init()
    stored = transfer.to_host(state)
    assert stored.copies is None
    copies = jax.device_get(state.copies)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(transfer.to_devices(stored).copies), copies)
    step, batch = train_step(program), placed_batch(program, 0)
    state, metrics = step(state, batch)
    assert not metrics["skipped"]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.copies), copies)
    assert step(dataclasses.replace(state, copies=jax.tree.map(lambda x: x * jnp.nan, state.copies)), batch)[1][
        "skipped"
    ]


@pytest.mark.full
def test_the_plan_has_the_communication_of_dropless_experts() -> None:
    """Of forms of a CPU: in blocks, as in `test_field.py`, it does not know how many rows they compute."""
    options = {"expert": 2, "weight_gradients": "deferred", "remat": "layer", **MIXTURE}
    config = tiny_config((2, 1, 2), precision="fp8", **options)
    assert totals(communication(config, backend=CPU)) == totals(collectives_of_a_step(config))


def test_the_state_is_that_of_bf16() -> None:
    """So a checkpoint of the one is one of the other."""
    one, other = (tiny_program(tiny_config((2, 2, 2), precision=each, zero=3)).layout for each in ("bf16", "fp8"))
    assert one.canonical_shapes == other.canonical_shapes and one.shapes == other.shapes
    assert one.specs == other.specs and one.compute_dtype == other.compute_dtype == jnp.bfloat16


@pytest.mark.full
def test_a_nan_or_an_infinity_skips_the_step_as_in_bf16() -> None:
    """Of a weight that is multiplied in 8 bits."""
    config = tiny_config(precision="fp8", num_layers=2, global_batch=2, microbatch=2)
    program = tiny_program(config)
    step, batch = train_step(program), placed_batch(program, 0)
    for number, wrong in itertools.product((0, 1), (jnp.nan, jnp.inf)):
        state = program.layout.init()
        weight = state.params["blocks"]["mlp"]["up"]["weight"]
        state.params["blocks"]["mlp"]["up"]["weight"] = weight.at[0, 0, number, 3, 5].set(wrong)
        assert step(state, batch)[1]["skipped"], (number, wrong)
    assert not step(program.layout.init(), batch)[1]["skipped"]


@pytest.mark.full
def test_generation_and_the_plain_model_compute_as_training() -> None:
    """A cache continues as whole windows do; dense layers of a mixture stay in bf16."""
    sizes = {"num_layers": 3, "init_std": 0.3, "bf16_layers": "0,1", "dense_layers": 1}
    config = tiny_config((1, 1, 2), precision="fp64", global_batch=2, **MIXTURE | sizes)
    with jax.enable_x64(True):
        program = Program.on(config, jax.devices()[:2], E4M3)
        params = drawn_params(program)
        decoder = Decoder(program, params, Sampling(0.0), ())
        prompt = [3, 1, 4, 1, 5]
        ids = [token for piece in decoder.stream([prompt], max_tokens=6, batch=1) for token in piece.ids]
        assert ids == [*continue_in_windows(program, params, prompt, num_tokens=6, sampling=Sampling(0.0))]
    config = tiny_config(precision="fp8", global_batch=2, microbatch=2)
    plain_model, program = PlainModel(config), tiny_program(config)
    weights = jax.tree.map(jnp.asarray, drawn_weights(program))
    tokens = np.arange(2 * 16, dtype=np.int32).reshape(2, 16)
    expected = logits(program)(drawn_params(program), {"tokens": tokens, "targets": tokens})
    actual = plain_model(weights, tokens)
    assert np.abs(np.asarray(actual - expected[..., :101], np.float32)).max() < 0.05

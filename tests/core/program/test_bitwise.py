"""Training has the same bits on every mesh with `--bitwise` (docs/bitwise.md)."""

import dataclasses
import os
import pickle
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import GEMMA, LLAMA, OLMO2, QWEN3, full, tiny_config, user_error

from megajax.core.parallel import integer_sums
from megajax.core.parallel.integer_sums import digit_bits, floats, integers
from megajax.core.program.program import Program
from megajax.core.program.scoring import logits, scores
from megajax.data.synthetic import placed_batch
from megajax.settings.validation import validate
from megajax.verify.run import drawn_state

DECODER = {"vocab_multiple": 8, "head_size": 4}
ALL = {"schedule": "interleaved", "chunks": 2, "num_layers": 4, "zero": 3, "weight_gradients": "deferred"}
_CHILD = """
import pickle, sys
from megajax.start.launch import avoid_known_faults
avoid_known_faults()
import jax
jax.config.update("jax_num_cpu_devices", 8)
from megajax.verify.bits import same_bits
sys.stdout.buffer.write(pickle.dumps(same_bits(pickle.load(sys.stdin.buffer), jax.devices(), steps=3)))
"""
BERT = {"family": "bert", "activation": "gelu", "layer_order": "post"}


@pytest.mark.parametrize(
    ("parts", "mesh", "others"),
    [
        pytest.param(4, (2, 1, 2), DECODER | {"zero": 3, "num_layers": 1}, marks=pytest.mark.slow),
        full(4, (2, 2, 2), DECODER | {"zero": 3, "weight_gradients": "deferred", "dropout": 0.1}),
        full(1, (8, 1, 1), DECODER | {"dropout": 0.1}),
        full(1, (2, 2, 1), DECODER | ALL | {"precision": "bf16"}),
        full(4, (1, 1, 4), DECODER | {"remat": "layer", "dropout": 0.1}),
        full(4, (2, 1, 4), DECODER | LLAMA | {"rope_scaling": "none", "rope_factor": 1.0, "num_kv_heads": 1}),
        full(4, (1, 2, 2), DECODER | QWEN3 | {"reset_attention": True}),
        full(4, (2, 2, 2), DECODER | OLMO2 | ALL),
        full(4, (1, 1, 4), DECODER | GEMMA | {"precision": "bf16", "freeze": ("embedding", "layers.0")}),
        full(2, (2, 2, 2), DECODER | {"attention_sinks": True, "attention_gate": "sigmoid", "precision": "fp16"}),
        full(2, (2, 2, 2), BERT),
    ],
)
def test_every_mesh_has_the_bits_of_one_device(parts: int, mesh: tuple[int, ...], others: dict[str, Any]):
    config = dataclasses.replace(tiny_config(mesh, **others), bitwise=parts)
    validate(config, config.mesh.num_devices)
    # In a process with the compiler's own flags: those of tests have other emitters.
    environment = os.environ | {"XLA_FLAGS": ""}
    child = [sys.executable, "-c", _CHILD]
    run = subprocess.run(child, input=pickle.dumps(config), env=environment, stdout=subprocess.PIPE, check=True)
    found = pickle.loads(run.stdout)
    assert found.passed, found


@pytest.mark.full
def test_scores_and_logits_have_the_same_bits():
    config, found = dataclasses.replace(tiny_config((1, 1, 1), **DECODER), bitwise=4), []
    for mesh in ((1, 1, 1), (2, 1, 4)):
        here = dataclasses.replace(tiny_config(mesh, **DECODER), bitwise=4)
        program = Program.on(here, jax.devices()[: here.mesh.num_devices])
        params = program.layout.from_canonical(drawn_state(program)).params
        batch = placed_batch(program, 0)
        found.append(jax.tree.map(np.asarray, (scores(program)(params, batch), logits(program)(params, batch))))
    assert config.bitwise and jax.tree.all(jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), *found))


def test_sums_of_integers_do_not_depend_on_their_order():
    terms, bits = np.random.default_rng(0).normal(0, 1, (64, 5)).astype(np.float32), digit_bits(64)
    terms[0, 0] = 2.0**-20
    digits = np.asarray(jax.vmap(lambda x: integers(x, 4, bits))(terms))
    forward, shuffled = (digits[order].sum(0) for order in (np.arange(64), np.random.default_rng(1).permutation(64)))
    assert (forward == shuffled).all() and digits.dtype == np.int32
    np.testing.assert_allclose(floats(jnp.asarray(forward), 4, bits), terms.astype(float).sum(0), rtol=1e-6)


def test_what_integers_cannot_hold_is_counted():
    numbers = jnp.array([1.0, -17.0, jnp.nan, jnp.inf, 16.0])
    assert integer_sums.not_summed(numbers, 4).tolist() == [2, 2]
    norms = jnp.zeros(4).at[0].set(3.0)
    raised = integer_sums.raised(norms, jnp.int32(1))
    before, after = (int(integer_sums.bound_exponent(each, jnp.float32(1), 1)) for each in (norms, raised))
    assert after >= before + 6
    # A loss scale of 2^16 makes gradients as much larger, 256 rows make those of one smaller by their root.
    assert integer_sums.bound_exponent(norms, jnp.float32(2.0**16), 256) == 2 + 6 + 16 - 4


@pytest.mark.parametrize("large", [1e-20, 1.0, 1e15])
def test_the_norm_is_that_of_all_numbers(large: float):
    one = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    arrays = [np.random.default_rng(n).normal(0, large, 2**21 + n).astype(np.float32) for n in range(2)]
    of = jax.jit(jax.shard_map(lambda *x: integer_sums.norm(x), mesh=one, in_specs=jax.P(), out_specs=jax.P()))
    expected = np.sqrt(sum((x.astype(float) ** 2).sum() for x in arrays))
    np.testing.assert_allclose(of(*arrays), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("parts", "change", "expected"),
    [
        (4, {"mesh": (1, 1, 8)}, "--mesh.tensor 8 does not divide --bitwise 4; valid: 1, 2, 4"),
        (
            2,
            {"sequence_parallel": True},
            "--sequence-parallel with --bitwise 2; valid: --no-sequence-parallel, or --bitwise 0",
        ),
        (1, {"ema": 0.5}, "--train.ema 0.5 with --bitwise 1; valid: --train.ema 0, or --bitwise 0"),
        (
            1,
            {"optimizer": {"name": "muon"}},
            "--optimizer.name muon with --bitwise 1; valid: --optimizer.name adamw, or --bitwise 0",
        ),
        (16, {}, "--bitwise 16 does not divide --model.num-heads 8; valid: 8 or less"),
        (1, {"global_batch": 2**17}, "--train.global-batch 131072 with --bitwise 1; valid: at most 65,536 sequences"),
    ],
)
def test_what_is_not_tested_is_refused(parts: int, change: dict[str, Any], expected: str):
    config = dataclasses.replace(tiny_config(**{"mesh": (1, 1, 1)} | change), bitwise=parts)
    assert user_error(validate, config, config.mesh.num_devices) == expected

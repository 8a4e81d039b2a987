"""Which forms a train step takes on GPUs, and that it has them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_config

from megajax.core.backend import CPU, GPU
from megajax.core.models.lora_config import LoraConfig
from megajax.core.models.mlp import activated
from megajax.core.parallel.products import spread
from megajax.core.program.program import Program
from megajax.core.program.train_step import train_step

UNROLLED = {"scan_layers": "auto"}


def test_an_iteration_of_the_loop_computes_two_microbatches() -> None:
    config = tiny_config(num_layers=1, paired_microbatches=True, global_batch=3)
    program = Program.abstract(config, CPU)
    step = train_step(program).trace(program.layout.shapes, program.batch_types).jaxpr
    (region,) = step.jaxpr.eqns
    loops = [eqn.params for eqn in region.params["jaxpr"].eqns if eqn.primitive.name == "scan"]
    assert [(loop["length"], loop["unroll"]) for loop in loops] == [(3, 2)]
    assert not program.options and set(Program.abstract(config, GPU).options.values()) == {0}


def test_norms_by_cudnn_with_unrolled_layers_and_unless_the_user_says_otherwise(monkeypatch):
    forms = UNROLLED, {"scan_layers": "true"}, UNROLLED | {"remat": "stage"}
    unrolled, scanned, recomputed = (Program.abstract(tiny_config(**each), GPU) for each in forms)
    (name,) = unrolled.options.keys() - scanned.options.keys()
    assert unrolled.options[name] is True and scanned.options == recomputed.options
    monkeypatch.setenv("XLA_FLAGS", f"--{name}=false")
    assert unrolled.options == scanned.options


def test_gelu_by_a_sigmoid_is_that_by_tanh():
    """Values and derivatives: in fp64 within the rounding of 1 + tanh, in bf16 within its own."""
    model = tiny_config().model
    forms = [str(jax.make_jaxpr(lambda x, own=own: activated([x], model, own))(jnp.ones(2))) for own in (GPU, CPU)]
    assert ["logistic" in form for form in forms] == [True, False]
    with jax.enable_x64(True):
        for dtype, rounding in (jnp.float64, 1e-12), (jnp.bfloat16, 2**-7):
            x = jnp.linspace(-9, 9, 1001, dtype=dtype)
            sigmoid, tanh = (jax.vjp(lambda x, own=own: activated([x], model, own), x) for own in (GPU, CPU))
            for found, expected in (sigmoid[0], tanh[0]), (sigmoid[1](x)[0], tanh[1](x)[0]):
                assert found.dtype == dtype
                np.testing.assert_allclose(*(np.asarray(y, np.float64) for y in (found, expected)), rounding, rounding)
            (one_row,) = activated([x[None]], model, GPU, in_product=True)
            joined, _ = activated([jnp.stack([x, x])], model, GPU, in_product=True)
            same = [jnp.array_equal(each, sigmoid[0]) for each in (one_row, joined)]
            assert same == [True, dtype != jnp.bfloat16]
            # Here `joined` is rounded after every operation.
            np.testing.assert_allclose(*(np.asarray(y, np.float64) for y in (joined, tanh[0])), rounding, 2 * rounding)


@pytest.mark.parametrize("others", [{}, {"precision": "fp8"}, {"bias": "none"}, {"lora": LoraConfig(rank=2)}])
def test_gelu_is_in_the_form_that_xla_joins_to_a_product_only_after_a_plain_one(others):
    """Anywhere else that form, with tanh, would be rounded to bf16 after every operation."""
    program = Program.abstract(tiny_config(**{"precision": "bf16", "num_layers": 1} | others), GPU)
    step = str(train_step(program).trace(program.layout.shapes, program.batch_types).jaxpr)
    assert ("tanh" in step) == (not others)
    assert (":u16[" in step) == (others != {"bias": "none"})  # gradients of biases are sums of bits


@pytest.mark.parametrize(("others", "matrices"), [({}, 6), ({"dropout": 0.1}, 2), ({"sequence_parallel": True}, 0)])
def test_residuals_are_added_as_matrices_where_nothing_is_between_them_and_the_product(others, matrices):
    """And biases of LayerNorms; those of both products always, unless tokens are scattered."""
    config = tiny_config((1, 1, 2), **{"dropout": 0.0, "bias": "all", "num_layers": 1, "microbatch": 2} | others)
    program = Program.abstract(config, CPU)
    step = str(train_step(program).trace(program.layout.shapes, program.batch_types).jaxpr)
    rows, columns = 2 * config.model.sequence_length, config.model.hidden_size
    found = len(re.findall(rf":f32\[{rows},{columns}\](?:\{{[^}}]*\}})? = add ", step))
    assert found == matrices


@pytest.mark.parametrize(("backend", "scaled"), [(GPU, True), (GPU, False), (CPU, True)])
def test_only_products_in_8_bits_on_gpus_are_scaled_again_in_the_backward_pass(backend, scaled):
    model = tiny_config(activation="swiglu", bias="none").model
    traced = jax.make_jaxpr(lambda x: activated([x, x], model, backend, scaled=scaled))(jnp.ones(2))
    assert ("prevent_cse=False" in str(traced)) == (backend is GPU and scaled)


def test_gradients_of_biases_by_bits_are_those_by_conversion():
    """Of all bf16: each column has the 128 numbers of one sign and exponent, the last of infinities and NaN."""
    bits_NM = jnp.arange(2**16, dtype=jnp.uint16).reshape(512, 128).T
    grads_NM, bias_M = jax.lax.bitcast_convert_type(bits_NM, jnp.bfloat16), jnp.zeros(512, jnp.bfloat16)
    forms = (jax.vjp(lambda bias, own=own: spread(bias, grads_NM, by_bits=own), bias_M)[1] for own in (True, False))
    by_bits, converted = (np.asarray(form(grads_NM)[0], np.float32) for form in forms)
    np.testing.assert_array_equal(by_bits, converted)
    assert np.isnan(converted[-1]) and np.ptp(converted[1:250]) > 1e37

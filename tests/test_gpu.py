"""On a GPU: `JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu`. The numbers are the CPU's, in every precision."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tiny import tiny_config

from megajax.core.backend import BLOCKS, CPU, GPU
from megajax.core.mesh import make_mesh
from megajax.core.models.attend import IMPLEMENTATIONS, attend
from megajax.core.models.attention_mask import CAUSAL, AttentionMask
from megajax.core.models.attention_setting import Setting
from megajax.core.models.mlp import activated
from megajax.core.parallel.random import Dropout
from megajax.core.program.program import Program
from megajax.runs.forms import backend_without_wrong_forms
from megajax.start.fused_forms import experts_comparison
from megajax.start.selftest import selftest
from megajax.verify import compare, trace

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpu() -> jax.Device:
    try:
        return jax.devices("gpu")[0]
    except RuntimeError as error:
        pytest.skip(f"no GPU that JAX can use (JAX_PLATFORMS=cuda,cpu?): {error}")


@pytest.mark.parametrize(("dropout", "remat"), [(0.0, "none"), (0.1, "selective")])
@pytest.mark.parametrize("scan_layers", ["true", "false"])
def test_fp32_is_that_of_the_cpu(gpu, dropout, remat, scan_layers):
    """Losses and gradients of three steps, with the same dropout: within ten times the tolerance between meshes, since
    sums are taken in another order by other libraries."""
    config = tiny_config(dropout=dropout, remat=remat, scan_layers=scan_layers, microbatch=2)
    with jax.default_matmul_precision("float32"):
        traces = [trace(config, 3, [device]) for device in (jax.devices("cpu")[0], gpu)]
    found = compare(*traces)
    assert found.within(10), found


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_near_fp32(gpu, precision):
    """A training step in half precision with cuDNN's attention, beside the CPU's in fp32: the loss within 1%."""
    size = {"hidden_size": 64, "num_heads": 4, "sequence_length": 128, "dropout": 0.0}
    losses = {
        name: trace(tiny_config(precision=name, **size), 2, [device]).losses
        for name, device in (("fp32", jax.devices("cpu")[0]), (precision, gpu))
    }
    assert losses[precision] == pytest.approx(losses["fp32"], rel=0.01)


EXPERTS = {"num_experts": 8, "experts_per_token": 2, "expert_size": 384, "hidden_size": 256, "num_heads": 4}


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_step_with_experts_by_kernels_is_near_fp32(gpu, precision):
    """Beside the CPU's, whose experts run in a loop: the loss within 2%."""
    options = EXPERTS | {"sequence_length": 128, "dropout": 0.0}
    losses = {
        name: trace(tiny_config(precision=name, **options), 2, [device]).losses
        for name, device in (("fp32", jax.devices("cpu")[0]), (precision, gpu))
    }
    assert losses[precision] == pytest.approx(losses["fp32"], rel=0.02)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_kernels_of_experts_are_right(gpu, precision):
    """Results and gradients, one expert without a token: within 2% of a loop in fp32, or three times its rounding."""
    config = tiny_config(precision=precision, microbatch=2, sequence_length=512, **EXPERTS)
    compared = experts_comparison(config, Program.on(config, [gpu]).backend)
    assert [compared.problem(form) for form in compared.forms] == [""]


def test_small_integers_are_exact(gpu):
    """What `--train.selftest` computes, in every precision."""
    for precision in ("fp32", "bf16", "fp16", "fp8"):
        assert selftest(Program.on(tiny_config(precision=precision), [gpu])) == ""


def test_gelu_in_a_product_is_that_of_fp32(gpu):
    """In bf16, of inputs whose products are exact: rounded after every operation, GeLU of -3 would be 0."""
    x_NK, bias_M = jnp.linspace(-6, 6, 2**14, dtype=jnp.bfloat16)[:, None], jnp.zeros(256, jnp.bfloat16)
    model, weight_KM = tiny_config().model, jnp.ones((1, 256), jnp.bfloat16)
    factors = jnp.pad(x_NK, ((0, 0), (0, 63))), jnp.pad(weight_KM, ((0, 63), (0, 0))), bias_M
    joined = jax.jit(
        lambda x, w, b: activated([x @ w + b], model, GPU, in_product=True), compiler_options=dict(GPU.always)
    )
    found = np.asarray(joined(*jax.device_put(factors, gpu)))
    expected = np.asarray(activated([x_NK.astype(jnp.float32)], model, CPU))
    np.testing.assert_allclose(found.astype(np.float32), np.broadcast_to(expected, found.shape), rtol=2**-7, atol=2e-3)


SEEN = {
    "causal": lambda length: CAUSAL,
    "padded": lambda length: AttentionMask().padded(jnp.asarray([length // 3, length], jnp.int32)),
    "window": lambda length: AttentionMask(causal=True, window=33),
    "documents": lambda length: CAUSAL.in_documents(jnp.tile(jnp.arange(length, dtype=jnp.int32) % 50, (2, 1))),
}


@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize(
    ("heads", "head_size", "length", "value_size"),
    [(4, 64, 256, 64), (2, 96, 200, 96), (2, 128, 1024, 128), (2, 192, 512, 128)],
)
@pytest.mark.parametrize("name", ["cudnn", "kernel"])
def test_fused_attention_is_that_of_blocks(gpu, name, heads, head_size, length, value_size, seen, rate):
    """Result and gradients in bf16, within 2% of the largest value; heads of 64 have sinks in our kernel."""
    sizes = (head_size, head_size, value_size, value_size)
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(0, 1, (2, length, heads, size)), jnp.bfloat16) for size in sizes]
    sink_H = jnp.asarray(rng.normal(1, 1, heads), jnp.bfloat16) if name == "kernel" and head_size == 64 else None
    dropout = Dropout.at(rate, 0, jnp.int32(0), jnp.arange(2, dtype=jnp.int32))
    if not IMPLEMENTATIONS[name].can(arrays[0], Setting(SEEN[seen](length), dropout, GPU)):
        pytest.skip(f"{name} has no such attention")

    def run(*attention_by):
        spec = P(None, None, "tensor")

        @jax.jit
        @partial(jax.shard_map, mesh=make_mesh([gpu]), in_specs=(spec, P("tensor")), out_specs=(spec, P("tensor")))
        def both(arrays, sink_H):
            def attention(q_BTHK, k_BSHK, v_BSHV, sink_H):
                setting = Setting(SEEN[seen](length), dropout, backend, sink_H=sink_H)
                return attend(q_BTHK, k_BSHK, v_BSHV, setting)

            *qkv, grad_BTHV = arrays
            backend = dataclasses.replace(GPU, attention=attention_by)
            y_BTHV, pullback = jax.vjp(attention, *qkv, sink_H)
            *grads, dsink_H = pullback(grad_BTHV)
            return [y_BTHV, *grads], dsink_H

        return [np.asarray(array, np.float32) for array in jax.tree.leaves(both(arrays, sink_H))]

    for fused, own in zip(run(name), run(*BLOCKS), strict=True):
        np.testing.assert_allclose(fused, own, rtol=0, atol=0.02 * np.abs(own).max())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_fused_forms_are_right_and_compared_once(gpu, dropout, tmp_path, capsys):
    """Those that a training would take."""
    size = {"hidden_size": 1536, "num_heads": 16, "sequence_length": 1024, "dropout": dropout, "num_layers": 1}
    program = Program.on(tiny_config(precision="bf16", **size), [gpu])
    assert backend_without_wrong_forms(program, tmp_path) == program.backend
    assert capsys.readouterr().out.count(" is right, ") == len(program.backend.attention) - 1
    assert backend_without_wrong_forms(program, tmp_path) == program.backend
    assert capsys.readouterr().out == ""

"""Which attention and norms a step takes, and which products are of float8 numbers, seen in its program compiled for
an H200 without one."""

import re

import jax
import pytest
from tiny import LLAMA, tiny_config

from megajax.core.private import has_gpu_kernels
from megajax.plan import h200
from megajax.plan.compiled import for_h200s

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not h200.compiles_for("h200"), reason="needs JAX's CUDA packages (the extra `cuda13`)"),
]
SHAPE = LLAMA | {"hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "head_size": 64, "sequence_length": 256}
CUDNN, KERNEL = "__cudnn$fmhaSoftmaxBackward", "mosaic_gpu"
STEPS = {
    "a window": (CUDNN, {"precision": "bf16", "dropout": 0.0, "sliding_window": 100}),
    "a window and documents": (
        KERNEL,
        {"precision": "bf16", "dropout": 0.0, "sliding_window": 100, "reset_attention": True},
    ),
    "dropout, fp16": (KERNEL, {"precision": "fp16", "dropout": 0.1, "attention": "kernel"}),
    "documents": (KERNEL, {"precision": "bf16", "dropout": 0.0, "reset_attention": True, "attention": "kernel"}),
}


@pytest.mark.parametrize("name", STEPS)
def test_attention_of_a_compiled_step(name: str) -> None:
    called, options = STEPS[name]
    if called == KERNEL and not has_gpu_kernels():
        pytest.skip("its JAX has no such kernels, which 0.11 has")
    program = for_h200s(tiny_config(**SHAPE | options)).as_text()
    assert [each for each in (CUDNN, KERNEL) if each in program] == ([called] if called else [])
    if called == CUDNN:
        assert '"sliding_window_length":100' in program.replace(" ", "")


@pytest.mark.parametrize("remat", ["none", "selective", "layer"])
def test_norms_of_a_compiled_step(remat: str) -> None:
    """By cuDNN where layers are unrolled. With a scan that recomputes, XLA would fail."""
    options = {"precision": "bf16", "dropout": 0.1, "remat": remat, "hidden_size": 128, "sequence_length": 128}
    unrolled, scanned = (for_h200s(tiny_config(scan_layers=each, **options)).as_text() for each in ("false", "true"))
    assert '"__cudnn$norm"' in unrolled and '"__cudnn$norm"' not in scanned


def test_float8_products_of_a_compiled_step(monkeypatch) -> None:
    """In the layers' loop 4 forward, since XLA merges small ones (query, key and value; gate and up), and 7 for input
    gradients. No operand is dequantized."""
    compiled = jax.stages.Lowered.compile
    without_triton = {"xla_gpu_enable_triton_gemm": False}  # its products would be kernels without a name
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda lowered: compiled(lowered, without_triton))
    config = tiny_config(mesh=(1, 1, 2), sequence_parallel=True, precision="fp8", dropout=0.0, num_layers=2, **SHAPE)
    program = for_h200s(config).as_text()
    products = [line for line in program.splitlines() if '"__cublas$lt$matmul$f8"' in line]
    backward = ["transpose(jvp" in line for line in products]
    assert (backward.count(False), backward.count(True)) == (4, 7)
    float8 = set(re.findall(r"%(\S+) = f8e4m3fn", program))
    widened = set(re.findall(r"= (?:bf16|f16|f32)\S* convert\(%([^)]+)\)", program))
    assert float8 and widened and not float8 & widened

"""TFLOP/s and MFU of a step, against counts by hand; peaks by the names that GPUs give themselves; memory."""

from types import SimpleNamespace

import jax
import pytest
from tiny import tiny_config, tiny_program

from megajax.backend import CPU
from megajax.plan.machines import MACHINES, peak_of_device
from megajax.plan.memory import memory
from megajax.program.memory import state_bytes
from megajax.training.describe import _step_memory
from megajax.training.figures import Speed, memory_figures, memory_in_use


@pytest.mark.parametrize(
    ("kind", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 80GB HBM3", "fp32", 67e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312e12),
        ("NVIDIA A100 80GB PCIe", "bf16", 312e12),
        ("A100-SXM4-40GB", "bf16", 312e12),  # drivers of before 2021
        ("NVIDIA B200", "bf16", 2250e12),
        ("Tesla V100-SXM2-32GB", "bf16", None),  # which has none
        ("Tesla V100-SXM2-32GB", "fp16", 125e12),
        ("Tesla V100-SXM3-32GB-H", "fp16", MACHINES["v100"].peak["fp16"]),  # the paper's
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),  # a part of one
        ("NVIDIA GeForce RTX 4090", "bf16", None),
        ("cpu", "bf16", None),
    ],
)
def test_peaks_by_device(kind: str, precision: str, peak: float | None) -> None:
    assert peak_of_device(kind, precision) == peak


def test_mfu_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's count, 72 B s L h² (1 + s / 6h + V / 12Lh), over eight H100s and the seconds of a step."""
    assert set(Speed(tiny_config((1, 1, 1))).figures(1, 1.0)) == {"tflops_per_device"}, "a device of unknown peak"
    config = tiny_config((2, 2, 2), precision="bf16")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")])
    model = config.model
    s, L, h, V = model.sequence_length, model.num_layers, model.hidden_size, model.padded_vocab_size
    rows, seconds = 6, 0.25
    flops = 72 * rows * s * L * h**2 * (1 + s / (6 * h) + V / (12 * L * h))
    found = Speed(config).figures(rows, seconds)
    assert found == pytest.approx(
        {"tflops_per_device": flops / 8 / seconds / 1e12, "mfu": flops / 8 / seconds / 989e12}, rel=1e-12
    )


def devices(*stats: dict[str, int] | None) -> list:
    return [SimpleNamespace(memory_stats=lambda each=each: each) for each in stats]


def test_memory_of_the_fullest_device() -> None:
    found = memory_figures(devices({"bytes_in_use": 3, "peak_bytes_in_use": 9}, {"bytes_in_use": 5}, None))
    assert found == {"memory_bytes": 5, "peak_memory_bytes": 9}
    assert memory_figures(devices(None)) == {}
    used = {"peak_bytes_in_use": 3 * 2**20, "bytes_limit": 2**30}
    more = {"peak_bytes_in_use": 5 * 2**20, "bytes_limit": 2**29}
    told = "memory: 5.0 MiB{} in use at most on a device of this process"
    assert memory_in_use(devices(used, None, more)) == told.format(" of 512.0")
    assert memory_in_use(devices({"peak_bytes_in_use": 5 * 2**20})) == told.format("")
    assert memory_in_use(devices(None)) is None


def test_the_plan_of_a_run() -> None:
    """All of what `state_bytes` has, and what the step needs beside it."""
    config = tiny_config((2, 2, 2), weight_gradients="deferred")
    program, plan = tiny_program(config), memory(config, CPU)
    told = _step_memory(program)
    assert plan.total > sum(state_bytes(program).values())
    assert told.startswith(f"memory: {plan.total / 2**20:,.1f} MiB a device planned")
    assert f"factors {plan.factors / 2**20:,.1f}" in told and plan.factors > 0

"""`--train.selftest` finds a device that computes wrongly, and a group that exchanges wrongly; and nothing else."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array
from tiny import tiny_config

from megajax.core.errors import RunError
from megajax.core.parallel.collectives import axis_index
from megajax.core.program.program import Program
from megajax.start import selftest


def on(data: int, tensor: int, fault: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A fault of the devices at a place of the mesh."""

    def wrong(x: Array) -> Array:
        here = (axis_index("data") == data) & (axis_index("tensor") == tensor)
        return jnp.where(here, fault(x), x)

    return wrong


def last_bit(x: Array) -> Array:
    """One number of many is off by one."""
    return x.at[..., 7].add(1)


def test_a_wrong_device_and_a_wrong_exchange(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(selftest, "_SIZE", 16)
    monkeypatch.setattr(selftest, "_ROUNDS", 1)
    program = Program.on(tiny_config((2, 1, 2), precision="bf16"), jax.devices()[:4])
    selftest.selftest(program)
    said = "self-test: products, sums and exchanges over data, tensor are exact on 4 devices ("
    assert capsys.readouterr().out.startswith(said)

    def faulty(test: Callable[..., Any], place: tuple[int, int]) -> Callable[..., Any]:
        return lambda *args: (on(*place, last_bit)((pair := test(*args))[0]), pair[1])

    monkeypatch.setattr(selftest, "_product", faulty(selftest._product, (0, 1)))
    monkeypatch.setattr(selftest, "_sums", faulty(selftest._sums, (1, 1)))
    only_sums = {"all-reduce": faulty(selftest._EXCHANGES["all-reduce"], (1, 0))}
    monkeypatch.setattr(selftest, "_EXCHANGES", only_sums)
    with pytest.raises(RunError) as caught:
        selftest.selftest(program)
    found = str(caught.value).partition("so no step is trained: ")[2].split("; ")
    devices = program.mesh.devices.ravel()
    tests = [
        ("products in float32", devices[1], 16),
        ("products in bfloat16", devices[1], 16),
        ("sums", devices[3], 1),
        ("all-reduce over data", devices[2], 1),
        ("all-reduce over tensor", devices[2], 1),
    ]
    for line, (name, device, count) in zip(found, tests, strict=True):
        assert line.startswith(f"{name}: device {device.id} (cpu) of process 0 on ") and line.endswith(
            f", {count} numbers"
        )

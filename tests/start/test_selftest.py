"""`--train.selftest` finds a device that computes wrongly, and a group that exchanges wrongly; and nothing else."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tiny import tiny_config

from megajax.core.parallel.collectives import axis_index
from megajax.core.program.program import Program
from megajax.start import selftest


def faulty(test: Callable[..., Any], data: int, tensor: int) -> Callable[..., Any]:
    """A test of which the devices at a place of the mesh compute one number of many too large by one."""

    def wrong(*args: Any) -> Any:
        found, right = test(*args)
        here = (axis_index("data") == data) & (axis_index("tensor") == tensor)
        return jnp.where(here, found.at[..., 7].add(1), found), right

    return wrong


def test_a_wrong_device_and_a_wrong_exchange(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(selftest, "_SIZE", 16)
    monkeypatch.setattr(selftest, "_ROUNDS", 1)
    program = Program.on(tiny_config((2, 1, 2), precision="bf16"), jax.devices()[:4])
    assert selftest.selftest(program) == ""
    said = "self-test: products, sums and exchanges over data, tensor are exact on 4 devices ("
    assert capsys.readouterr().out.startswith(said)
    monkeypatch.setattr(selftest, "_product", faulty(selftest._product, 0, 1))
    monkeypatch.setattr(selftest, "_sums", faulty(selftest._sums, 1, 1))
    reduce = faulty(selftest._EXCHANGES["all-reduce"], 1, 0)
    monkeypatch.setattr(selftest, "_EXCHANGES", {"all-reduce": reduce})
    found = selftest.selftest(program).split("; ")
    wrong = [("products in float32", 1, 16), ("products in bfloat16", 1, 16), ("sums", 3, 1)]
    wrong += [("all-reduce over data", 2, 1), ("all-reduce over tensor", 2, 1)]
    for line, (name, place, count) in zip(found, wrong, strict=True):
        device = program.mesh.devices.flat[place]
        assert line.startswith(f"{name}: device {device.id} (cpu) of process 0 on "), line
        assert line.endswith(f", {count} numbers"), line

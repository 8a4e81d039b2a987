"""What a run says of its devices' memory."""

from types import SimpleNamespace

from tiny import tiny_config, tiny_program

from megajax.backend import CPU
from megajax.plan.memory import memory
from megajax.program.memory import state_bytes
from megajax.training.describe import _step_memory, memory_in_use


def test_the_plan_of_a_run() -> None:
    """All of what `state_bytes` has, and what the step needs beside it."""
    config = tiny_config((2, 2, 2), weight_gradients="deferred")
    program, plan = tiny_program(config), memory(config, CPU)
    told = _step_memory(program)
    assert plan.total > sum(state_bytes(program).values())
    assert told.startswith(f"memory: {plan.total / 2**20:,.1f} MiB a device planned")
    assert f"factors {plan.factors / 2**20:,.1f}" in told and plan.factors > 0


def test_what_a_device_says() -> None:
    def devices(*stats: dict[str, int] | None) -> list:
        return [SimpleNamespace(memory_stats=lambda each=each: each) for each in stats]

    used = {"peak_bytes_in_use": 3 * 2**20, "bytes_limit": 2**30}
    more = {"peak_bytes_in_use": 5 * 2**20, "bytes_limit": 2**29}
    told = memory_in_use(devices(used, None, more))
    assert told == "memory: 5.0 MiB of 512.0 in use at most on a device of this process"
    assert memory_in_use(devices(None)) is None
    assert memory_in_use(devices({"peak_bytes_in_use": 2**20})) == (
        "memory: 1.0 MiB in use at most on a device of this process"
    )

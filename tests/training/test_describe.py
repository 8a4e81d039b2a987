"""What a run says of the memory that it plans."""

from tiny import tiny_config, tiny_program

from megajax.backend import CPU
from megajax.plan.memory import memory
from megajax.program.memory import state_bytes
from megajax.training.describe import _step_memory


def test_the_plan_of_a_run() -> None:
    """All of what `state_bytes` has, and what the step needs beside it."""
    config = tiny_config((2, 2, 2), weight_gradients="deferred")
    program, plan = tiny_program(config), memory(config, CPU)
    told = _step_memory(program)
    assert plan.total > sum(state_bytes(program).values())
    assert told.startswith(f"memory: {plan.total / 2**20:,.1f} MiB a device planned")
    assert f"factors {plan.factors / 2**20:,.1f}" in told and plan.factors > 0

"""What a plan says is sent: by whom, how often, and how many bytes. Rows of `test_field.py` compare the plan with the
step."""

import dataclasses

import pytest
from tiny import full, tiny_config, tiny_program

from megajax.core.backend import CPU
from megajax.core.pipeline.schedule import SCHEDULES, ScheduleKind, Ticks
from megajax.core.program.communication import collectives_of
from megajax.core.program.train_step import train_step
from megajax.plan.communication import communication, sent_by_axes, total_sent, totals
from megajax.plan.sizes import num_ticks


def test_a_new_schedule_has_its_own_ticks(monkeypatch):

    def slow(num_stages: int, num_microbatches: int, num_chunks: int) -> Ticks:
        ticks = SCHEDULES["gpipe"].ticks(num_stages, num_microbatches, num_chunks)
        return Ticks(ticks.forward, ticks.backward + 3)

    monkeypatch.setitem(SCHEDULES, "slow", ScheduleKind(slow))
    assert num_ticks("slow", 2, 4, 1) == num_ticks("gpipe", 2, 4, 1) + 3 == 13


def test_what_is_really_sent():
    """A stage sends for its own layers, m times each, forward and backward; p2p transfers are in every tick."""
    config = tiny_config((1, 2, 2), num_layers=5, microbatch=2)  # 4 microbatches, 6 ticks, 3 and 2 layers
    found = communication(config)
    layers = [each for each in found if each.part.startswith("layers")]
    assert {each.sent for each in layers} == {4 * 3} and {each.count for each in layers} == {6 * 3}
    size = 2 * 16 * 24 * 4  # an activation
    assert [(each.kind, each.axes, each.num_bytes) for each in layers] == [("all-reduce", ("tensor",), size)] * 4
    by_axes = sent_by_axes(config)
    assert by_axes["pipe", "permute"] == (12, 12 * size) and all("data" not in axes for axes, _ in by_axes)


@pytest.mark.parametrize(
    ("parts", "mesh", "others"),
    [
        full(1, (2, 2, 1), {"weight_gradients": "deferred"}),
        (4, (2, 1, 2), {"sequence_parallel": True, "zero": 3}),
        full(4, (1, 2, 4), {"precision": "bf16", "weight_gradients": "deferred", "remat": "layer"}),
        full(4, (2, 2, 1), {}),
    ],
)
def test_steps_with_the_same_bits_send_what_is_planned(parts, mesh, others):
    config = dataclasses.replace(tiny_config(mesh, **{"vocab_multiple": 8} | others), bitwise=parts)
    program = tiny_program(config)
    found = collectives_of(train_step(program).trace(program.layout.shapes, program.batch_types).jaxpr)
    assert totals(found) == totals(communication(config, backend=CPU))


def test_bytes_are_those_that_a_device_sends():
    """Of 4 in a ring: to gather 3 parts, to sum twice 3/4 of the operand."""
    config = tiny_config((1, 1, 4), num_heads=4, sequence_parallel=True)
    by_axes = sent_by_axes(config)
    count, sent = by_axes["tensor", "all-gather"]
    assert sent == count * 3 * (config.train.microbatch * 4 * 24 * 4)  # a part: 4 of 16 tokens
    sums = [each for each in communication(config) if each.kind == "all-reduce" and "tensor" in each.axes]
    assert by_axes["tensor", "all-reduce"][1] == sum(each.sent * each.num_bytes * 3 // 2 for each in sums)
    assert sum(size for _, size in by_axes.values()) == total_sent(config, communication(config))

"""What a step communicates, planned by traced parts, against its jaxpr: every kind, axes, shape, bytes and count, where
rows of `test_field.py` do not compare it."""

from dataclasses import replace

import pytest
from counting import collectives_of_a_step
from parity_grid import OF_GRIDS, on_stages
from tiny import tiny_config

from megajax.core.pipeline.schedule import SCHEDULES, ScheduleKind, Ticks
from megajax.plan.communication import communication, sent_by_axes, total_sent, totals
from megajax.plan.sizes import num_ticks
from megajax.settings.config import Config


def check(config: Config) -> None:
    found, expected = totals(collectives_of_a_step(config)), totals(communication(config))
    wrong = {key: (found[key], expected[key]) for key in {*found, *expected} if found[key] != expected[key]}
    assert found == expected, wrong


MUON = {"name": "muon"}
SOME = ["2x2x2 interleaved-2 split selective zero=3", *OF_GRIDS[:16]]


@pytest.mark.full
@pytest.mark.parametrize("words", SOME)
def test_muon_equals_the_jaxpr(words):
    """With its steps in half precision, and not."""
    for precision in ("compute", "fp32"):
        check(
            tiny_config(**on_stages(words) | {"precision": "bf16", "optimizer": MUON | {"muon_precision": precision}})
        )


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("words", SOME)
def test_half_precision_equals_the_jaxpr(words, precision):
    """Where gradients are summed in it, too."""
    config = tiny_config(**on_stages(words) | {"precision": precision})
    check(replace(config, optimizer=replace(config.optimizer, gradient_dtype=precision)))


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


def test_bytes_are_those_that_a_device_sends():
    """Of 4 in a ring: to gather 3 parts, to sum twice 3/4 of the operand."""
    config = tiny_config((1, 1, 4), num_heads=4, sequence_parallel=True)
    by_axes = sent_by_axes(config)
    count, sent = by_axes["tensor", "all-gather"]
    assert sent == count * 3 * (config.train.microbatch * 4 * 24 * 4)  # a part: 4 of 16 tokens
    sums = [each for each in communication(config) if each.kind == "all-reduce" and "tensor" in each.axes]
    assert by_axes["tensor", "all-reduce"][1] == sum(each.sent * each.num_bytes * 3 // 2 for each in sums)
    assert sum(size for _, size in by_axes.values()) == total_sent(config, communication(config))

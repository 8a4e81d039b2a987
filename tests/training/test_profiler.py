"""Where the time of traced steps went: names of operations, times inside one another, the table; which steps."""

from types import SimpleNamespace

import pytest

from megajax.config import profiled_steps
from megajax.training.profiler import Times, _events, _own_seconds, operations, place_of, table

PROGRAM = """\
HloModule jit_step, is_scheduled=true

%fused (p0: f32[4]) -> f32[4] {
  %p0 = f32[4]{0} parameter(0)
  %m = f32[4]{0} multiply(%p0, %p0), metadata={op_name="jit(s)/shard_map/jvp(layer)/norm/mul"}
  ROOT %a = f32[4]{0} add(%m, %p0)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %dot.1 = f32[4]{0} dot(%x, %x), metadata={op_name="jit(s)/jvp(layer)/mlp/dot_general" source_file="a.py"}
  %dot.2 = (f32[4]{0}, f32[4]) custom-call(%x), metadata={op_name="jit(s)/transpose(jvp(layer))/attention/attend/dot"}
  %again = f32[4]{0} fusion(%x), kind=kLoop, calls=%fused
  %rest = f32[4]{0} add(%x, %x), metadata={op_name="jit(s)/transpose(jvp(layer))/rematted_computation/add"}
  %all-reduce.3 = f32[4]{0} all-reduce(%again), metadata={op_name="jit(s)/transpose(jvp(layer))/mlp/psum"}
  %collective-permute-start.1 = (f32[4]{0}, f32[4]{0}) collective-permute-start(%x)
  %adam = f32[4]{0} multiply(%x, %x), metadata={op_name="jit(s)/optimizer/mul"}
  %bare = f32[4]{0} negate(%x)
  ROOT %copy = f32[4]{0} copy(%adam)
}
"""


def test_where_operations_come_from() -> None:
    known = operations(PROGRAM)
    assert {name: place_of(known[name]) for name in ("dot.1", "dot.2", "again", "rest", "all-reduce.3", "adam")} == {
        "dot.1": ("MLP", "forward"),
        "dot.2": ("attention, scores", "backward"),
        "again": ("norms", "forward"),
        "rest": ("rest of the layers", "recomputed"),
        "all-reduce.3": ("communication: all-reduce", ""),
        "adam": ("optimizer", ""),
    }
    assert place_of(known["collective-permute-start.1"]) == ("communication: hand-overs between stages", "")
    assert place_of(known["copy"]) == ("optimizer", ""), "as its operand"
    assert place_of(known["bare"]) == ("rest of the step", "")


def test_times_inside_one_another() -> None:
    """A loop has the time that nothing inside it takes."""

    def event(begin: float, length: float, name: str, **stats: object) -> SimpleNamespace:
        return SimpleNamespace(name=name, start_ns=begin, duration_ns=length, stats=stats.items())

    known = operations(PROGRAM)
    events = [
        event(0, 100e9, "dot.1"),
        event(10e9, 20e9, "kernel", hlo_op="adam"),
        event(40e9, 30e9, "%rest"),
        event(45e9, 5e9, "copy"),
        event(120e9, 1e9, "dot.1"),
        event(0, 500e9, "something else"),
    ]
    found = _own_seconds(_events(events, known))
    assert found == [("dot.1", 50), ("adam", 20), ("rest", 25), ("copy", 5), ("dot.1", 1)]


def test_the_table() -> None:
    found = Times({("MLP", "forward"): 0.2, ("MLP", "backward"): 0.4, ("optimizer", ""): 0.2}, devices=2, span=0.5)
    head, mlp, optimizer, everything, told = table(found, steps=2)
    assert head.split()[-5:] == ["forward", "recomputed", "backward", "other", "share"]
    assert mlp.split() == ["MLP", "50.00", "100.00", "75.0%"] and optimizer.split() == ["optimizer", "50.00", "25.0%"]
    assert everything.split() == ["all", "50.00", "0.00", "100.00", "50.00", "100.0%"]
    assert told == "operations take 200.00 ms of a step's 250.00 ms on a device"


@pytest.mark.parametrize(
    ("text", "finished", "steps", "expected"),
    [
        ("10:13", 0, 100, (10, 13)),
        ("3", 0, 100, (3, 5)),  # not the first ones, which warm up
        ("3", 50, 100, (53, 55)),
        ("3", 0, 4, (2, 4)),
        ("3", 0, 2, (1, 2)),
    ],
)
def test_which_steps(text: str, finished: int, steps: int, expected: tuple[int, int]) -> None:
    assert profiled_steps(text, finished, steps) == expected

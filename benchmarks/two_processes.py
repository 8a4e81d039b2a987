"""What a second process costs: tensor 2 and data 2 over gloo, each process pinned to one core, ours beside PyTorch's;
with `--alone` ours only, context 2 in both ways as well.

    python benchmarks/two_processes.py [PRESET] [flags] [--axis tensor|data] [--alone] [--rounds N] [--steps N] [--json]

PRESET is benchmarks/gpt-4x512.toml unless given. The same step runs on one core and on two, both sides in turn;
`slowdown` is twice the time on two cores by the time on one: 1 would be two cores doing twice as much. Like PyTorch's
DistributedDataParallel ours is measured with whole weights and optimizer state on every process (`--optimizer.zero 0`),
over data also with them split (ZeRO-1). What a pipe of 2 costs beside its table: benchmarks/pipeline.py.
"""

import json
import os
import statistics
import sys
from contextlib import ExitStack

import paired
from paired import BENCHMARKS, Side, ratios

from megajax.core.errors import UserError
from megajax.host.ending import run
from megajax.settings.flags import parse

OURS = [str(BENCHMARKS / "throughput.py"), "--serve", "--optimizer.zero"]
TORCH = [str(BENCHMARKS / "pytorch" / "baseline.py"), "--serve", "--threads", "1"]


def started(stack: ExitStack, name: str, script: list[str], flags: list[str], axis: str) -> Side:
    """A side whose processes have one core each: two where an axis is given."""
    print(name, file=sys.stderr)
    command = [sys.executable, script[0], *flags, *script[1:]]
    commands = [command]
    if axis:
        command += [f"--mesh.{axis}", "2", "--distributed.coordinator", paired.free_address()]
        if axis == "data":
            command += ["--train.microbatch", str(max(1, parse(flags, "").train.microbatch // 2))]
        command += ["--distributed.num-processes", "2", "--distributed.process-id"]
        commands = [[*command, str(number)] for number in range(2)]
    cores = [*map(str, sorted(os.sched_getaffinity(0)))]
    environment = {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"} | paired.KEEP_FREED_MEMORY
    return stack.enter_context(Side(name, commands, cores=cores, environment=environment))


def alone(flags: list[str], rounds: int, steps: int) -> None:
    """Ours on one core and over every axis, all in turn."""
    runs: dict[str, tuple[str, list[str]]] = {"one core": ("", []), "data 2": ("data", []), "tensor 2": ("tensor", [])}
    runs |= {f"context 2, {way}": ("context", ["--model.context-attention", way]) for way in ("heads", "gather")}
    with ExitStack() as stack:
        sides = [started(stack, name, [*OURS, "0"], [*flags, *more], axis) for name, (axis, more) in runs.items()]
        wall, cpu = paired.in_turn(sides, rounds, steps)
    print("| side | s a step | beside data 2, rounds | CPU s of all processes |\n|---|---|---|---|")
    for name, seconds, used in zip(runs, wall, cpu, strict=True):
        beside = ratios(seconds, wall[1])
        each = " ".join(f"{ratio:.2f}" for ratio in beside)
        median = f"{statistics.median(seconds):.2f} | {statistics.median(beside):.2f} ({each})"
        print(f"| {name} | {median} | {statistics.median(used):.2f} |")


def measure(flags: list[str], axes: list[str], rounds: int, steps: int) -> dict:
    """Seconds a step of every side on one core and two, and the slowdowns."""
    results: dict[str, dict] = {}
    for axis in axes:
        scripts = {"megajax": [*OURS, "0"], "torch, eager": TORCH, "torch, compiled": [*TORCH, "--compile"]}
        if axis == "data":
            scripts["megajax, ZeRO-1"] = [*OURS, "1"]
        with ExitStack() as stack:
            sides = [
                started(stack, f"{name}, {over} 2" if over else f"{name}, one core", script, flags, over)
                for name, script in scripts.items()
                for over in ("", axis)
            ]
            seconds, _ = paired.in_turn(sides, rounds, steps)
        results[axis] = {
            name: {
                "one_core_seconds": statistics.median(one),
                "two_processes_seconds": statistics.median(two),
                "slowdown": 2 * statistics.median(ratios(two, one)),
            }
            for name, one, two in zip(scripts, seconds[::2], seconds[1::2], strict=True)
        }
    return results


def main() -> None:
    """Parse the command line, measure, print."""
    own, flags, _ = paired.command_line(
        __doc__, axis=(None, "tensor", "data"), alone=False, rounds=5, steps=1, json=False
    )
    if len(os.sched_getaffinity(0)) < 2:
        raise UserError("two_processes.py: this process may use one core only; valid: two")
    if own.alone:
        alone(flags, own.rounds, own.steps)
        return
    results = measure(flags, [own.axis] if own.axis else ["tensor", "data"], own.rounds, own.steps)
    print("| axis | side | s on one core | s on two | slowdown |\n|---|---|---|---|---|")
    for axis, sides in results.items():
        for name, found in sides.items():
            times = f"{found['one_core_seconds']:.3f} | {found['two_processes_seconds']:.3f}"
            print(f"| {axis} 2 | {name} | {times} | {found['slowdown']:.3f} |")
    if own.json:
        print(json.dumps(results))


if __name__ == "__main__":
    run(main)

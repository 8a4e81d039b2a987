"""What a second process costs: tensor 2 and data 2 over gloo, each process pinned to one core, ours beside PyTorch's;
with `--alone` ours only, context 2 in both ways as well.

    python benchmarks/two_processes.py [PRESET] [flags] [--axes tensor data] [--alone] [--rounds N] [--steps N] [--json]

PRESET is benchmarks/gpt-4x512.toml unless given. The same step runs on one core and on two, both sides in turn;
`slowdown` is twice the time on two cores by the time on one: 1 would be two cores doing twice as much. Like PyTorch's
DistributedDataParallel ours is measured with whole weights and optimizer state on every process (`--optimizer.zero 0`),
over data also with them split (ZeRO-1). What a pipe of 2 costs beside its table: benchmarks/pipeline_time.py.
"""

import argparse
import json
import os
import socket
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paired import KEEP_FREED_MEMORY, Side, in_turn, in_turn_with_cpu, parse_own

from megajax.core.errors import UserError
from megajax.host.ending import run
from megajax.settings.flags import parse

BENCHMARKS = Path(__file__).resolve().parent
OURS = [str(BENCHMARKS / "throughput.py"), "--serve", "--optimizer.zero"]
TORCH = [str(BENCHMARKS / "pytorch_baseline.py"), "--serve", "--threads", "1"]


def commands(script: list[str], flags: list[str], axis: str) -> list[list[str]]:
    """One command for each process: two where an axis is given."""
    if not axis:
        return [[sys.executable, script[0], *flags, *script[1:]]]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    mesh = [f"--mesh.{axis}", "2", "--distributed.coordinator", address, "--distributed.num-processes", "2"]
    if axis == "data":
        rows = parse(flags, "").train.microbatch
        mesh += ["--train.microbatch", str(max(1, rows // 2))]
    return [
        [sys.executable, script[0], *flags, *mesh, "--distributed.process-id", str(number), *script[1:]]
        for number in range(2)
    ]


def pinned(name: str, found: list[list[str]]) -> Side:
    """A side whose processes have one core each."""
    environment = {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"} | KEEP_FREED_MEMORY
    return Side(name, found, cores=[*map(str, sorted(os.sched_getaffinity(0)))], environment=environment)


def alone(flags: list[str], rounds: int, steps: int) -> None:
    """Ours on one core and over every axis, all in turn."""
    runs: dict[str, tuple[str, list[str]]] = {"one core": ("", []), "data 2": ("data", []), "tensor 2": ("tensor", [])}
    runs |= {f"context 2, {way}": ("context", ["--model.context-attention", way]) for way in ("heads", "gather")}
    sides: list[Side] = []
    try:
        for name, (axis, more) in runs.items():
            print(name, file=sys.stderr)
            sides.append(pinned(name, commands([*OURS, "0"], [*flags, *more], axis)))
        wall, cpu = in_turn_with_cpu(sides, rounds, steps)
    finally:
        for side in sides:
            side.close()
    print("| side | s a step | beside data 2, rounds | CPU s of all processes |\n|---|---|---|---|")
    for name, seconds, used in zip(runs, wall, cpu, strict=True):
        ratios = [ours / data for ours, data in zip(seconds, wall[1], strict=True)]
        each = " ".join(f"{ratio:.2f}" for ratio in ratios)
        median = f"{statistics.median(seconds):.2f} | {statistics.median(ratios):.2f} ({each})"
        print(f"| {name} | {median} | {statistics.median(used):.2f} |")


def measure(flags: list[str], axes: list[str], rounds: int, steps: int) -> dict:
    """Seconds a step of every side on one core and two, and the slowdowns."""
    results = {}
    for axis in axes:
        scripts = {"megajax": [*OURS, "0"], "torch, eager": TORCH, "torch, compiled": [*TORCH, "--compile"]}
        if axis == "data":
            scripts["megajax, ZeRO-1"] = [*OURS, "1"]
        sides: dict[str, Side] = {}
        try:
            for name, script in scripts.items():
                for over in ("", axis):
                    label = f"{name}, {over} 2" if over else f"{name}, one core"
                    print(label, file=sys.stderr)
                    sides[label] = pinned(label, commands(script, flags, over))
            seconds = dict(zip(sides, in_turn(list(sides.values()), rounds, steps), strict=True))
        finally:
            for side in sides.values():
                side.close()
        result = {}
        for name in scripts:
            one, two = seconds[f"{name}, one core"], seconds[f"{name}, {axis} 2"]
            result[name] = {
                "one_core_seconds": statistics.median(one),
                "two_processes_seconds": statistics.median(two),
                "slowdown": statistics.median(2 * b / a for a, b in zip(one, two, strict=True)),
            }
        results[axis] = result
    return results


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--axes", nargs="+", choices=("tensor", "data"), default=["tensor", "data"])
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    own, flags = parse_own(parser)
    if not flags or flags[0].startswith("--"):
        flags = [str(BENCHMARKS / "gpt-4x512.toml"), *flags]
    parse(flags, str(__doc__).partition("\n")[0], "two_processes.py")
    if len(os.sched_getaffinity(0)) < 2:
        raise UserError("two_processes.py: this process may use one core only; valid: two")
    if own.alone:
        alone(flags, own.rounds, own.steps)
        return
    results = measure(flags, own.axes, own.rounds, own.steps)
    print("| axis | side | s on one core | s on two | slowdown |\n|---|---|---|---|---|")
    for axis, sides in results.items():
        for name, found in sides.items():
            times = f"{found['one_core_seconds']:.3f} | {found['two_processes_seconds']:.3f}"
            print(f"| {axis} 2 | {name} | {times} | {found['slowdown']:.3f} |")
    if own.json:
        print(json.dumps(results))


if __name__ == "__main__":
    run(main)

"""The results of a search (`plan/search.py`), as text and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Any

from megajax.core.axes import AXES, CONTEXT
from megajax.core.backend import CPU, GPU
from megajax.core.program.program import training_way
from megajax.plan.compiled import Compilation
from megajax.plan.machines import GIB, Machine
from megajax.plan.memory import memory
from megajax.plan.search import VARIED, Found, Planned, command, schedule_in_words
from megajax.plan.time import in_order
from megajax.settings.config import Config

_COLUMNS = "schedule", "microbatch", "remat", "zero", "sequence", "s/step", "tokens/s", "MFU", "GiB"


def lines(
    found: Found, preset: str, original: Config, machine: Machine, compiled: Sequence[Compilation] = ()
) -> list[str]:
    """A table of the best configurations, the first of which are `compiled`, and the command to train the first;
    `original` is the configuration of `preset`, a name or a file."""
    axes = [axis for axis in AXES if any(axis in each.config.mesh.shown for each in found.best)]
    cells = [("", *axes, *_COLUMNS), *(_row(number, each, axes) for number, each in enumerate(found.best, 1))]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    best = found.best[0]
    parts = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in in_order(best.time.parts))
    compared = enumerate(zip(compiled, found.best, strict=False), 1)
    began = "" if found.complete else "interrupted after "
    return [
        f"{began}{found.tried:,} configurations on {best.config.mesh.num_devices} {machine.name.upper()}s, of which "
        f"{len(found.fitting):,} fit in {machine.usable / GIB:.1f} GiB; analytical predictions, "
        "nothing was run (docs/plan-time.md)",
        *table,
        f"breakdown of number 1, ms per step: {parts}",
        *([best.time.expert_loop.line] if best.time.expert_loop else []),
        *(_compiled_line(number, *each) for number, each in compared),
        command(preset, best.config, original),
    ]


def figures(
    found: Found, preset: str, original: Config, machine: Machine, compiled: Sequence[Compilation] = ()
) -> dict[str, Any]:
    """The same as JSON, with the Pareto frontier of time and memory."""
    best = []
    for number, each in enumerate(found.best):
        own = {key: attrgetter(key)(each.config) for key in VARIED}
        entry: dict[str, Any] = {"flags": own, "command": command(preset, each.config, original)}
        entry |= asdict(each.time) | {"bytes": asdict(each.memory) | {"total": each.memory.total}}
        if number < len(compiled):
            made = compiled[number].result()
            entry["compiled"] = {key: getattr(made, key) for key in ("compiler", "state", "temporaries", "seconds")}
        best.append(entry)
    frontier = [
        {"seconds": each.seconds, "bytes": each.bytes, "command": command(preset, each.config, original)}
        for each in found.frontier
    ]
    return {
        "gpu": machine.name,
        "devices": found.best[0].config.mesh.num_devices,
        "usable_bytes": machine.usable,
        "configurations": found.tried,
        "complete": found.complete,
        "fitting": len(found.fitting),
        "best": best,
        "frontier": frontier,
    }


def _compiled_line(number: int, compilation: Compilation, planned: Planned) -> str:
    """What the compiler reports next to the estimate, for the devices that it compiled for."""
    model = memory(planned.config, GPU if compilation.gpus else CPU)
    made = compilation.result()
    total = (made.state + made.temporaries) / GIB
    return (
        f"number {number} compiled by {made.compiler} in {made.seconds:.0f} s: {total:.1f} GiB, of which "
        f"state {made.state / GIB:.2f}; the estimate was {model.total / GIB:.1f} and {model.state / GIB:.2f}"
    )


def _row(number: int, each: Planned, axes: Sequence[str]) -> tuple[str, ...]:
    config, sizes = each.config, each.config.mesh.sizes
    ways = {CONTEXT: f" {training_way(config)}"} if sizes[CONTEXT] > 1 else {}
    return (
        str(number),
        *(f"{sizes[axis]}{ways.get(axis, '')}" for axis in axes),
        "-" if config.mesh.pipe == 1 else schedule_in_words(config.pipeline),
        str(config.train.microbatch),
        config.train.remat,
        str(config.optimizer.zero),
        "parallel" if config.sequence_parallel else "-",
        f"{each.time.seconds:.3f}",
        f"{each.time.tokens_per_second:,.0f}",
        f"{each.time.mfu:.1%}",
        f"{each.memory.total / GIB:.1f}",
    )

"""What a search found (`plan/search.py`), for the eye and for programs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megajax.axes import AXES
from megajax.backend import CPU, GPU
from megajax.config import Config
from megajax.plan.compiled import CompiledStep
from megajax.plan.machines import GIB, Machine
from megajax.plan.memory import memory
from megajax.plan.search import VARIED, Candidate, Found, Planned, command, value

_COLUMNS = (
    "",
    *AXES,
    "schedule",
    "rows",
    "remat",
    "zero",
    "sequence",
    "s/step",
    "tokens/s",
    "MFU",
    "GiB",
)


def lines(
    found: Found, preset: str, original: Config, machine: Machine, compiled: Sequence[CompiledStep] = ()
) -> list[str]:
    """A table of the best, and the command that trains the first.

    Args:
        found: what the search found.
        preset: its name, or its file.
        original: the preset's configuration.
        machine: the GPUs.
        compiled: the first of them, compiled.
    """
    cells = [_COLUMNS, *(_row(number, each) for number, each in enumerate(found.best, 1))]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_COLUMNS))]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    best = found.best[0]
    parts = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in _parts(best))
    return [
        f"{found.tried} configurations on {best.config.mesh.num_devices} {machine.name}, of which {len(found.fitting)} "
        f"fit in {machine.usable / GIB:.1f} GiB; predicted by a model, nothing ran (docs/plan-time.md)",
        *table,
        f"of the first, ms a step: {parts}",
        *(_compiled_line(number, each, planned) for number, (each, planned) in _pairs(found, compiled)),
        command(preset, best.config, original),
    ]


def figures(
    found: Found, preset: str, original: Config, machine: Machine, compiled: Sequence[CompiledStep] = ()
) -> dict[str, Any]:
    """The same, and the frontier of time and memory, for a program."""
    best = []
    for number, each in enumerate(found.best):
        own = {key: value(each.config, key) for key in VARIED}
        entry: dict[str, Any] = {"flags": own, "command": command(preset, each.config, original)}
        entry |= asdict(each.time) | {"bytes": asdict(each.memory) | {"total": each.memory.total}}
        if number < len(compiled):
            made = compiled[number]
            entry["compiled"] = {key: getattr(made, key) for key in ("compiler", "state", "temporaries", "seconds")}
        best.append(entry)
    return {
        "gpu": machine.name,
        "devices": found.best[0].config.mesh.num_devices,
        "usable_bytes": machine.usable,
        "configurations": found.tried,
        "fitting": len(found.fitting),
        "best": best,
        "frontier": [_point(each, preset, original) for each in found.frontier],
    }


def _point(each: Candidate, preset: str, original: Config) -> dict[str, Any]:
    return {"seconds": each.seconds, "bytes": each.bytes, "command": command(preset, each.config, original)}


def _pairs(found: Found, compiled: Sequence[CompiledStep]) -> list[tuple[int, tuple[CompiledStep, Planned]]]:
    return list(enumerate(zip(compiled, found.best, strict=False), 1))


def _compiled_line(number: int, made: CompiledStep, planned: Planned) -> str:
    """What a compiler says beside the model, of the devices that it compiled for."""
    model = memory(planned.config, CPU if "simulated" in made.compiler else GPU)
    total = (made.state + made.temporaries) / GIB
    return (
        f"number {number} by {made.compiler}, in {made.seconds:.0f} s: {total:.1f} GiB, of it the state "
        f"{made.state / GIB:.2f}; for these the model says {model.total / GIB:.1f} and {model.state / GIB:.2f}"
    )


def _parts(best: Planned) -> list[tuple[str, float]]:
    return sorted(best.time.parts.items(), key=lambda part: -part[1])


def _row(number: int, each: Planned) -> tuple[str, ...]:
    config, pipeline = each.config, each.config.pipeline
    chunks = f" x {pipeline.chunks}" if pipeline.chunks > 1 else ""
    later = ", deferred" if pipeline.weight_gradients == "deferred" and config.mesh.pipe > 1 else ""
    return (
        str(number),
        *map(str, config.mesh.sizes.values()),
        "-" if config.mesh.pipe == 1 else f"{pipeline.schedule}{chunks}{later}",
        str(config.train.microbatch),
        config.train.remat,
        str(config.optimizer.zero),
        "split" if config.sequence_parallel else "whole",
        f"{each.time.seconds:.3f}",
        f"{each.time.tokens_per_second:,.0f}",
        f"{each.time.mfu:.1%}",
        f"{each.memory.total / GIB:.1f}",
    )

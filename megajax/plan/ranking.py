"""The results of a search (`plan/search.py`), as text and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Any

from megajax.core.axes import AXES, CONTEXT
from megajax.core.backend import CPU, GPU
from megajax.core.program.overlap import scans_layers
from megajax.core.program.program import training_way
from megajax.plan.compiled import Compilation, scanned
from megajax.plan.machines import GIB, Machine
from megajax.plan.memory import memory
from megajax.plan.search import VARIED, Found, Planned, command, schedule_in_words
from megajax.plan.time import in_order, unit_of_times
from megajax.plan.whole_run import WholeRun
from megajax.settings.config import Config

_COLUMNS = (
    "schedule", "microbatch", "remat", "ZeRO", "sequence parallel", "layers",
    "s/step", "tokens/s/GPU", "MFU", "MFU causal", "GiB/GPU",
)  # fmt: skip


_UNKNOWN = WholeRun()


def lines(
    found: Found, preset: str, original: Config, machine: Machine, compiled: Sequence[Compilation] = (),
    run: WholeRun = _UNKNOWN,
) -> list[str]:  # fmt: skip
    """A table of the best configurations, the first of which are `compiled`, and the commands to train the first and
    the safer one; `original` is the configuration of `preset`, a name or a file."""
    shown = [*found.best, *([found.safer] if found.safer else [])]
    axes = [axis for axis in AXES if any(axis in each.config.mesh.shown for each in shown)]
    best, names = found.best[0], [*map(str, range(1, len(found.best) + 1)), "half"]
    totals = [name.replace("gpu_hours", "GPU-hours") for name in run.figures(1.0, 1)]
    rows = (_row(name, each, axes, run) for name, each in zip(names, shown, strict=False))
    cells = [("", *axes, *_COLUMNS, *totals), *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    unit, scale, digits = unit_of_times(best.time.seconds)
    parts = ", ".join(f"{name} {scale * seconds:.{digits}f}" for name, seconds in in_order(best.time.parts))
    compared = enumerate(zip(compiled, found.best, strict=False), 1)
    began = "" if found.complete else "partial result, interrupted after "
    kept = f", --margin keeps {(machine.largest - machine.usable) / GIB:.1f}" if machine.margin else ""
    return [
        f"{began}{found.tried:,} configurations on {best.config.mesh.num_devices} {machine.name.upper()}s, of which "
        f"{len(found.fitting):,} fit in {machine.usable / GIB:.1f} GiB{kept}; analytical predictions, "
        "nothing was run (docs/plan-time.md)",
        *table,
        "MFU counts attention whole; MFU causal only the scores that the mask leaves",
        f"breakdown of number 1, {unit} per step: {parts}",
        *([best.time.expert_loop.line] if best.time.expert_loop else []),
        *(_compiled_line(number, *each) for number, each in compared),
        *(_safer_lines(found.safer, best, preset, original) if found.safer else []),
        command(preset, best.config, original),
    ]


def _safer_lines(safer: Planned, best: Planned, preset: str, original: Config) -> list[str]:
    more = safer.time.seconds / best.time.seconds - 1
    return [
        f"the fastest in half of the memory, {more:.1%} slower than number 1:",
        command(preset, safer.config, original),
        "number 1:",
    ]


def figures(
    found: Found, preset: str, original: Config, machine: Machine, compiled: Sequence[Compilation] = (),
    run: WholeRun = _UNKNOWN,
) -> dict[str, Any]:  # fmt: skip
    """The same as JSON, with the Pareto frontier of time and memory."""

    def planned(each: Planned) -> dict[str, Any]:
        own = {key: attrgetter(key)(each.config) for key in VARIED}
        entry: dict[str, Any] = {"flags": own, "command": command(preset, each.config, original)}
        entry["tokens_per_second_per_gpu"] = each.time.tokens_per_second / each.config.mesh.num_devices
        entry |= asdict(each.time) | {"bytes": asdict(each.memory) | {"total": each.memory.total}}
        return entry | run.figures(each.time.tokens_per_second, each.config.mesh.num_devices)

    best = []
    for number, each in enumerate(found.best):
        entry = planned(each)
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
        "safer": found.safer and planned(found.safer),
        "frontier": frontier,
    }


def _compiled_line(number: int, compilation: Compilation, planned: Planned) -> str:
    """What the compiler reports next to the estimate, for the devices that it compiled for."""
    model = memory(scanned(planned.config), GPU if compilation.gpus else CPU)
    made = compilation.result()
    total = (made.state + made.temporaries) / GIB
    return (
        f"check of number {number}, with its layers in a scan, compiled in {made.seconds:.0f} s by {made.compiler}: "
        f"{total:.1f} GiB; the estimate for that program is {model.total / GIB:.1f}"
    )


def _row(name: str, each: Planned, axes: Sequence[str], run: WholeRun) -> tuple[str, ...]:
    config, sizes = each.config, each.config.mesh.sizes
    ways = {CONTEXT: f" {training_way(config)}"} if sizes[CONTEXT] > 1 else {}
    totals, ranks = run.figures(each.time.tokens_per_second, config.mesh.num_devices), config.optimizer.zero_ranks
    return (
        name,
        *(f"{sizes[axis]}{ways.get(axis, '')}" for axis in axes),
        "-" if config.mesh.pipe == 1 else schedule_in_words(config.pipeline),
        str(config.train.microbatch),
        config.train.remat,
        f"{config.optimizer.zero}{f', {ranks} ranks' * (ranks > 0)}",
        "yes" if config.sequence_parallel else "-",
        "scan" if scans_layers(config, GPU) else f"unrolled{', paired' * config.pipeline.paired_microbatches}",
        f"{each.time.seconds:.3f}",
        f"{each.time.tokens_per_second / config.mesh.num_devices:,.0f}",
        f"{each.time.mfu:.1%}",
        f"{each.time.mfu_causal:.1%}",
        f"{each.memory.total / GIB:.1f}",
        *(f"{figure:,.1f}" if name == "days" else f"{figure:,.0f}" for name, figure in totals.items()),
    )

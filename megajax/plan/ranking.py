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
    result: Found, preset: str, original: Config, machine: Machine, compiled: Sequence[Compilation] = (),
    run: WholeRun = _UNKNOWN,
) -> list[str]:  # fmt: skip
    """A table of the best configurations, of which those to check are `compiled`, and the commands to train the first,
    the safer and the recommended one; `original` is the configuration of `preset`, a name or a file."""
    shown = [*result.best, *([result.safer] if result.safer else [])]
    axes = [axis for axis in AXES if any(axis in plan.config.mesh.shown for plan in shown)]
    best, recommended = result.best[0], result.best.index(result.recommended) + 1
    names = [f"{rank}{'*' * (rank == recommended > 1)}" for rank in range(1, len(result.best) + 1)] + ["half"]
    totals = [name.replace("gpu_hours", "GPU-hours") for name in run.figures(1.0, 1)]
    rows = (_row(name, plan, axes, run) for name, plan in zip(names, shown, strict=False))
    cells = [("", *axes, *_COLUMNS, *totals), *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    unit, scale, digits = unit_of_times(best.time.seconds)
    parts = ", ".join(f"{name} {scale * seconds:.{digits}f}" for name, seconds in in_order(best.time.parts))
    compared = zip(compiled, result.checked, strict=False)
    began = "" if result.complete else "partial result, interrupted after "
    of_half = {"the fastest that needs at most half of the memory": result.safer} if result.safer else {}
    simplest = {f"recommended, the simplest mesh within 5%, number {recommended}": result.recommended}
    others = of_half | {"number 1": best} | (simplest if recommended > 1 else {})
    commands = [line for named in others.items() for line in _command_lines(*named, best, preset, original)]
    kept = f", --margin keeps {(machine.largest - machine.usable) / GIB:.1f}" if machine.margin else ""
    return [
        f"{began}{result.tried:,} configurations on {best.config.mesh.num_devices} {machine.name.upper()}s, of which "
        f"{len(result.fitting):,} fit in {machine.usable / GIB:.1f} GiB{kept}; analytical predictions, "
        "nothing was run (docs/plan.md)",
        *table,
        "MFU counts full attention; MFU causal only unmasked scores",
        f"breakdown of number 1, {unit} per step: {parts}",
        *([best.time.expert_loop.line] if best.time.expert_loop else []),
        *(_compiled_line(result.best.index(plan) + 1, made, plan, machine) for made, plan in compared),
        *commands[-1 if len(others) == 1 else 0 :],
    ]


def figures(
    result: Found, preset: str, original: Config, machine: Machine, compiled: Sequence[Compilation] = (),
    run: WholeRun = _UNKNOWN,
) -> dict[str, Any]:  # fmt: skip
    """The same as JSON, with the Pareto frontier of time and memory."""

    def planned(plan: Planned) -> dict[str, Any]:
        flags = {key: attrgetter(key)(plan.config) for key in VARIED}
        entry: dict[str, Any] = {"flags": flags, "command": command(preset, plan.config, original)}
        entry["tokens_per_second_per_gpu"] = plan.time.tokens_per_second / plan.config.mesh.num_devices
        entry |= asdict(plan.time) | {"bytes": asdict(plan.memory) | {"total": plan.memory.total}}
        return entry | run.figures(plan.time.tokens_per_second, plan.config.mesh.num_devices)

    best = [planned(plan) for plan in result.best]
    for plan, compilation in zip(result.checked, compiled, strict=False):
        made = compilation.result()
        report = {key: getattr(made, key) for key in ("compiler", "state", "temporaries", "seconds")}
        best[result.best.index(plan)]["compiled"] = report
    frontier = [
        {"seconds": point.seconds, "bytes": point.bytes, "command": command(preset, point.config, original)}
        for point in result.frontier
    ]
    return {
        "gpu": machine.name,
        "devices": result.best[0].config.mesh.num_devices,
        "usable_bytes": machine.usable,
        "configurations": result.tried,
        "complete": result.complete,
        "fitting": len(result.fitting),
        "best": best,
        "recommended": planned(result.recommended),
        "safer": result.safer and planned(result.safer),
        "frontier": frontier,
    }


def _command_lines(name: str, plan: Planned, best: Planned, preset: str, original: Config) -> list[str]:
    more = plan.time.seconds / best.time.seconds - 1
    slower = f" ({more:.1%} slower than number 1)" if plan is not best else ""
    return [f"{name}{slower}:", command(preset, plan.config, original)]


def _compiled_line(rank: int, compilation: Compilation, planned: Planned, machine: Machine) -> str:
    """What the compiler reports next to the estimate, for the devices that it compiled for, and whether that fits."""
    model = memory(scanned(planned.config), GPU if compilation.gpus else CPU)
    made = compilation.result()
    total, usable = (made.state + made.temporaries) / GIB, machine.usable / GIB
    unrolled = total + planned.memory.unrolled / GIB
    verdict = f"{'fits' if total <= usable else 'does not fit'} in {usable:.1f}"
    verdict += f", but unrolled it may need {unrolled:.1f}" if total <= usable < unrolled else ""
    return (
        f"check of number {rank}, with its layers in a scan, compiled in {made.seconds:.0f} s by {made.compiler}: "
        f"{total:.1f} GiB ({verdict}); the estimate for that program is {model.total / GIB:.1f}"
    )


def _row(name: str, plan: Planned, axes: Sequence[str], run: WholeRun) -> tuple[str, ...]:
    config, sizes = plan.config, plan.config.mesh.sizes
    ways = {CONTEXT: f" {training_way(config)}"} if sizes[CONTEXT] > 1 else {}
    totals, ranks = run.figures(plan.time.tokens_per_second, config.mesh.num_devices), config.optimizer.zero_ranks
    return (
        name,
        *(f"{sizes[axis]}{ways.get(axis, '')}" for axis in axes),
        "-" if config.mesh.pipe == 1 else schedule_in_words(config.pipeline),
        str(config.train.microbatch),
        config.train.remat,
        f"{config.optimizer.zero}{f', {ranks} ranks' * (ranks > 0)}",
        "yes" if config.sequence_parallel else "-",
        "scan" if scans_layers(config, GPU) else f"unrolled{', paired' * config.pipeline.paired_microbatches}",
        f"{plan.time.seconds:.3f}",
        f"{plan.time.tokens_per_second / config.mesh.num_devices:,.0f}",
        f"{plan.time.mfu:.1%}",
        f"{plan.time.mfu_causal:.1%}",
        f"{plan.memory.total / GIB:.1f}",
        *(f"{figure:,.1f}" if name == "days" else f"{figure:,.0f}" for name, figure in totals.items()),
    )

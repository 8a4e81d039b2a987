"""`megajax schedule`: print and draw a pipeline schedule."""

import json
from collections.abc import Sequence
from dataclasses import MISSING
from pathlib import Path

from megajax.commands.plots import check_plot, plot_atomically
from megajax.core.options import Option, between
from megajax.core.pipeline.config import PipelineConfig
from megajax.core.pipeline.deferral import PassTimes
from megajax.core.pipeline.schedule import make_schedule
from megajax.core.pipeline.table import Cell, Schedule
from megajax.core.pipeline.timing import StageTimes, StepTime, in_flight, kept_entries, pending_weights, step_time
from megajax.core.traits import IS_PATH
from megajax.plan.published import deferred_bubble, published_bubble, published_in_flight, published_zero_bubble
from megajax.settings.flags import Parser, add_flag
from megajax.settings.pipeline_checks import check_schedule, check_table

_PASSES = {
    "forward": "forward",
    "input_gradient": "gradient of its input",
    "weight_gradient": "gradient of its weights",
}
_TIME = between(1e-6, 10**6)


def main(argv: Sequence[str]) -> None:
    """Print a pipeline schedule: its table, ticks, bubble and chunks in flight."""
    parser = Parser(
        "Print a pipeline schedule as a table with one row per stage. Each tick shows its "
        "forward, then its backward, then its deferred weight gradients.",
        "megajax schedule --mesh.pipe P --microbatches M [--flag value ...]",
    )
    parser.add_config_flags("mesh.pipe", "pipeline.schedule", "pipeline.chunks", "pipeline.weight_gradients")
    add_flag(parser, Option("microbatches", int, MISSING, "microbatches per step"), required=True)
    for name, what in _PASSES.items():
        add_flag(parser, Option(f"{name}_time", float, 1.0, f"relative time of a stage per microbatch: {what}", _TIME))
    add_flag(parser, Option("plot", str, "", "draw the timeline to this .png or .svg file", traits=(IS_PATH,)))
    parser.add_argument("--json", action="store_true", help="print a single JSON object")
    args = parser.parse_args(argv)
    overrides = parser.overrides(args)
    stages, microbatches = overrides.pop("mesh.pipe", 1), args.microbatches
    pipeline = PipelineConfig(**{key.removeprefix("pipeline."): value for key, value in overrides.items()})
    times = PassTimes(**{name: getattr(args, f"{name}_time", 1.0) for name in _PASSES})
    check_schedule(pipeline, stages)
    check_table(pipeline, stages, microbatches, "--microbatches")
    plot = Path(args.plot) if "plot" in args else None
    if plot:
        from megajax.commands.timeline_picture import MARK

        check_plot(plot, MARK, "timeline of megajax")
    table = make_schedule(pipeline.schedule, stages, microbatches, pipeline.chunks, pipeline.deferring(times))
    stages_times = StageTimes.equal(table, times)
    step = step_time(table, stages_times)
    if plot:
        from megajax.commands.timeline_picture import draw_timeline

        title = f"{_describe(pipeline, table)}: bubble {step.bubble:.1%} of the ideal time"
        with plot_atomically(plot) as new:
            draw_timeline(new, title, table, stages_times, f"of a stage, {_words(times)}")
    if args.json:
        print(json.dumps(_figures(table, step)))
    else:
        _print(pipeline, table, times, step)
        if plot:
            print(f"timeline drawn: {plot}")


def _describe(pipeline: PipelineConfig, table: Schedule) -> str:
    waiting = ", weight gradients deferred" if table.deferral else ""
    return f"{pipeline.schedule}, {table.size}{waiting}"


def _words(times: PassTimes) -> str:
    return ", ".join(f"{name.replace('_', ' ')} = {getattr(times, name):g}" for name in _PASSES)


def _figures(table: Schedule, step: StepTime) -> dict:
    def in_json(cell: Cell) -> list:
        passes = [next(iter(cell.forward), None), next(iter(cell.backward), None)]
        return [*passes, cell.early + cell.late] if table.deferral else passes

    factors = table.deferral.num_slots if table.deferral else 0
    return {
        "ticks": table.num_ticks,
        "time": step.wall,
        "ideal_time": step.busy,
        "bubble_overhead": step.bubble,
        "in_flight": in_flight(table),
        "entries": {"forward": table.num_slots, "factors": factors, "by_stage": kept_entries(table)},
        "table": [list(map(in_json, row)) for row in table.cells()],
    }


def _print(pipeline: PipelineConfig, table: Schedule, times: PassTimes, step: StepTime) -> None:
    from rich.console import Console

    from megajax.commands.timeline_text import draw_text

    console = Console(highlight=False, soft_wrap=True)
    shape = table.num_stages, table.num_microbatches, table.num_chunks
    order = "forward, the backward, then weight gradients (w)" if table.deferral else "forward, then the backward"
    chunk = " and chunk" if table.num_chunks > 1 else ""
    bubble, chunks = published_bubble(pipeline.schedule, *shape), published_in_flight(pipeline.schedule, *shape)
    together = ", weight gradients together" if table.deferral else ""
    nothing = "no published figure for this case"
    bubble_there = nothing if bubble is None else f"published (p-1)/(v*m) = {bubble:.4f}{together}"
    chunks_there = nothing if chunks is None else f"published {', '.join(map(str, chunks))}"
    depth = max(table.forward.inbox_depth, table.backward.inbox_depth)
    lines = [
        f"{_describe(pipeline, table)}; in every tick the {order}, as microbatch{chunk}",
        *draw_text(table, console.width if console.is_terminal else None),
        f"ticks             {table.num_ticks}",
        f"time              {step.wall:g}, of which a stage works {step.busy:g} ({_words(times)})",
        f"bubble            {step.bubble:.4f} of the ideal time; {bubble_there}",
        f"chunks in flight  {', '.join(map(str, in_flight(table)))} by stage; {chunks_there}",
        f"buffers per stage {table.num_slots} chunks, and {depth} received inputs in each direction",
    ]
    if table.deferral:
        lines += _deferral_lines(pipeline, table, times, step)
    elif pipeline.deferring():
        lines.append("weight gradients  deferring does nothing with --mesh.pipe 1: a single stage is never idle")
    for line in lines:
        console.print(line)


def _deferral_lines(pipeline: PipelineConfig, table: Schedule, times: PassTimes, step: StepTime) -> list[str]:
    """What deferring weight gradients gains and costs, next to published figures."""
    assert table.deferral is not None
    shape = table.num_stages, table.num_microbatches, table.num_chunks
    without = make_schedule(pipeline.schedule, *shape)
    together = step_time(without, StageTimes.equal(without, times))
    formula = deferred_bubble(pipeline.schedule, *shape, times)
    saved = times.weight_gradient / table.num_chunks
    (h1, h1_in_flight), (h2, h2_in_flight) = published_zero_bubble(table.num_stages, times).values()
    entries = kept_entries(table)
    of_formula = "no formula for this case" if formula is None else f"by formula {formula:g}"
    return [
        f"factors per stage {table.deferral.num_slots} chunks; with residuals for backward passes, at most "
        f"{', '.join(map(str, entries))} chunks by stage",
        f"deferring         bubble {together.bubble:.4f} -> {step.bubble:.4f}; idle time "
        f"{together.idle:g} -> {step.idle:g} ({of_formula})",
        f"published         ZB-H1 idles {h1:g} with {h1_in_flight} microbatches in flight, ZB-H2 {h2:g} with "
        f"{h2_in_flight} (arXiv 2401.10241); here {step.idle:g} with {max(entries) / table.num_chunks:g}",
        f"pending chunks    {max(pending_weights(table))}, as many as help; each saves up to {saved:g}, "
        f"{saved / together.wall:.1%} of the step,",
        "                  and keeps its factors: about 16 D numbers per token and layer, for any --train.remat "
        "(which itself keeps 16 D for none, D for layer)",
    ]

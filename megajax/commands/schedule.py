"""`megajax schedule`: print and draw a pipeline schedule."""

import json
import os
from collections.abc import Sequence
from dataclasses import MISSING
from pathlib import Path

import numpy as np

from megajax.data.files import file_atomically
from megajax.errors import UserError
from megajax.flags import Parser, add_flag
from megajax.options import Option
from megajax.paths import check_place
from megajax.pipeline.config import PipelineConfig
from megajax.pipeline.schedule import make_schedule
from megajax.pipeline.table import IDLE, Pass, Schedule
from megajax.pipeline.timing import StageTimes, bubble_overhead, in_flight, published_bubble, published_in_flight
from megajax.runs.parts import check_outside_runs
from megajax.validation import check_schedule, check_table

PLOT_FORMATS = (".png", ".svg")


def main(argv: Sequence[str]) -> None:
    """Print a pipeline schedule: its table, ticks, bubble and chunks in flight.

    Raises:
        UserError: a flag is not valid, or the plot cannot be written.
    """
    parser = Parser(
        "Print a pipeline schedule as a table, one row a stage: the forward, then the backward of every tick.",
        "megajax schedule --mesh.pipe P --microbatches M [--flag value ...]",
    )
    parser.add_config_flags("mesh.pipe", "pipeline.schedule", "pipeline.chunks")
    add_flag(parser, Option("microbatches", int, MISSING, "microbatches of a step"), MISSING, required=True)
    add_flag(parser, Option("plot", str, "", "draw the timeline into this .png or .svg file"), "")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args(argv)
    given = parser.overrides(args)
    stages, microbatches = given.pop("mesh.pipe", 1), args.microbatches
    pipeline = PipelineConfig(**{key.removeprefix("pipeline."): value for key, value in given.items()})
    check_schedule(pipeline, stages)
    check_table(pipeline, stages, microbatches, "--microbatches")
    plot = Path(args.plot) if "plot" in args else None
    if plot and plot.suffix.lower() not in PLOT_FORMATS:
        raise UserError(f"--plot {plot}; valid: a file that ends in {' or '.join(PLOT_FORMATS)}")
    if plot:
        _check_plot(plot)
    table = make_schedule(pipeline.schedule, stages, microbatches, pipeline.chunks)
    bubble = bubble_overhead(table)
    if plot:
        from megajax.pipeline.drawing import draw_timeline

        title = f"{_describe(pipeline, table)}: bubble {bubble:.1%} of the ideal time"
        try:
            with file_atomically(plot) as new:
                draw_timeline(new, title, table, StageTimes.equal(table), "forward of a stage = 1, backward = 2")
        except OSError as error:
            raise UserError(f"--plot {plot}: cannot be written: {error.strerror}; valid: a place that can") from None
    if args.json:
        print(json.dumps(_figures(table, bubble)))
    else:
        _print(pipeline, table, bubble)
        if plot:
            print(f"timeline drawn: {plot}")


def _check_plot(plot: Path) -> None:
    """Raises `UserError` where the picture cannot be written, or would replace something else than a timeline."""
    from megajax.pipeline.drawing import is_own

    check_place(plot, "--plot")
    check_outside_runs(plot, "--plot")
    if os.path.lexists(plot) and not is_own(plot):
        raise UserError(f"--plot {plot} is there already and is no timeline of megajax; valid: another name")


def _describe(pipeline: PipelineConfig, table: Schedule) -> str:
    chunks = f" x {table.num_chunks} chunks" if table.num_chunks > 1 else ""
    return f"{pipeline.schedule}, {table.num_stages} stages{chunks}, {table.num_microbatches} microbatches"


def _figures(table: Schedule, bubble: float) -> dict:
    def cells(direction: Pass, tick: int) -> list[list[int] | None]:
        pairs = np.stack([direction.microbatch[tick], direction.chunk[tick]], axis=-1).tolist()
        return [None if pair[0] == IDLE else pair for pair in pairs]

    ticks = range(table.num_ticks)
    rows = [[list(cell) for cell in zip(cells(table.forward, t), cells(table.backward, t), strict=True)] for t in ticks]
    return {"ticks": table.num_ticks, "bubble_overhead": bubble, "in_flight": in_flight(table), "table": rows}


def _print(pipeline: PipelineConfig, table: Schedule, bubble: float) -> None:
    from rich.console import Console

    from megajax.pipeline.drawing import draw_text

    console = Console(highlight=False, soft_wrap=True)
    shape = table.num_stages, table.num_microbatches, table.num_chunks
    console.print(f"{_describe(pipeline, table)}; in every tick the forward, then the backward, as microbatch", end="")
    console.print(" and chunk" if table.num_chunks > 1 else "")
    for line in draw_text(table, console.width if console.is_terminal else None):
        console.print(line)
    depth = max(table.forward.inbox_depth, table.backward.inbox_depth)
    bubble_there = published_bubble(pipeline.schedule, *shape)
    chunks_there = published_in_flight(pipeline.schedule, *shape)
    nothing = "nothing published for this case"
    console.print(f"ticks             {table.num_ticks}")
    console.print(
        f"bubble over ideal {bubble:.4f} (backward = 2 x forward); "
        + (nothing if bubble_there is None else f"published (p-1)/(v*m) = {bubble_there:.4f}")
    )
    console.print(
        f"chunks in flight  {', '.join(map(str, in_flight(table)))} by stage; "
        + (nothing if chunks_there is None else f"published {', '.join(map(str, chunks_there))}")
    )
    console.print(f"buffers per stage {table.num_slots} chunks, {depth} waiting inputs in each direction")

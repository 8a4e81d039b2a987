"""A schedule for the eye: as text, one row a stage, and as a picture of its timeline."""

from pathlib import Path
from typing import TYPE_CHECKING

from megajax.pipeline.table import IDLE, Pass, Schedule
from megajax.pipeline.timing import StageTimes, timeline

if TYPE_CHECKING:
    from rich.text import Text

# One per chunk, then from the beginning; forward and backward.
STYLES = ("blue", "cyan", "bright_blue", "bright_cyan"), ("green", "yellow", "bright_green", "bright_yellow")
MARK = b"megajax schedule"  # in the pictures, as the program that drew them
COLOURS = ("#4477aa", "#66ccee", "#88a9cc", "#a6dff5"), ("#228833", "#ccbb44", "#7cbb88", "#e3d98f")


def cell_name(microbatch: int, chunk: int, num_chunks: int) -> str:
    """A microbatch, with a letter for the chunk where there are several: `3`, `3b`."""
    letter = "" if num_chunks == 1 else chr(ord("a") + chunk) if num_chunks <= 26 else f".{chunk}"
    return f"{microbatch}{letter}"


def draw_text(schedule: Schedule, width: int | None = None) -> "list[Text]":
    """Lines of the table: ticks from left to right, one row a stage, in every tick the forward, then the backward.

    A row longer than `width` characters is continued below.
    """
    from rich.text import Text

    num_chunks = schedule.num_chunks
    names = [cell_name(schedule.num_microbatches - 1, c, num_chunks) for c in range(num_chunks)]
    size = max(len(str(schedule.num_ticks - 1)), *map(len, names))

    def part(table: Pass, styles: tuple[str, ...], tick: int, stage: int) -> tuple[str, str]:
        microbatch, chunk = int(table.microbatch[tick, stage]), int(table.chunk[tick, stage])
        if microbatch == IDLE:
            return ".".rjust(size), "bright_black"
        return cell_name(microbatch, chunk, num_chunks).rjust(size), styles[chunk % len(styles)]

    label = max(len("tick"), len(f"stage {schedule.num_stages - 1}"))
    per_line = schedule.num_ticks
    if width is not None:
        per_line = max(1, (width - label) // (2 * size + 4))
    lines = []
    for first in range(0, schedule.num_ticks, per_line):
        ticks = range(first, min(first + per_line, schedule.num_ticks))
        lines.append(Text("tick".ljust(label) + "".join(f" | {tick:<{2 * size + 1}}" for tick in ticks), "bold"))
        for stage in range(schedule.num_stages):
            row = Text(f"stage {stage}".ljust(label), "bold")
            for tick in ticks:
                row.append(" | ", "bright_black")
                row.append(*part(schedule.forward, STYLES[0], tick, stage))
                row.append(" ")
                row.append(*part(schedule.backward, STYLES[1], tick, stage))
            lines.append(row)
    return lines


def draw_timeline(path: Path, title: str, schedule: Schedule, times: StageTimes, unit: str) -> None:
    """Draw when every stage runs what, into a PNG or SVG.

    Raises `OSError` if the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    spans = timeline(schedule, times)
    end = max(span.end for span in spans)
    shortest = min(span.end - span.start for span in spans)
    inches = min(40.0, max(8.0, 0.3 * end / shortest))
    figure = Figure(figsize=(inches, 1.6 + 0.5 * schedule.num_stages), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for span in spans:
        colour = COLOURS[span.part][span.chunk % 4]
        bar = axes.barh(
            span.stage, span.end - span.start, left=span.start, height=0.84, color=colour, edgecolor="white", lw=0.8
        )
        if inches * (span.end - span.start) / end > 0.16:
            name = cell_name(span.microbatch, span.chunk, schedule.num_chunks)
            axes.bar_label(
                bar, [name], label_type="center", fontsize=7, color="white" if span.chunk % 4 == 0 else "black"
            )
    legend = [
        Patch(
            color=COLOURS[backward][chunk % 4],
            label=f"{what}{f', chunk {chr(97 + chunk)}' if schedule.num_chunks > 1 else ''}",
        )
        for backward, what in ((0, "forward"), (1, "backward"))
        for chunk in range(min(schedule.num_chunks, 4))
    ]
    axes.set_title(title, loc="left")
    axes.set_xlabel(f"time ({unit})")
    axes.set_yticks(range(schedule.num_stages), [f"stage {stage}" for stage in range(schedule.num_stages)])
    axes.invert_yaxis()
    axes.set_xlim(0, end)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), frameon=False, fontsize=8)
    kind = path.suffix.lower().removeprefix(".")
    name = {"png": "Software", "svg": "Creator"}[kind]
    figure.savefig(path, format=kind, metadata={name: MARK.decode()})


def is_own(file: Path) -> bool:
    """Whether a file is a picture that `draw_timeline` drew."""
    if file.is_symlink() or not file.is_file():
        return False
    with file.open("rb") as content:
        head = content.read(4096)
    return b"tEXtSoftware\0" + MARK in head or b"<dc:title>" + MARK + b"</dc:title>" in head

"""A schedule for the eye: as text, one row a stage, and as a picture of its timeline."""

from pathlib import Path
from typing import TYPE_CHECKING

from megajax.pictures import is_marked, save
from megajax.pipeline.table import IDLE, Pass, Schedule
from megajax.pipeline.timing import StageTimes, timeline

if TYPE_CHECKING:
    from rich.text import Text

# One per chunk, then from the beginning; forward, backward, and weight gradients apart.
STYLES = (
    ("blue", "cyan", "bright_blue", "bright_cyan"),
    ("green", "yellow", "bright_green", "bright_yellow"),
    ("magenta", "red", "bright_magenta", "bright_red"),
)
MARK = b"megajax schedule"  # in the pictures, as the program that drew them
COLOURS = (
    ("#4477aa", "#66ccee", "#88a9cc", "#a6dff5"),
    ("#228833", "#ccbb44", "#7cbb88", "#e3d98f"),
    ("#aa3377", "#ee99aa", "#cc79a7", "#f4c6d0"),
)
_MOST_NAMES = 4  # of weight gradients in a cell of the text; of more the first and the last


def cell_name(microbatch: int, chunk: int, num_chunks: int) -> str:
    """A microbatch, with a letter for the chunk where there are several: `3`, `3b`."""
    letter = "" if num_chunks == 1 else chr(ord("a") + chunk) if num_chunks <= 26 else f".{chunk}"
    return f"{microbatch}{letter}"


def draw_text(schedule: Schedule, width: int | None = None) -> "list[Text]":
    """Lines of the table: ticks from left to right, one row a stage, in every tick the forward, then the backward, then
    the weight gradients that waited, as `w3,4`. Those that run in the place of a forward stand there.

    A row longer than `width` characters is continued below.
    """
    from rich.text import Text

    num_chunks = schedule.num_chunks
    names = [cell_name(schedule.num_microbatches - 1, c, num_chunks) for c in range(num_chunks)]
    size = max(len(str(schedule.num_ticks - 1)), *map(len, names))
    nothing = (".", "bright_black")
    waited = schedule.deferral.cells() if schedule.deferral else None

    def one(table: Pass, styles: tuple[str, ...], tick: int, stage: int) -> tuple[str, str]:
        microbatch, chunk = int(table.microbatch[tick, stage]), int(table.chunk[tick, stage])
        return (
            nothing if microbatch == IDLE else (cell_name(microbatch, chunk, num_chunks), styles[chunk % len(styles)])
        )

    def several(ran: list[tuple[int, int]]) -> tuple[str, str]:
        if not ran:
            return nothing
        names = [cell_name(microbatch, chunk, num_chunks) for microbatch, chunk in ran]
        text = ",".join(names) if len(names) <= _MOST_NAMES else f"{names[0]}..{names[-1]}"
        return f"w{text}", STYLES[2][ran[0][1] % len(STYLES[2])]

    def cell(tick: int, stage: int) -> list[tuple[str, str]]:
        forward, backward = (
            one(schedule.forward, STYLES[0], tick, stage),
            one(schedule.backward, STYLES[1], tick, stage),
        )
        if waited is None:
            return [forward, backward]
        early, late = waited[tick][stage]
        return [several(early) if early else forward, backward, several(late)]

    label = max(len("tick"), len(f"stage {schedule.num_stages - 1}"))
    stages = range(schedule.num_stages)
    lines: list[Text] = []
    room = 0
    for tick in range(schedule.num_ticks):
        cells = [cell(tick, stage) for stage in stages]
        sizes = [max(size, *(len(text) for text, _ in part)) for part in zip(*cells, strict=True)]
        if waited is not None and all(part == nothing for *_, part in cells):
            cells, sizes = [row[:-1] for row in cells], sizes[:-1]
        needed = sum(sizes) + len(sizes) - 1
        if not lines or (width is not None and room < needed + 3):
            lines += [Text("tick".ljust(label), "bold"), *(Text(f"stage {s}".ljust(label), "bold") for s in stages)]
            room = width - label if width is not None else 0
        room -= needed + 3
        head, *rows = lines[-1 - schedule.num_stages :]
        head.append(f" | {tick:<{needed}}")
        for row, parts in zip(rows, cells, strict=True):
            row.append(" | ", "bright_black")
            for n, ((text, style), wide) in enumerate(zip(parts, sizes, strict=True)):
                row.append(" " * (n > 0))
                row.append(text.rjust(wide), style)
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
    passes = ["forward", "backward"] if schedule.deferral is None else ["forward", "input gradient", "weight gradient"]
    legend = [
        Patch(
            color=COLOURS[part][chunk % 4],
            label=f"{what}{f', chunk {chr(97 + chunk)}' if schedule.num_chunks > 1 else ''}",
        )
        for part, what in enumerate(passes)
        for chunk in range(min(schedule.num_chunks, 4))
    ]
    axes.set_title(title, loc="left")
    axes.set_xlabel(f"time ({unit})")
    axes.set_yticks(range(schedule.num_stages), [f"stage {stage}" for stage in range(schedule.num_stages)])
    axes.invert_yaxis()
    axes.set_xlim(0, end)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    figure.legend(handles=legend, loc="outside lower center", ncols=min(8, len(legend)), frameon=False, fontsize=8)
    save(figure, path, MARK)


def is_own(file: Path) -> bool:
    """Whether a file is a picture that `draw_timeline` drew."""
    return is_marked(file, MARK)

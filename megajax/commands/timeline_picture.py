"""Draw a schedule's timeline as a picture, with every pass of every stage. A large schedule gets an overview of the
whole step, and below it the passes of the excerpts (`drawing.py`)."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megajax.commands.timeline_text import Excerpt, TickRange, cell_name, excerpt
from megajax.core.pipeline.table import Schedule
from megajax.core.pipeline.timing import Span, StageTimes, timeline
from megajax.host.pictures import save

MARK = b"megajax schedule"  # in a picture's metadata: the program that drew it
COLOURS = (  # forward, backward, weight gradients; for four chunks, then they repeat
    ("#4477aa", "#66ccee", "#88a9cc", "#a6dff5"),
    ("#228833", "#ccbb44", "#7cbb88", "#e3d98f"),
    ("#aa3377", "#ee99aa", "#cc79a7", "#f4c6d0"),
)
_INCHES = 8.0, 40.0  # least and most width
_SHORTEST = 0.3  # inches for the shortest pass, if the width allows
_LETTER = 0.055  # inches
_COLUMNS = 2000  # in an overview


def draw_timeline(path: Path, title: str, schedule: Schedule, times: StageTimes, unit: str) -> None:
    """Draw the timeline into a PNG or SVG.

    Raises `OSError` if the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    (_, spans), shown = timeline(schedule, times), excerpt(schedule)
    ranges = [_range(spans, part) for part in shown.parts]
    longest = max(end - begin for begin, end in ranges)
    shortest = min(span.end - span.start for span in spans)
    inches = min(_INCHES[1], max(_INCHES[0], _SHORTEST * longest / shortest))
    height = 0.5 if shown.is_complete else 0.34
    heights = [0.8 + height * len(shown.stages)] * len(ranges)
    if not shown.is_complete:
        heights.insert(0, 1.4 + min(5.0, 0.2 * schedule.num_stages))
    figure = Figure(figsize=(inches, 0.8 + sum(heights)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0].tolist()
    if shown.is_complete:
        panels[0].set_title(title, loc="left")
    else:
        _overview(panels.pop(0), title, spans, shown, ranges, inches)
    for axes, part, (begin, end) in zip(panels, shown.parts, ranges, strict=True):
        within = [span for span in spans if span.start < end and span.end > begin]
        _cells(axes, within, shown, (begin, begin + longest), inches / longest, schedule.num_chunks)
        if not shown.is_complete:
            axes.set_title(part.words(), loc="left", fontsize=_size(inches))
            axes.axvspan(end, begin + longest, color="white", zorder=3)  # hide what follows the part
    panels[-1].set_xlabel(f"time ({unit})", fontsize=_size(inches))
    legend, size = _legend(schedule), 8 if shown.is_complete else _size(inches)
    figure.legend(handles=legend, loc="outside lower center", ncols=min(8, len(legend)), frameon=False, fontsize=size)
    save(figure, path, MARK)


def _size(inches: float) -> float:
    """Font size in points; larger in wide pictures, which are scaled down."""
    return min(20.0, max(10.0, 0.6 * inches))


def _range(spans: Sequence[Span], part: TickRange) -> tuple[float, float]:
    """When the first pass of a part begins, and when its last one ends."""
    within = [span for span in spans if part.first <= span.tick < part.past]
    return min(span.start for span in within), max(span.end for span in within)


def _legend(schedule: Schedule) -> list[Any]:
    from matplotlib.patches import Patch

    passes = ["forward", "backward"] if schedule.deferral is None else ["forward", "input gradient", "weight gradient"]
    return [
        Patch(
            color=COLOURS[part][chunk % 4],
            label=what + (f", chunk {_letters(chunk, schedule.num_chunks)}" if schedule.num_chunks > 1 else ""),
        )
        for part, what in enumerate(passes)
        for chunk in range(min(schedule.num_chunks, 4))
    ]


def _letters(colour: int, num_chunks: int) -> str:
    """The letters of the chunks that share a colour."""
    letters = [chr(97 + chunk) for chunk in range(colour, num_chunks, 4)]
    return ", ".join(letters if len(letters) < 4 else [*letters[:2], "…"])


def _cells(
    axes: Any, spans: Sequence[Span], shown: Excerpt, limits: tuple[float, float], scale: float, num_chunks: int
) -> None:
    """Draw every pass as a bar, with its microbatch if there is room; `scale` is in inches per unit of time."""
    from matplotlib.collections import PolyCollection

    row = _rows(shown)
    spans = [span for span in spans if span.stage in row]
    corners = [[span.start, span.end, row[span.stage] - 0.42, row[span.stage] + 0.42] for span in spans]
    bars = list(np.reshape(corners, (-1, 4))[:, [[0, 2], [0, 3], [1, 3], [1, 2]]])  # empty if these stages all wait
    colours = [COLOURS[span.part][span.chunk % 4] for span in spans]
    axes.add_collection(PolyCollection(bars, facecolors=colours, edgecolors="white", linewidths=0.8))
    for span in spans:
        name = cell_name(span.microbatch, span.chunk, num_chunks)
        if scale * (span.end - span.start) > max(0.16, 0.05 + _LETTER * len(name)):
            colour = "white" if span.chunk % 4 == 0 else "black"
            middle = (span.start + span.end) / 2
            text = axes.text(middle, row[span.stage], name, ha="center", va="center", fontsize=7, color=colour)
            text.set_clip_on(True)
            text.set_in_layout(False)  # saves computing its extent
    _ticks(axes, row)
    axes.set_ylim(max(row.values()) + 0.6, -0.6)
    axes.set_xlim(*limits)


def _rows(shown: Excerpt) -> dict[int, int]:
    """Map stages to rows, with an empty row where stages are left out."""
    gaps = (stage != number for number, stage in enumerate(shown.stages))
    return {stage: number + gap for number, (stage, gap) in enumerate(zip(shown.stages, gaps, strict=True))}


def _ticks(axes: Any, row: dict[int, int]) -> None:
    axes.set_yticks(list(row.values()), [f"stage {stage}" for stage in row])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)


def _overview(
    axes: Any, title: str, spans: Sequence[Span], shown: Excerpt, ranges: Sequence[tuple[float, float]], inches: float
) -> None:
    """Draw the entire step, with mixed colours where a column has several passes, and frames around the excerpts."""
    num_stages, end = shown.of[1], max(span.end for span in spans)
    axes.imshow(
        _mixed(spans, num_stages, end),
        aspect="auto",
        interpolation="nearest",
        extent=(0, end, num_stages - 0.5, -0.5),
    )
    for part, (begin, past) in zip(shown.parts, ranges, strict=True):
        axes.axvspan(begin, past, fill=False, edgecolor="black", lw=1.2)
        place, name = ((begin + past) / 2, 1), part.name.partition(" (")[0]
        above = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "ha": "center"}
        axes.annotate(name, place, (0, 3), fontsize=_size(inches) - 1, **above)
    note = (
        f"Whole step, {shown.cells:,} passes: colours are mixed where several run in a column. Below, the framed parts "
        f"pass by pass; {shown.left_out()} left out there."
    )
    letters = int(105 * inches / _size(inches))  # in a line
    lines = "\n".join(line for text in (title, note) for line in textwrap.wrap(text, letters))
    axes.set_title(lines, loc="left", fontsize=_size(inches), pad=1.8 * _size(inches))
    some = {stage: stage for stage in range(0, num_stages, -(-num_stages // 16))}
    _ticks(axes, some)
    axes.spines["bottom"].set_visible(False)


def _mixed(spans: Sequence[Span], num_stages: int, end: float) -> np.ndarray:
    """The colours of an overview, [stages, columns, 3]."""
    from matplotlib.colors import to_rgb

    edges = np.linspace(0.0, end, _COLUMNS + 1)
    mixed = np.ones((num_stages, _COLUMNS, 3))
    together: dict[tuple[int, int, int], list[Span]] = {}
    for span in spans:
        together.setdefault((span.stage, span.part, span.chunk % 4), []).append(span)
    for (stage, part, chunk), alike in together.items():
        times = np.array([[span.start, span.end] for span in alike])
        worked = (times[:, 1] - times[:, 0]).cumsum()
        before = np.stack([np.concatenate([[0.0], worked[:-1]]), worked], axis=1)
        share = np.diff(np.interp(edges, times.ravel(), before.ravel())) * _COLUMNS / end
        mixed[stage] -= share[:, None] * (1.0 - np.array(to_rgb(COLOURS[part][chunk])))
    return mixed.clip(0.0, 1.0)

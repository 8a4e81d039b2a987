"""Draw a schedule's timeline as a picture: every pass of every stage, named by its microbatch where there is room."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megajax.commands.timeline_text import MOST_CELLS, cell_name
from megajax.core.pipeline.table import Schedule
from megajax.core.pipeline.timing import Span, StageTimes, timeline
from megajax.host.pictures import new_figure, save

MARK = b"megajax schedule"  # in a picture's metadata: the program that drew it
COLOURS = (  # a hue for forward, backward, weight gradients; lighter for each of four chunks, then they repeat
    ("#1f5fa8", "#5f9ad6", "#9dc3ea", "#cfe2f6"),
    ("#b5510a", "#ec9a4c", "#f6c492", "#fbe3cb"),
    ("#1b7a3a", "#54ae6f", "#95d0a5", "#cdead5"),
)
GREY = "#757575"  # of text and lines, for light and dark grounds: the picture has none
_WIDTHS = 6.5, 16.0  # least and most inches
_HEIGHTS = 0.5, 24.0  # inches of a stage, and most of all
_SHORTEST = 0.2  # inches for the shortest pass, if the width allows
_LETTER = 0.055  # inches
_POINTS = 1.35  # size of text for each inch of width: it is then readable in a picture shown 400 pixels wide
_LINE = 92  # characters of the title
_MOST_LABELS = 32  # stages named on the axis


def draw_timeline(path: Path, title: str, schedule: Schedule, times: StageTimes, unit: str) -> None:
    """Draw the timeline into a PNG or SVG.

    Raises `OSError` if the file cannot be written.
    """
    _, spans = timeline(schedule, times)
    longest, shortest = max(span.end for span in spans), min(span.end - span.start for span in spans)
    width = min(_WIDTHS[1], max(_WIDTHS[0], _SHORTEST * longest / shortest))
    size, lines = _POINTS * width, textwrap.wrap(title, _LINE)
    words = size / 72 * (5 + 1.2 * len(lines))  # inches of title, axis and legend
    figure = new_figure((width, words + min(_HEIGHTS[0] * schedule.num_stages, _HEIGHTS[1])), dpi=110)
    axes = figure.add_subplot()
    axes.set_title("\n".join(lines), loc="left", fontsize=size, color=GREY)
    _cells(axes, spans, width / longest, shortest, schedule)
    axes.set_xlim(0, longest)
    axes.set_ylim(schedule.num_stages - 0.4, -0.6)
    named = range(0, schedule.num_stages, -(-schedule.num_stages // _MOST_LABELS))
    axes.set_yticks(list(named), [f"stage {stage}" for stage in named])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    axes.tick_params(left=False, labelsize=size, colors=GREY)
    axes.set_xlabel(f"time ({unit})", fontsize=size, color=GREY)
    axes.patch.set_alpha(0)
    figure.patch.set_alpha(0)
    legend = _legend(schedule)
    columns = min(schedule.num_chunks, 4) if schedule.num_chunks > 1 else len(legend)
    style = {"ncols": columns, "labelcolor": GREY, "fontsize": size, "frameon": False}
    figure.legend(handles=legend, loc="outside lower center", handlelength=1.2, columnspacing=1.2, **style)
    save(figure, path, MARK)


def _legend(schedule: Schedule) -> list[Any]:
    from matplotlib.patches import Patch

    return [
        Patch(color=COLOURS[index][chunk % 4], label=_label(what, chunk, schedule.num_chunks))
        for chunk in range(min(schedule.num_chunks, 4))
        for index, what in enumerate(_passes(schedule))
    ]


def _passes(schedule: Schedule) -> list[str]:
    return ["forward", "backward"] if schedule.deferral is None else ["forward", "input gradient", "weight gradient"]


def _label(what: str, colour: int, num_chunks: int) -> str:
    """Of a pass and the chunks that share a colour, by their letters; the first of a row names the pass."""
    if num_chunks == 1:
        return what
    letters = [chr(97 + chunk) for chunk in range(colour, num_chunks, 4)]
    return (f"{what}, chunk " if colour == 0 else "") + ", ".join(letters if len(letters) < 4 else [*letters[:2], "…"])


def _cells(axes: Any, spans: Sequence[Span], scale: float, shortest: float, schedule: Schedule) -> None:
    """Draw every pass as a bar, with its microbatch if there is room; `scale` is in inches per unit of time."""
    from matplotlib.collections import PolyCollection

    gap = 0.006 / scale if scale * shortest > 0.08 else 0.0  # at each end
    corners = np.array([[span.start + gap, span.end - gap, span.stage - 0.42, span.stage + 0.42] for span in spans])
    bars = list(corners[:, [[0, 2], [0, 3], [1, 3], [1, 2]]])
    colours = [COLOURS[span.part][span.chunk % 4] for span in spans]
    many = len(spans) > MOST_CELLS
    axes.add_collection(PolyCollection(bars, facecolors=colours, edgecolors="none", rasterized=many))
    for span in [] if many else spans:
        name = cell_name(span.microbatch, span.chunk, schedule.num_chunks)
        if scale * (span.end - span.start) > max(0.16, 0.05 + _LETTER * len(name)):
            colour = "white" if span.chunk % 4 == 0 else "black"
            middle = (span.start + span.end) / 2
            text = axes.text(middle, span.stage, name, ha="center", va="center", fontsize=7, color=colour)
            text.set_clip_on(True)
            text.set_in_layout(False)  # saves computing its extent

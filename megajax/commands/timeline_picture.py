"""Draw a schedule's timeline as a picture: every pass of every stage, named by its microbatch where there is room."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megajax.commands.timeline_text import MOST_CELLS, cell_name
from megajax.core.pipeline.table import Schedule
from megajax.core.pipeline.timing import Span, StageTimes, timeline
from megajax.host.pictures import new_figure, save

MARK = b"megajax schedule"  # in a picture's metadata: the program that drew it
COLOURS = (  # forward, backward, weight gradients; for four chunks, then they repeat
    ("#4477aa", "#66ccee", "#88a9cc", "#a6dff5"),
    ("#228833", "#ccbb44", "#7cbb88", "#e3d98f"),
    ("#aa3377", "#ee99aa", "#cc79a7", "#f4c6d0"),
)
_WIDTHS = 8.0, 24.0  # least and most inches
_HEIGHTS = 0.5, 24.0  # inches of a stage, and most of all
_SHORTEST = 0.3  # inches for the shortest pass, if the width allows
_LETTER = 0.055  # inches
_MOST_LABELS = 32  # stages named on the axis


def draw_timeline(path: Path, title: str, schedule: Schedule, times: StageTimes, unit: str) -> None:
    """Draw the timeline into a PNG or SVG.

    Raises `OSError` if the file cannot be written.
    """
    _, spans = timeline(schedule, times)
    longest, shortest = max(span.end for span in spans), min(span.end - span.start for span in spans)
    width = min(_WIDTHS[1], max(_WIDTHS[0], _SHORTEST * longest / shortest))
    figure = new_figure((width, 1.6 + min(_HEIGHTS[0] * schedule.num_stages, _HEIGHTS[1])), dpi=110)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left")
    _cells(axes, spans, width / longest, shortest, schedule)
    axes.set_xlim(0, longest)
    axes.set_ylim(schedule.num_stages - 0.4, -0.6)
    named = range(0, schedule.num_stages, -(-schedule.num_stages // _MOST_LABELS))
    axes.set_yticks(list(named), [f"stage {stage}" for stage in named])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    axes.set_xlabel(f"time ({unit})")
    legend = _legend(schedule)
    figure.legend(handles=legend, loc="outside lower center", ncols=min(8, len(legend)), frameon=False, fontsize=8)
    save(figure, path, MARK)


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


def _cells(axes: Any, spans: Sequence[Span], scale: float, shortest: float, schedule: Schedule) -> None:
    """Draw every pass as a bar, with its microbatch if there is room; `scale` is in inches per unit of time."""
    from matplotlib.collections import PolyCollection

    corners = np.array([[span.start, span.end, span.stage - 0.42, span.stage + 0.42] for span in spans])
    bars = list(corners[:, [[0, 2], [0, 3], [1, 3], [1, 2]]])
    colours = [COLOURS[span.part][span.chunk % 4] for span in spans]
    many = len(spans) > MOST_CELLS
    gap = min(0.8, 10 * scale * shortest)  # points
    axes.add_collection(PolyCollection(bars, facecolors=colours, edgecolors="white", linewidths=gap, rasterized=many))
    for span in [] if many else spans:
        name = cell_name(span.microbatch, span.chunk, schedule.num_chunks)
        if scale * (span.end - span.start) > max(0.16, 0.05 + _LETTER * len(name)):
            colour = "white" if span.chunk % 4 == 0 else "black"
            middle = (span.start + span.end) / 2
            text = axes.text(middle, span.stage, name, ha="center", va="center", fontsize=7, color=colour)
            text.set_clip_on(True)
            text.set_in_layout(False)  # saves computing its extent

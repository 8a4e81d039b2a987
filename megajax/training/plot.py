"""A plot of a run's loss over its steps."""

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megajax.data.files import file_atomically

Points = Sequence[tuple[int, float]]  # step, loss in nats per token


def plot_loss(path: Path, name: str, training: Points, validation: Points) -> None:
    """Draw training and validation loss over the steps into a PNG, atomically.

    Args:
        path: the file.
        name: of the run, the title.
        training: steps and losses; losses that are not finite are left out.
        validation: the same.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    curves: tuple[tuple[str, Points, dict[str, Any]], ...] = (
        ("training", training, {"linewidth": 0.9, "color": "#4477aa", "marker": "." if len(training) == 1 else None}),
        ("validation", validation, {"linewidth": 1.6, "color": "#ee6677", "marker": "o", "markersize": 4}),
    )
    for label, points, style in curves:
        drawn = [(step, loss) for step, loss in points if math.isfinite(loss)]
        if drawn:
            axes.plot(*zip(*drawn, strict=True), label=f"{label} (last {drawn[-1][1]:.3f})", **style)
    axes.set_title(name, parse_math=False)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(frameon=False)
    with file_atomically(path) as new, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)  # a name in any script
        figure.savefig(new, format="png", metadata={"Software": "megajax train"})

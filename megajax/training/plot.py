"""The plot of a run's loss, and the tracker that draws it."""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megajax.host.files import file_atomically
from megajax.host.garbage import freed
from megajax.host.paths import identity
from megajax.host.pictures import new_figure, save
from megajax.training.trackers import Tracker

_SMOOTHED = 40  # shorter lines are not smoothed
_BLUE, _RED, _GRAY = "#4477aa", "#ee6677", "#777777"


@dataclass
class Curves:
    """The data of a plot."""

    training: list[tuple[int, float]] = field(default_factory=list)  # (step, loss in nats per token)
    validation: list[tuple[int, float]] = field(default_factory=list)  # the same
    tokens: list[tuple[int, int]] = field(default_factory=list)  # (step, tokens trained on so far)
    skipped: list[int] = field(default_factory=list)  # skipped steps
    resumed: list[int] = field(default_factory=list)  # steps after which the run was resumed
    _skipped_steps: int = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a line of metrics.jsonl."""
        step = record["step"]
        for points, name in ((self.training, "loss"), (self.validation, "validation_loss")):
            if name in record:
                points.append((step, math.nan if record[name] is None else float(record[name])))
        if record.get("tokens"):
            self.tokens.append((step, (self.tokens[-1][1] if self.tokens else 0) + int(record["tokens"])))
        if (skipped := record.get("skipped_steps") or 0) > self._skipped_steps:
            self.skipped.append(step)
            self._skipped_steps = skipped
        if record.get("resumed_from") is not None:
            self.resumed.append(record["resumed_from"])


class Plot(Tracker, ABC):
    """Redraws a picture in the run directory at every validation and at the end, if the directory still exists and
    there is something new to draw."""

    tries_again = True

    def __init__(self, run_dir: Path, file: str):
        self._run_dir, self._file, self._folder = run_dir, run_dir / file, identity(run_dir)
        self._drawn = 0  # what `points` was
        self.name = str(self._file)

    @abstractmethod
    def points(self) -> int:
        """How many points the picture would show."""

    @abstractmethod
    def draw(self, path: Path, name: str) -> None:
        """Draw the picture of the run called `name`, atomically."""

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        if "validation_loss" in figures:
            self._redraw()

    def close(self, *, finished: bool) -> None:
        self._redraw()

    def _redraw(self) -> None:
        points = self.points()
        if points != self._drawn and identity(self._run_dir) == self._folder:
            self._drawn = points
            with freed():
                self.draw(self._file, self._run_dir.resolve().name)


def save_plot(figure: Any, path: Path) -> None:
    """Write a figure as a PNG, atomically."""
    with file_atomically(path) as new:
        save(figure, new, b"megajax train")


class LossPlot(Plot):
    """loss.png; `curves` are those of earlier starts."""

    def __init__(self, run_dir: Path, curves: Curves):
        super().__init__(run_dir, "loss.png")
        self._curves = curves

    def points(self) -> int:
        return len(self._curves.training) + len(self._curves.validation)

    def draw(self, path: Path, name: str) -> None:
        plot_loss(path, name, self._curves)

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        self._curves.add({"step": step, **figures})
        super().figures(step, figures)


def plot_loss(path: Path, name: str, curves: Curves) -> None:
    """Draw training and validation loss over the steps as a PNG titled `name`, atomically."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure((8, 4.5), dpi=130)
    axes = figure.add_subplot()
    _draw_training(axes, _finite(curves.training))
    validation = _finite(curves.validation)
    if len(validation):
        style: dict[str, Any] = {"linewidth": 1.6, "color": _RED, "marker": "o", "markersize": 4}
        axes.plot(*validation.T, label=f"validation (last {validation[-1, 1]:.3f})", **style)
    bottom = axes.get_xaxis_transform()  # x in steps, y from 0 to 1
    if curves.skipped:
        style = {"color": "black", "markersize": 5, "label": f"{len(curves.skipped)} skipped"}
        axes.plot(curves.skipped, [0.02] * len(curves.skipped), "x", transform=bottom, **style)
    for number, step in enumerate(curves.resumed):
        label = f"{len(curves.resumed)} resumed" if number == 0 else ""  # one label for all lines
        axes.axvline(step, linewidth=1.0, linestyle=":", color=_GRAY, label=label)
    axes.set_title(name, parse_math=False)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="upper right")
    _add_tokens(axes, curves.tokens)
    save_plot(figure, path)


def _finite(points: list[tuple[int, float]]) -> npt.NDArray[np.float64]:
    """The points with a finite loss, [points, 2]."""
    return np.array([point for point in points if math.isfinite(point[1])], np.float64).reshape(-1, 2)


def _draw_training(axes: Any, points: npt.NDArray[np.float64]) -> None:
    if not len(points):
        return
    last = f"last {points[-1, 1]:.3f}"
    if len(points) < _SMOOTHED:
        marker = "." if len(points) == 1 else None
        axes.plot(*points.T, linewidth=0.9, color=_BLUE, marker=marker, label=f"training ({last})")
        return
    axes.plot(*points.T, linewidth=0.7, color=_BLUE, alpha=0.35, label=f"training, every step ({last})")
    mean = np.stack([points[:, 0], smoothed(points[:, 1])], axis=1)
    axes.plot(*mean.T, linewidth=1.6, color=_BLUE, label=f"training, smoothed (last {mean[-1, 1]:.3f})")


def smoothed(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Every value's mean with its neighbours: a fortieth of all values on each side, equally fewer on both sides at the
    beginning, where losses fall fast, and as many as there are at the end."""
    places = np.arange(len(values))
    before = np.minimum(places, max(2, len(values) // 40))
    after = np.minimum(before, places[::-1])
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[places + after + 1] - sums[places - before]) / (before + after + 1)


def _add_tokens(axes: Any, tokens: list[tuple[int, int]]) -> None:
    """A second axis at the top for tokens trained on, unless the tokens of a step are unknown."""
    if [step for step, _ in tokens] != list(range(1, len(tokens) + 1)) or not tokens:
        return
    from matplotlib.ticker import EngFormatter

    steps, totals = np.array([(0, 0), *tokens], np.float64).T
    above = axes.secondary_xaxis("top", functions=(_through(steps, totals), _through(totals, steps)))
    above.xaxis.set_major_formatter(EngFormatter(sep=""))
    above.set_xlabel("tokens")


def _through(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> Any:
    """Linear interpolation through points with ascending x and y, extended at both ends."""

    def extended(line: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.concatenate([[line[0] - 1e7 * (line[1] - line[0])], line, [line[-1] + 1e7 * (line[-1] - line[-2])]])

    return functools.partial(np.interp, xp=extended(x), fp=extended(y))

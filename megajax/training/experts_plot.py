"""The plot `experts.png`: how evenly a mixture's tokens are spread over its experts."""

import warnings
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megajax.host.files import file_atomically
from megajax.host.paths import identity
from megajax.host.pictures import freed
from megajax.training.trackers import Tracker

Loads = list[tuple[int, npt.NDArray[np.int32]]]  # (step, load [L, E])
_MOST = 3.0  # times the mean; higher loads get the same colour


class ExpertsPlot(Tracker):
    """Redraws experts.png at every validation and at the end, if the run directory still exists and there are loads;
    `loads` are those of earlier starts."""

    tries_again = True

    def __init__(self, run_dir: Path, loads: Loads):
        self._run_dir, self._loads, self._folder, self._drawn = run_dir, loads, identity(run_dir), 0
        self.name = str(run_dir / "experts.png")

    def loads(self, step: int, load_LE: npt.NDArray[np.int32]) -> None:
        self._loads.append((step, load_LE))

    def figures(self, step: int, figures: object) -> None:
        if isinstance(figures, dict) and "validation_loss" in figures:
            self._draw()

    def close(self, *, finished: bool) -> None:
        self._draw()

    def _draw(self) -> None:
        if len(self._loads) > self._drawn and identity(self._run_dir) == self._folder:
            self._drawn = len(self._loads)
            with freed():
                plot_loads(self._run_dir / "experts.png", self._run_dir.resolve().name, self._loads)


def plot_loads(path: Path, name: str, loads: Loads) -> None:
    """Draw the load of every expert in every layer over the steps, and the largest load, as a PNG, atomically."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    same = [(step, load) for step, load in loads if load.shape == loads[-1][1].shape]  # a file may be changed by hand
    steps = np.array([step for step, _ in same])
    load_NLE = np.stack([load for _, load in same]).astype(np.float64)
    share_NLE = load_NLE / np.maximum(load_NLE.mean(axis=2, keepdims=True), 1.0)
    _, layers, experts = share_NLE.shape
    figure = Figure(figsize=(8, 6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 3))
    above.plot(steps, share_NLE.max(axis=(1, 2)), color="#ee6677", linewidth=1.4, label="largest over all layers")
    above.plot(steps, share_NLE.max(axis=2).mean(axis=1), color="#4477aa", linewidth=1.4, label="mean of the layers")
    above.axhline(1.0, color="#777777", linewidth=0.8, linestyle=":")
    above.set_ylabel("largest load / mean")
    above.grid(alpha=0.3)
    above.legend(frameon=False)
    above.set_title(f"{name}: tokens of each expert", parse_math=False)
    half = (steps[-1] - steps[0]) / max(1, len(steps) - 1) / 2 or 0.5
    extent = (steps[0] - half, steps[-1] + half, layers, 0)
    image = share_NLE.reshape(len(steps), -1).T
    drawn = below.imshow(image, aspect="auto", extent=extent, vmin=0, vmax=_MOST, cmap="viridis", interpolation="none")
    below.set_ylabel(f"layer, {experts} experts each")
    below.yaxis.set_major_locator(MaxNLocator(integer=True))
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    below.set_xlabel("step")
    figure.colorbar(drawn, ax=below, label="load / mean", extend="max")
    with file_atomically(path) as new, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)  # a name in any script
        figure.savefig(new, format="png", metadata={"Software": "megajax train"})

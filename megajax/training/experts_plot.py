"""The plot `experts.png`: how evenly a mixture's tokens are spread over its experts."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from megajax.host.pictures import new_figure
from megajax.training.plot import Plot, save_plot

Loads = list[tuple[int, npt.NDArray[np.int32]]]  # (step, load [L, E])
_MOST = 3.0  # times the mean; higher loads get the same colour


class ExpertsPlot(Plot):
    """experts.png; `loads` are those of earlier starts."""

    def __init__(self, run_dir: Path, loads: Loads):
        super().__init__(run_dir, "experts.png")
        self._loads = loads

    def points(self) -> int:
        return len(self._loads)

    def draw(self, path: Path, name: str) -> None:
        plot_loads(path, name, self._loads)

    def loads(self, step: int, load_LE: npt.NDArray[np.int32]) -> None:
        self._loads.append((step, load_LE))


def plot_loads(path: Path, name: str, loads: Loads) -> None:
    """Draw the load of every expert in every layer over the steps, and the largest load, as a PNG, atomically."""
    from matplotlib.ticker import MaxNLocator

    same = [(step, load) for step, load in loads if load.shape == loads[-1][1].shape]  # a file may be changed by hand
    steps = np.array([step for step, _ in same])
    load_NLE = np.stack([load for _, load in same]).astype(np.float64)
    share_NLE = load_NLE / np.maximum(load_NLE.mean(axis=2, keepdims=True), 1.0)
    _, layers, experts = share_NLE.shape
    figure = new_figure((8, 6), dpi=130)
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
    save_plot(figure, path)

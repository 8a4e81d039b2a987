"""A picture of a search: every configuration that fits, by the memory it needs and the time of its step."""

from pathlib import Path
from typing import Any

from megajax.host.pictures import save
from megajax.plan.machines import GIB, Machine
from megajax.plan.search import Candidate, Found, schedule_in_words

MARK = b"megajax plan"  # in a picture's metadata: the program that drew it
_CLOUD, _FRONTIER = "Blues", "#cc3311"
_MOST_NAMES = 6  # of the frontier
_SLOWEST = 4.0  # times the fastest
_LINE = 0.052  # least distance of two labels, in heights of the picture


def draw_search(path: Path, title: str, machine: Machine, result: Found) -> None:
    """Draw the result of a search as a PNG or SVG: the density of configurations by memory and time, and the Pareto
    frontier with labelled points.

    Raises `OSError` if the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    fastest, usable = result.fitting[0].seconds, machine.usable / GIB
    right, low, high = 1.02 * usable, 0.85 * fastest, _SLOWEST * fastest
    shown = [point for point in result.fitting if point.seconds <= high]
    cloud = axes.hexbin(
        [point.bytes / GIB for point in shown], [point.seconds for point in shown],
        gridsize=(70, 28), extent=(0, right, low, high), bins="log", mincnt=1, cmap=_CLOUD, lw=0.2,
    )  # fmt: skip
    figure.colorbar(cloud, ax=axes, label="configurations", pad=0.01)
    frontier = [point for point in result.frontier if point.seconds <= high]
    axes.step(
        [point.bytes / GIB for point in reversed(frontier)], [point.seconds for point in reversed(frontier)],
        where="post", color=_FRONTIER, lw=1.5, marker="o", ms=4, label="Pareto frontier of time and memory",
    )  # fmt: skip
    axes.axvline(usable, color="black", lw=1, ls=":", label=f"memory a program gets on one {machine.name.upper()}")
    axes.set_xlim(0, right)
    axes.set_ylim(low, high)
    _label(axes, _named(frontier), right, (low, high))
    axes.set_xlabel("memory per GPU, GiB")
    axes.set_ylabel("predicted seconds per step")
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside lower center", ncols=2)
    save(figure, path, MARK)


def _label(axes: Any, named: list[Candidate], right: float, limits: tuple[float, float]) -> None:
    """Label points of the frontier from the fastest up; labels stand beside the points, one above the other."""
    low, high = limits
    bottom = -1.0
    for point in sorted(named, key=lambda point: point.seconds):
        height = (point.seconds - low) / (high - low)
        bottom = max(height, bottom + _LINE)
        axes.annotate(
            _words(point),
            (point.bytes / GIB, point.seconds),
            (max(point.bytes / GIB / right + 0.02, 0.08), min(bottom, 0.97)),
            textcoords="axes fraction",
            va="center",
            fontsize=8,
            arrowprops={"arrowstyle": "-", "color": _FRONTIER, "lw": 0.8, "relpos": (0, 0.5)},
            bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
        )


def _named(frontier: list[Candidate]) -> list[Candidate]:
    """The ends of the frontier and some between them, far from each other in memory."""
    if len(frontier) <= _MOST_NAMES:
        return frontier
    first, last = frontier[0].bytes, frontier[-1].bytes
    wanted = [first + (last - first) * step / (_MOST_NAMES - 1) for step in range(_MOST_NAMES)]
    chosen = [min(frontier, key=lambda each: abs(each.bytes - at)) for at in wanted]
    return list(dict.fromkeys(chosen))


def _words(point: Candidate) -> str:
    """A short label for a configuration."""
    base = point.base
    words = [str(base.mesh)] + [schedule_in_words(point.pipeline)] * (base.mesh.pipe > 1)
    rows = f"microbatch {base.train.microbatch}"
    words += [rows, f"remat {base.train.remat}", f"ZeRO-{base.optimizer.zero}"]
    return ", ".join(words + ["sequence parallel"] * base.sequence_parallel)

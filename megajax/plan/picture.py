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


def draw_search(path: Path, title: str, machine: Machine, found: Found) -> None:
    """Draw the result of a search as a PNG or SVG: the density of configurations by memory and time, and the Pareto
    frontier with labelled points.

    Raises `OSError` if the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    fastest, usable = found.fitting[0].seconds, machine.usable / GIB
    right, low, high = 1.02 * usable, 0.85 * fastest, _SLOWEST * fastest
    shown = [each for each in found.fitting if each.seconds <= high]
    cloud = axes.hexbin(
        [each.bytes / GIB for each in shown], [each.seconds for each in shown],
        gridsize=(70, 28), extent=(0, right, low, high), bins="log", mincnt=1, cmap=_CLOUD, lw=0.2,
    )  # fmt: skip
    figure.colorbar(cloud, ax=axes, label="configurations", pad=0.01)
    frontier = [each for each in found.frontier if each.seconds <= high]
    axes.step(
        [each.bytes / GIB for each in reversed(frontier)], [each.seconds for each in reversed(frontier)],
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
    for each in sorted(named, key=lambda each: each.seconds):
        height = (each.seconds - low) / (high - low)
        bottom = max(height, bottom + _LINE)
        axes.annotate(
            _words(each),
            (each.bytes / GIB, each.seconds),
            (max(each.bytes / GIB / right + 0.02, 0.08), min(bottom, 0.97)),
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


def _words(each: Candidate) -> str:
    """A short label for a configuration."""
    base = each.base
    words = [str(base.mesh)] + [schedule_in_words(each.pipeline)] * (base.mesh.pipe > 1)
    rows = f"microbatch {base.train.microbatch}"
    words += [rows, f"remat {base.train.remat}", f"ZeRO-{base.optimizer.zero}"]
    return ", ".join(words + ["sequence parallel"] * base.sequence_parallel)

"""A picture of a search: every configuration that fits, by the memory it needs and the time of its step."""

from pathlib import Path

from megajax.host.pictures import save
from megajax.plan.machines import GIB, Machine
from megajax.plan.search import Candidate, Found, schedule_in_words

MARK = b"megajax plan"  # in the pictures, as the program that drew them
_COLOURS = {1: "#4477aa", 2: "#66ccee", 4: "#228833", 8: "#ccbb44"}  # by tensor; more: the last
_MOST = "#ee6677"
_MOST_NAMES = 6  # of the frontier
_SLOWEST = 4.0  # times the fastest


def draw_search(path: Path, title: str, found: Found, machine: Machine) -> None:
    """Draw what was found into a PNG or SVG, the frontier marked: what nothing undercuts in both time and memory.

    Raises `OSError` if the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.5), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    fastest, by_tensor = found.fitting[0].seconds, dict[int, list[Candidate]]()
    for each in reversed(found.fitting):  # the fastest are drawn last
        by_tensor.setdefault(min(each.base.mesh.tensor, 16), []).append(each)
    for tensor, points in sorted(by_tensor.items()):
        label = f"tensor {tensor}" if tensor < 16 else "tensor 16 and more"
        axes.scatter(
            [each.bytes / GIB for each in points], [each.seconds for each in points],
            s=6, color=_COLOURS.get(tensor, _MOST), alpha=0.4, lw=0, label=label, rasterized=True,
        )  # fmt: skip
    frontier = [each for each in found.frontier if each.seconds <= _SLOWEST * fastest]
    axes.step(
        [each.bytes / GIB for each in reversed(frontier)], [each.seconds for each in reversed(frontier)],
        where="post", color="black", lw=1, marker="o", ms=4, label="Pareto frontier: less memory costs time",
    )  # fmt: skip
    for number, each in enumerate(_named(frontier), 1):
        place = each.bytes / GIB, each.seconds
        axes.annotate(str(number), place, (-9, -13), textcoords="offset points", fontsize=9, weight="bold")
        axes.plot([], [], " ", label=f"{number}  {_words(each)}")
    axes.axvline(machine.usable / GIB, color="black", lw=1, ls=":")
    axes.set_xlim(0, 1.02 * machine.usable / GIB)
    axes.set_ylim(0.85 * fastest, _SLOWEST * fastest)
    axes.set_xlabel(f"memory per device, GiB (dotted: what a program can have of a {machine.name})")
    axes.set_ylabel(f"predicted seconds of a step, up to {_SLOWEST:g} times the fastest's")
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, lw=0.5)
    legend = figure.legend(frameon=False, fontsize=8, markerscale=2, loc="outside lower left", ncols=2)
    for handle in legend.legend_handles:
        if handle is not None:
            handle.set_alpha(1)
    save(figure, path, MARK)


def _named(frontier: list[Candidate]) -> list[Candidate]:
    """The ends of the frontier and some between them, far from each other in memory."""
    if len(frontier) <= _MOST_NAMES:
        return frontier
    first, last = frontier[0].bytes, frontier[-1].bytes
    wanted = [first + (last - first) * step / (_MOST_NAMES - 1) for step in range(_MOST_NAMES)]
    chosen = [min(frontier, key=lambda each: abs(each.bytes - at)) for at in wanted]
    return list(dict.fromkeys(chosen))


def _words(each: Candidate) -> str:
    """A configuration, shortly."""
    base = each.base
    words = [str(base.mesh)] + [schedule_in_words(each.pipeline)] * (base.mesh.pipe > 1)
    rows = f"{base.train.microbatch} row{'s' * (base.train.microbatch > 1)}"
    words += [rows, f"remat {base.train.remat}", f"zero {base.optimizer.zero}"]
    return ", ".join(words + ["sequence split"] * base.sequence_parallel)

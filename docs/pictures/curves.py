"""Draw the losses of finished comparisons, which docs/benchmarks keeps as JSON: the pictures of docs/bitwise.md,
docs/float8.md, docs/recipes.md and docs/bert.md.

python docs/pictures/curves.py bitwise|float8|layer-order|muon docs/NAME.png
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

FIGURES = Path(__file__).resolve().parents[1] / "benchmarks"
BLUE, RED, GREY = "#3b82c4", "#e0604c", "#757575"  # readable on white and on black: the pictures have no ground
EVERY = 5  # steps whose mean is a point of float8
WINDOW = 6  # points of float8 whose mean is a point of the differences


def float8(figure: Figure, found: dict[str, Any]) -> None:
    """A column for each model: above the mean loss of the seeds, below what fp8 changes in each, against what the
    seed changes."""
    axes = figure.subplots(2, len(found), squeeze=False, sharex=True, sharey="row")
    for column, (preset, of) in enumerate(found.items()):
        bf16, fp8 = (_smooth(np.array([run["loss"] for run in of[name].values()])) for name in ("bf16", "fp8"))
        steps = EVERY * (WINDOW + np.arange(bf16.shape[1]))
        above, below = axes[:, column]
        above.plot(steps, bf16.mean(0), color=BLUE, lw=3, label="bf16")
        above.plot(steps, fp8.mean(0), color=RED, lw=1.5, ls="--", label="fp8")
        mean = bf16.mean(0)
        low, high = (100 * (end(bf16, 0) / mean - 1) for end in (np.min, np.max))
        below.fill_between(steps, low, high, color=BLUE, alpha=0.25, lw=0, label="other seeds, bf16")
        for number, change in enumerate(100 * (fp8 / bf16 - 1)):
            below.plot(steps, change, color=RED, lw=1.2, label=None if number else "fp8, each seed")
        above.set_title(preset)
        below.set_xlabel("step")
    axes[0, 0].set_ylabel("loss (nats)")
    axes[1, 0].set_ylabel("change of loss, %")
    axes[0, -1].legend()
    axes[1, 0].legend(loc="lower left")


def _smooth(losses_RT: np.ndarray) -> np.ndarray:
    """The mean of every WINDOW points in a row."""
    return np.apply_along_axis(np.convolve, 1, losses_RT, np.full(WINDOW, 1 / WINDOW), "valid")


def layer_order(figure: Figure, found: dict[str, Any]) -> None:
    """The validation curves of all seeds, a panel for every rate."""
    names = {"post": ("(a) norm after", RED), "pre": ("(b) norm before", BLUE)}
    runs = [(*run["case"], run["validation"]) for run in found["runs"]]
    rates = list(dict.fromkeys(rate for _, rate, *_ in runs))
    for axes, wanted in zip(figure.subplots(1, len(rates), sharey=True, squeeze=False)[0], rates, strict=True):
        for order, (name, colour) in names.items():
            curves = [curve for had, rate, _, curve in runs if (had, rate) == (order, wanted)]
            for number, curve in enumerate(curves):
                losses = [math.inf if loss is None else loss for _, loss in curve]
                axes.plot([step for step, _ in curve], losses, color=colour, label=None if number else name)
        axes.axhline(found["unigram_entropy"], color=GREY, linestyle=":", label="unigram entropy")
        axes.set_title(f"learning rate {wanted:g}")
        axes.set_xlabel("step")
    figure.axes[0].set_ylabel("masked-LM validation loss (nats)")
    figure.axes[-1].legend()


def muon(figure: Figure, found: dict[str, Any]) -> None:
    """The mean validation loss of the seeds, and where Muon's reaches AdamW's last one."""
    axes, found, means = figure.subplots(), found["demo"], {}
    for key, name, colour in (("adamw", "AdamW", BLUE), ("muon", "Muon", RED)):
        curves_RPX = np.array(list(found["curves"][key].values()))
        for curve_PX in curves_RPX:
            axes.plot(*curve_PX.T / [[1e3], [1]], color=colour, lw=0.8, alpha=0.45)
        tokens, means[key] = curves_RPX.mean(0).T / [[1e3], [1]]
        axes.plot(tokens, means[key], color=colour, lw=3, label=f"{name}, learning rate {found['best'][key]:g}")
    last = means["adamw"][-1]
    reached = np.interp(-last, -means["muon"], tokens)
    axes.annotate("", (reached, last), (tokens[-1], last), arrowprops={"arrowstyle": "->", "color": GREY, "lw": 1.5})
    words = f"Muon: AdamW's last loss\nafter {100 * reached / tokens[-1]:.0f}% of the tokens"
    axes.text(tokens[0], last, words, va="top", color=GREY)
    axes.set_xlabel("thousand tokens")
    axes.set_ylabel("validation loss (nats)")
    axes.set_title("mean of three seeds (thin: each)")
    axes.legend()


def bitwise(figure: Figure, found: dict[str, Any]) -> None:
    """What a run's loss differs by if it changes its mesh, with the flag and without."""
    axes = figure.subplots()
    for name, words, colour in (("without", "without", RED), ("with", f"--bitwise {found['parts']}", BLUE)):
        straight, moved = (np.array(found[name][run]) for run in ("straight", "moved"))
        axes.plot(1 + np.arange(len(moved)), moved - straight, color=colour, lw=1.5, label=words)
    for step, mesh in found["meshes"]:
        axes.axvline(step, color=GREY, ls=":", lw=0.8)
        axes.text(step + 1, 0.98, mesh, transform=axes.get_xaxis_transform(), va="top", fontsize="xx-small", color=GREY)
    axes.set_xlabel("step")
    axes.set_ylabel("difference of loss (nats)")
    axes.set_title("a run that changes its mesh, against one on one device")
    axes.legend(loc="lower right")


def main() -> None:
    """Draw the one that is named."""
    name, file = sys.argv[1:]
    size, draw = {
        "float8": ((10, 5), float8),
        "layer-order": ((8, 4.4), layer_order),
        "muon": ((7, 4.4), muon),
        "bitwise": ((8, 4), bitwise),
    }[name]
    grey = ("text.color", "axes.labelcolor", "axes.titlecolor", "axes.edgecolor", "xtick.color", "ytick.color")
    clear = {"figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none", "legend.frameon": False}
    text = {"font.size": 1.35 * size[0], "axes.titlesize": "medium", "legend.fontsize": "small"}
    with rc_context(dict.fromkeys(grey, GREY) | clear | text):
        figure = Figure(figsize=size, dpi=130, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure, json.loads((FIGURES / f"{name}.json").read_text()))
        for axes in figure.axes:
            axes.grid(alpha=0.3)
        figure.savefig(file)


if __name__ == "__main__":
    main()

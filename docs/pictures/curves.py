"""Draw the losses of finished comparisons, which docs/benchmarks keeps as JSON: the pictures of docs/float8.md,
docs/recipes.md and docs/benchmarks/layer-order.md.

python docs/pictures/curves.py float8|layer-order|muon docs/NAME.png
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

FIGURES = Path(__file__).resolve().parents[1] / "benchmarks"
BLUE, RED = "#4477aa", "#ee6677"
EVERY = 5  # steps whose mean is a point of float8


def float8(figure: Figure, found: dict[str, Any]) -> None:
    """Losses above, gradient norms below, a column for each model."""
    axes = figure.subplots(2, len(found), squeeze=False)
    for column, (preset, of) in enumerate(found.items()):
        for row, name in enumerate(("loss", "grad_norm")):
            own = axes[row, column]
            for (precision, runs), colour in zip(of.items(), (BLUE, RED), strict=True):
                for number, run in enumerate(runs.values()):
                    steps = [EVERY * (point + 1) for point in range(len(run[name]))]
                    label = None if number else precision
                    own.plot(steps, run[name], color=colour, lw=1, alpha=0.8, label=label)
            own.set_yscale("log")
            own.yaxis.set_major_formatter("{x:g}")
            own.yaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:e}"[0] in "23456" else "")
        axes[0, column].set_title(preset)
        axes[1, column].set_xlabel("step")
    axes[0, 0].set_ylabel("loss (nats)")
    axes[1, 0].set_ylabel("gradient norm")
    axes[0, 0].legend(frameon=False)


def layer_order(figure: Figure, found: dict[str, Any]) -> None:
    """The validation curves of all seeds, a panel for every rate."""
    names = {"post": ("(a) LayerNorm after the addition", RED), "pre": ("(b) LayerNorm before", BLUE)}
    runs = [(*run["case"], run["validation"]) for run in found["runs"]]
    rates = list(dict.fromkeys(rate for _, rate, *_ in runs))
    for axes, wanted in zip(figure.subplots(1, len(rates), sharey=True, squeeze=False)[0], rates, strict=True):
        for order, (name, colour) in names.items():
            curves = [curve for had, rate, _, curve in runs if (had, rate) == (order, wanted)]
            for number, curve in enumerate(curves):
                losses = [math.inf if loss is None else loss for _, loss in curve]
                axes.plot([step for step, _ in curve], losses, color=colour, label=None if number else name)
        axes.axhline(found["unigram_entropy"], color="#888888", linestyle=":", label="unigram entropy")
        axes.set_title(f"learning rate {wanted:g}")
        axes.set_xlabel("step")
    figure.axes[0].set_ylabel("masked-LM validation loss (nats)")
    figure.axes[-1].legend(frameon=False)


def muon(figure: Figure, found: dict[str, Any]) -> None:
    """The validation curves of all seeds of the demo."""
    axes, found = figure.subplots(), found["demo"]
    for key, name, colour in (("adamw", "AdamW", BLUE), ("muon", "Muon", RED)):
        for number, curve in enumerate(found["curves"][key].values()):
            label = None if number else f"{name}, learning rate {found['best'][key]:g}"
            axes.plot(*zip(*curve, strict=True), color=colour, label=label)
    axes.set_xlabel("tokens")
    axes.set_ylabel("validation loss (nats)")
    axes.legend(frameon=False)


def main() -> None:
    """Draw the one that is named."""
    name, file = sys.argv[1:]
    size, dpi, draw = {
        "float8": ((12.8, 5), 110, float8),
        "layer-order": ((9, 4), 130, layer_order),
        "muon": ((7, 4), 130, muon),
    }[name]
    figure = Figure(figsize=size, dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure, json.loads((FIGURES / f"{name}.json").read_text()))
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    figure.savefig(file)


if __name__ == "__main__":
    main()

"""Draw both ways of attention with context parallelism on four devices: the picture of docs/context.md.

python docs/pictures/context.py docs/context.png
"""

import sys
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

COLOURS = ["#4477aa", "#228833", "#ccbb44", "#aa3377"]  # of the devices
SIZE, HEADS = len(COLOURS), 4
PIECES = 2 * SIZE


def cells(axes: Any, left: float, bottom: float, owners: np.ndarray) -> None:
    """A grid [heads, tokens] of who has what, the first head on top; nobody is -1."""
    for (row, column), owner in np.ndenumerate(owners):
        colour = COLOURS[owner] if owner >= 0 else "none"
        place = left + column, bottom + len(owners) - 1 - row
        axes.add_patch(Rectangle(place, 1, 1, facecolor=colour, edgecolor="white" if owner >= 0 else "#bbbbbb", lw=0.8))


def of_heads(axes: Any) -> None:
    """Before attention a device has its tokens of all heads, in it all tokens of its heads."""
    tokens = np.tile(np.repeat(np.arange(SIZE), 2), (HEADS, 1))
    heads = np.repeat(np.arange(HEADS)[:, None], PIECES, 1)
    for left, owners, title in ((0, tokens, "own tokens, all heads"), (12, heads, "all tokens, own heads")):
        cells(axes, left, 0, owners)
        axes.text(left + PIECES / 2, HEADS + 0.35, title, ha="center", fontsize=10)
        axes.text(left + PIECES / 2, -0.75, "tokens →", ha="center", fontsize=9)
        axes.text(left - 0.3, HEADS / 2, "heads", va="center", ha="right", rotation=90, fontsize=9)
    for height, style, words in ((2.6, "->", "all-to-all\nof q, k, v"), (1.1, "<-", "all-to-all\nof the result")):
        line = {"arrowstyle": style, "lw": 1.4}
        axes.annotate("", (11.1, height), (8.3, height), arrowprops=line)
        axes.text(9.6, height + 0.2, words, ha="center", fontsize=8)


def of_gathering(axes: Any) -> None:
    """Two pieces of queries a device, the keys of all: which of them see which."""
    owner = np.minimum(np.arange(PIECES), PIECES - 1 - np.arange(PIECES))
    sees = np.where(np.tri(PIECES, dtype=bool), owner[:, None], -1)
    cells(axes, 0, 0, sees)
    for piece in range(PIECES):
        height = PIECES - 1 - piece
        axes.add_patch(Rectangle((-1.3, height), 0.9, 1, facecolor=COLOURS[owner[piece]], edgecolor="white", lw=0.8))
        axes.add_patch(Rectangle((piece, PIECES + 0.4), 1, 0.9, facecolor=COLOURS[owner[piece]], edgecolor="white"))
    axes.text(-1.6, PIECES / 2, "queries: own two pieces", va="center", ha="right", rotation=90, fontsize=9)
    axes.text(PIECES / 2, PIECES + 1.65, "keys and values: gathered from all →", ha="center", fontsize=10)
    words = "every device computes as many\nsquares: 1 + 8, 2 + 7, 3 + 6, 4 + 5"
    axes.text(PIECES + 0.6, PIECES / 2 + 1.2, words, fontsize=9)


def main() -> None:
    """Draw."""
    figure = Figure(figsize=(8.4, 6.4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, height_ratios=(1, 1.7))
    for axes, draw, title, limits in (
        (panels[0], of_heads, "heads", (-1.5, 24, -1, 5.4)),
        (panels[1], of_gathering, "gather, causal", (-3, 17, -0.2, PIECES + 2.4)),
    ):
        draw(axes)
        axes.set_title(title, loc="left", fontweight="bold")
        axes.set(xlim=limits[:2], ylim=limits[2:], aspect="equal")
        axes.axis("off")
        axes.set_anchor("W")
    legend = [Rectangle((0, 0), 1, 1, color=colour, label=f"device {n}") for n, colour in enumerate(COLOURS)]
    figure.legend(handles=legend, loc="outside lower center", ncols=SIZE, frameon=False)
    figure.savefig(sys.argv[1])


if __name__ == "__main__":
    main()

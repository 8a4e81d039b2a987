"""Draw both ways of attention with context parallelism on four devices: the picture of docs/context.md.

python docs/pictures/context.py docs/context.png
"""

import sys
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

COLOURS = ["#3b82c4", "#3f9b57", "#c99a1e", "#b5478f"]  # of the devices
GREY = "#757575"  # readable on white and on black: the picture has no ground
SIZE, HEADS = len(COLOURS), 4
PIECES = 2 * SIZE
TEXT = 11.5  # points


def cell(axes: Any, left: float, bottom: float, owner: int) -> None:
    """A square of who has it; nobody is -1."""
    colour = COLOURS[owner] if owner >= 0 else "none"
    edge = {"ec": GREY, "lw": 0.6, "ls": ":"} if owner < 0 else {"ec": "none"}
    axes.add_patch(Rectangle((left + 0.03, bottom + 0.03), 0.94, 0.94, fc=colour, **edge))


def cells(axes: Any, left: float, owners: np.ndarray) -> None:
    """A grid [heads, tokens], the first row on top."""
    for (row, column), owner in np.ndenumerate(owners):
        cell(axes, left + column, len(owners) - 1 - row, owner)


def of_heads(axes: Any) -> None:
    """Before attention a device has its tokens of all heads, in it all tokens of its heads."""
    tokens = np.tile(np.repeat(np.arange(SIZE), 2), (HEADS, 1))
    heads = np.repeat(np.arange(HEADS)[:, None], PIECES, 1)
    for left, owners, title in ((0, tokens, "own tokens, all heads"), (12.4, heads, "all tokens, own heads")):
        cells(axes, left, owners)
        axes.text(left + PIECES / 2, HEADS + 0.35, title, ha="center", fontsize=TEXT)
        axes.text(left + PIECES / 2, -0.9, "tokens →", ha="center", fontsize=TEXT)
        axes.text(left - 0.3, HEADS / 2, "heads", va="center", ha="right", rotation=90, fontsize=TEXT)
    for height, style, words in ((2.5, "->", "q, k, v"), (0.8, "<-", "result")):
        axes.annotate("", (11.3, height), (8.3, height), arrowprops={"arrowstyle": style, "lw": 1.4, "color": GREY})
        axes.text(9.8, height + 0.25, words, ha="center", fontsize=TEXT)


def of_gathering(axes: Any) -> None:
    """Two pieces of queries a device, the keys of all: which of them see which, and how many squares each computes."""
    owner = np.minimum(np.arange(PIECES), PIECES - 1 - np.arange(PIECES))
    cells(axes, 0, np.where(np.tri(PIECES, dtype=bool), owner[:, None], -1))
    for piece in range(PIECES):
        cell(axes, -1.4, PIECES - 1 - piece, owner[piece])
        cell(axes, piece, PIECES + 0.4, owner[piece])
    axes.text(-1.7, PIECES / 2, "own queries", va="center", ha="right", rotation=90, fontsize=TEXT)
    axes.text(PIECES / 2, PIECES + 1.65, "keys and values", ha="center", fontsize=TEXT)
    axes.text(10.2, 7.3, "each device computes", fontsize=TEXT)
    for device in range(SIZE):
        few, many = device + 1, PIECES - device
        for square in range(few + many):
            cell(axes, 10.2 + square, 5.6 - 1.3 * device, device)
    axes.text(10.2, 0.6, "9 squares: 1 + 8, 2 + 7, 3 + 6, 4 + 5", fontsize=TEXT)


def main() -> None:
    """Draw."""
    with rc_context({"text.color": GREY, "axes.titlecolor": GREY, "savefig.facecolor": "none"}):
        figure = Figure(figsize=(8.4, 6.9), dpi=110, layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(2, height_ratios=(1, 1.62))
        for axes, draw, title, limits in (
            (panels[0], of_heads, "heads: two all-to-alls", (-1.5, 21, -1.2, 5.2)),
            (panels[1], of_gathering, "gather: keys and values of all devices, causal", (-3, 19.6, -0.2, PIECES + 2.4)),
        ):
            draw(axes)
            axes.set_title(title, loc="left", fontweight="bold", fontsize=TEXT + 1)
            axes.set(xlim=limits[:2], ylim=limits[2:], aspect="equal")
            axes.axis("off")
            axes.set_anchor("W")
        legend = [Rectangle((0, 0), 1, 1, color=colour, label=f"device {n + 1}") for n, colour in enumerate(COLOURS)]
        figure.legend(
            handles=legend, loc="outside lower center", ncols=SIZE, frameon=False, fontsize=TEXT, handlelength=1
        )
        figure.savefig(sys.argv[1])


if __name__ == "__main__":
    main()

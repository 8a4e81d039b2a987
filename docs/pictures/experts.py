"""Draw how tokens reach their experts by capacity, on two devices: the picture of docs/experts.md.

python docs/pictures/experts.py docs/experts.png
"""

import sys
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

COLOURS = ["#3b82c4", "#e0604c"]  # of the devices, one sequence each
GREY = "#757575"  # readable on white and on black: the picture has no ground
CHOICES = [[0, 2, 0, 1, 0, 3], [2, 3, 1, 2, 0, 2]]  # of every sequence's tokens, one expert each
EXPERTS, CAPACITY = 4, 2
SIZE = 12.5  # of text, in points


def token(axes: Any, left: float, bottom: float, device: int, number: int | None, dropped: bool = False) -> None:
    """A token of a device's sequence; None: an empty place."""
    filled = number is not None and not dropped
    style = {"facecolor": COLOURS[device] if filled else "none", "ls": "-" if filled else ":"}
    axes.add_patch(Rectangle((left, bottom), 0.9, 0.9, edgecolor=COLOURS[device] if dropped else GREY, lw=1.2, **style))
    if number is not None:
        place = {"ha": "center", "va": "center", "fontsize": SIZE}
        axes.text(left + 0.45, bottom + 0.43, str(number + 1), color=COLOURS[device] if dropped else "white", **place)


def places(choices: list[int]) -> list[list[int]]:
    """The tokens that each expert takes of a sequence."""
    return [[t for t, chosen in enumerate(choices) if chosen == expert][:CAPACITY] for expert in range(EXPERTS)]


def sequence(axes: Any, device: int, base: float) -> None:
    """A device's tokens, the expert of each, and those that it drops."""
    taken = places(CHOICES[device])
    for number, chosen in enumerate(CHOICES[device]):
        dropped = number not in taken[chosen]
        token(axes, 0, base + 5 - number, device, number, dropped)
        words = f"→ expert {chosen + 1}" + (": full,\n     skips it" if dropped else "")
        axes.text(1.15, base + 5.45 - number, words, va="center", fontsize=SIZE, linespacing=0.95)


def experts(axes: Any, device: int, base: float) -> None:
    """A device's experts, each with the places that every sequence has there."""
    for own in range(EXPERTS // 2):
        expert, bottom = own + device * EXPERTS // 2, base + 3.9 - 2.6 * own
        axes.text(9.9, bottom + 1.25, f"expert {expert + 1}", fontsize=SIZE)
        for source in range(2):
            for place in range(CAPACITY):
                numbers = places(CHOICES[source])[expert]
                token(
                    axes, 9.9 + 2.1 * source + place, bottom, source, numbers[place] if place < len(numbers) else None
                )


def draw(axes: Any) -> None:
    """Two devices, one above the other: sequences on the left, experts on the right, between them the all-to-all."""
    for device in range(2):
        base = 7.2 * (1 - device)
        for left, width in ((-0.4, 5.5), (9.5, 5.0)):
            axes.add_patch(FancyBboxPatch((left, base - 0.3), width, 6.5, "round,pad=0.1", fc="none", ec=GREY, lw=1))
            axes.text(
                left + width / 2, base + 6.45, f"device {device + 1}", ha="center", fontsize=SIZE, fontweight="bold"
            )
        sequence(axes, device, base)
        experts(axes, device, base)
        for target in range(2):
            style = {"arrowstyle": "<->", "lw": 1.6, "color": COLOURS[device], "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (9.2, 7.2 * (1 - target) + 3 + 0.5 * (0.5 - device)), (5.4, base + 3), arrowprops=style)
    axes.text(7.3, 12.6, "all-to-all,\nand back", ha="center", va="center", fontsize=SIZE)
    axes.text(2.4, 14.7, "a sequence of each device", ha="center", fontsize=SIZE)
    axes.text(12.0, 14.7, "two places of each sequence", ha="center", fontsize=SIZE)


def main() -> None:
    """Draw."""
    with rc_context({"text.color": GREY, "savefig.facecolor": "none"}):
        figure = Figure(figsize=(8.4, 8), dpi=110, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        draw(axes)
        axes.set(xlim=(-0.7, 15.2), ylim=(-0.6, 15.3), aspect="equal")
        axes.axis("off")
        figure.savefig(sys.argv[1])


if __name__ == "__main__":
    main()

"""Draw how tokens reach their experts by capacity, on two devices: the picture of docs/experts.md.

python docs/pictures/experts.py docs/experts.png
"""

import sys
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

COLOURS = ["#4477aa", "#ee6677"]  # of the devices, one sequence each
CHOICES = [[0, 2, 0, 1, 0, 3], [2, 3, 1, 2, 0, 2]]  # of every sequence's tokens, one expert each
EXPERTS, CAPACITY = 4, 2


def token(axes: Any, left: float, bottom: float, device: int, number: int | None) -> None:
    """A token of a device's sequence; None: an empty place."""
    colour = COLOURS[device] if number is not None else "none"
    axes.add_patch(Rectangle((left, bottom), 0.9, 0.9, facecolor=colour, edgecolor="#999999", lw=0.8))
    if number is not None:
        axes.text(left + 0.45, bottom + 0.45, str(number + 1), ha="center", va="center", color="white", fontsize=9)


def places(choices: list[int]) -> list[list[int]]:
    """The tokens that each expert takes of a sequence."""
    return [[t for t, chosen in enumerate(choices) if chosen == expert][:CAPACITY] for expert in range(EXPERTS)]


def draw(axes: Any) -> None:
    """Sequences on the left, each sorted to places, then the places of each expert on its device."""
    for device, choices in enumerate(CHOICES):
        base = 6.4 * (1 - device)
        taken = places(choices)
        axes.text(-0.4, base + 2.4, f"device {device + 1}", rotation=90, va="center", ha="right", fontweight="bold")
        for number, chosen in enumerate(choices):
            token(axes, 0, base + 4.6 - number, device, number)
            words = f"→ {chosen + 1}" + ("" if number in taken[chosen] else ": full")
            axes.text(1.1, base + 5.05 - number, words, va="center", fontsize=9)
        for expert in range(EXPERTS):
            bottom = base + 4.1 - 1.3 * expert
            axes.text(4.3, bottom + 0.45, f"{expert + 1}", va="center", ha="right", fontsize=9)
            for place in range(CAPACITY):
                number = taken[expert][place] if place < len(taken[expert]) else None
                token(axes, 4.5 + place, bottom, device, number)
        for own in range(EXPERTS // 2):
            expert, bottom = own + device * EXPERTS // 2, base + 3.4 - 1.8 * own
            axes.text(10.8, bottom + 0.45, f"expert {expert + 1}", va="center", ha="right", fontsize=9)
            for source in range(2):
                for place in range(CAPACITY):
                    numbers = places(CHOICES[source])[expert]
                    number = numbers[place] if place < len(numbers) else None
                    token(axes, 11 + 2.1 * source + place, bottom, source, number)
    for left, title in (
        (0, "tokens and\ntheir experts"),
        (4.2, "two places of each\nexpert per sequence"),
        (11, "dense products"),
    ):
        axes.text(left, 12.2, title, fontsize=10, va="bottom")
    axes.annotate("", (9.0, 6.0), (6.9, 6.0), arrowprops={"arrowstyle": "<->", "lw": 1.4})
    axes.text(7.95, 6.25, "all-to-all,\nand back", ha="center", va="bottom", fontsize=9)


def main() -> None:
    """Draw."""
    figure = Figure(figsize=(8.4, 6.2), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    draw(axes)
    axes.set(xlim=(-1.2, 16), ylim=(-1.2, 13.6), aspect="equal")
    axes.axis("off")
    figure.savefig(sys.argv[1])


if __name__ == "__main__":
    main()

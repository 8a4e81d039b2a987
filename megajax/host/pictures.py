"""Pictures marked with the program that drew them, so that drawing never overwrites any other file."""

import warnings
from pathlib import Path
from typing import Any


def new_figure(inches: tuple[float, float], dpi: int) -> Any:
    """An empty matplotlib figure that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: Path, mark: bytes) -> None:
    """Write a matplotlib figure as .png or .svg, with `mark` in its metadata."""
    kind = path.suffix.lower().removeprefix(".")
    name = {"png": "Software", "svg": "Creator"}[kind]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)  # a name in any script
        figure.savefig(path, format=kind, metadata={name: mark.decode()})


def is_marked(file: Path, mark: bytes) -> bool:
    """Whether a file is a picture saved with `mark`."""
    if file.is_symlink() or not file.is_file():
        return False
    with file.open("rb") as content:
        head = content.read(4096)
    return b"tEXtSoftware\0" + mark in head or b"<dc:title>" + mark + b"</dc:title>" in head

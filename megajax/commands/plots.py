"""The file for `--plot`."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from megajax.core.errors import UserError
from megajax.host.files import file_atomically
from megajax.host.paths import check_place
from megajax.host.pictures import is_marked
from megajax.runs.ownership import check_outside_runs

FORMATS = (".png", ".svg")


def check_plot(plot: Path, mark: bytes, what: str) -> None:
    """Check that a picture can be written, and would overwrite only a `what`, that is, a picture marked with `mark`."""
    if plot.suffix.lower() not in FORMATS:
        raise UserError(f"--plot {plot}: unknown picture format; valid: a name that ends in {' or '.join(FORMATS)}")
    check_place(plot, "--plot")
    check_outside_runs(plot, "--plot")
    if os.path.lexists(plot) and not is_marked(plot, mark):
        raise UserError(f"--plot {plot} already exists and is not a {what}; valid: another name")


@contextlib.contextmanager
def plot_atomically(plot: Path) -> Iterator[Path]:
    """A temporary path for drawing a picture, which becomes `plot` when it is complete."""
    try:
        with file_atomically(plot) as new:
            yield new
    except OSError as error:
        raise UserError(f"--plot {plot}: cannot be written: {error.strerror}; valid: a writable place") from None

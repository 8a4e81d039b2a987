"""The files for `--plot` and `--html`."""

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


def check_page(page: Path) -> None:
    """Check that a page can be written, and would overwrite only another one."""
    from megajax.plan.page import is_page  # imports JAX

    if page.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--html {page}: not the name of a page; valid: a name that ends in .html")
    check_place(page, "--html")
    check_outside_runs(page, "--html")
    if os.path.lexists(page) and not is_page(page):
        raise UserError(f"--html {page} already exists and is not a page of megajax plan; valid: another name")


@contextlib.contextmanager
def plot_atomically(plot: Path, flag: str = "--plot") -> Iterator[Path]:
    """A temporary path for drawing a picture, which becomes `plot` when it is complete."""
    try:
        with file_atomically(plot) as new:
            yield new
    except OSError as error:
        raise UserError(f"{flag} {plot}: cannot be written: {error.strerror}; valid: a writable place") from None

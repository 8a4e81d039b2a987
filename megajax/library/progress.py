"""What the library's long calls do: shown on a terminal or in a notebook, and nowhere else."""

import contextlib
from collections.abc import Iterator

from rich.console import Console

from megajax.host.phases import phase, watched
from megajax.training.display import Display


@contextlib.contextmanager
def progress(name: str = "") -> Iterator[None]:
    """In the block every phase is shown on standard error, where somebody looks at that; with a `name` the block is
    one."""
    console = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        if console.is_terminal or console.is_jupyter:
            stack.enter_context(watched(Display(console=console).phase))
        if name:
            stack.enter_context(phase(name))
        yield

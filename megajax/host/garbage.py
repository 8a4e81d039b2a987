"""When Python collects garbage: what is in cycles, which only a collection frees."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def rarely_collected() -> Iterator[None]:
    """Collect less often in the block: tracing makes many objects that stay."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(100_000, *before[1:])
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


@contextlib.contextmanager
def freed() -> Iterator[None]:
    """Free the matplotlib figures made and dropped in the block. Each holds about 10 MB in cycles, which Python finds
    only in a full collection, and that is rare. Here they stay in the youngest generation, whose collection is
    quick."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect(0)
        if was_enabled:
            gc.enable()

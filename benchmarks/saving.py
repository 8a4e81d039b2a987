"""What saving costs a run: `python benchmarks/saving.py [PRESET] [flags of train.py]` trains and says where time went.

Blocked: the loop stood still for it, in `save` (copies to the host's memory, the first time their compilation too) and
waiting for the last one's end. Behind training: how long the thread that writes lived. Both together are the most that
saving can have taken, were the steps meanwhile not to advance at all.
"""

import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megajax.commands import train
from megajax.host.ending import run
from megajax.runs.checkpoint import Checkpoints
from megajax.runs.writing import Write


def timed(method: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """A method that notes how long it took."""

    @functools.wraps(method)
    def measured(*arguments: Any, **others: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*arguments, **others)
        finally:
            seconds.append(time.perf_counter() - began)

    return measured


def main() -> None:
    """Train in a folder of its own, then print one line of JSON."""
    saving: list[float] = []
    waiting: list[float] = []
    behind: list[float] = []
    Checkpoints.save = timed(Checkpoints.save, saving)  # type: ignore[method-assign]
    Checkpoints.wait = timed(Checkpoints.wait, waiting)  # type: ignore[method-assign]
    Write._run = timed(Write._run, behind)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Path(folder) / "run" / "checkpoints"
        began = time.perf_counter()
        train.main([*(sys.argv[1:] or ["demo"]), "--run-dir", str(checkpoints.parent)])
        total = time.perf_counter() - began
        size = sum(file.stat().st_size for file in checkpoints.rglob("*") if file.is_file())
        count = len(list(checkpoints.iterdir()))
    figures = {"seconds": total, "megabytes": size / count / 1e6, "save": saving, "wait": waiting, "behind": behind}
    blocked = sum(saving) + sum(waiting)
    shares = {"blocked": blocked / total, "at_most": (blocked + sum(behind)) / total}
    print(json.dumps(figures | shares))


if __name__ == "__main__":
    run(main)

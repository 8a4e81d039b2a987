"""What saving costs a run: time, or with --memory the devices' memory beside the state, by the compiler's account.

    python benchmarks/saving.py [PRESET] [train.py's flags] [--memory]

PRESET is demo unless given. It trains and says where time went: `blocked`, the loop stood still, in `save` (copies to
the host's memory, the first time their compilation too) and waiting for the last one's end; `behind`, how long the
thread that writes lived. Both together are the most that saving can have taken, were the steps meanwhile not to advance
at all. With --memory nothing is allocated (any `--data.path`, which is not read): megabytes of a device for the state,
all of it converted at once, and leaf by leaf the most that a conversion writes and needs meanwhile.
"""

import functools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import paired
from jax.sharding import NamedSharding, PartitionSpec

from megajax.commands import train
from megajax.host.ending import run
from megajax.runs.checkpoint import Checkpoints
from megajax.runs.writing import Write
from megajax.settings.config import Config
from megajax.start.launch import start


def timed(owner: type, name: str) -> list[float]:
    """How long the calls of a method take, from now on."""
    seconds: list[float] = []
    method: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(method)
    def measured(*arguments: Any, **others: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*arguments, **others)
        finally:
            seconds.append(time.perf_counter() - began)

    setattr(owner, name, measured)
    return seconds


def times(flags: list[str]) -> dict[str, Any]:
    """Train in a folder of its own."""
    saving, waiting = timed(Checkpoints, "save"), timed(Checkpoints, "wait")
    behind = timed(Write, "_run")
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Path(folder) / "run" / "checkpoints"
        began = time.perf_counter()
        train.main([*flags, "--run-dir", str(checkpoints.parent)])
        total = time.perf_counter() - began
        size = sum(file.stat().st_size for file in checkpoints.rglob("*") if file.is_file())
        count = len(list(checkpoints.iterdir()))
    blocked = sum(saving) + sum(waiting)
    found = {"seconds": total, "megabytes": size / count / 1e6, "save": saving, "wait": waiting, "behind": behind}
    return found | {"blocked": blocked / total, "at_most": (blocked + sum(behind)) / total}


def memory(config: Config) -> dict[str, float]:
    """Compile the conversions of every leaf of the weights, and of the whole state."""
    start(config)
    from megajax.core.parallel.collectives import PIPE
    from megajax.core.program.program import Program
    from megajax.core.program.transfer import Transfer

    layout = Program.on(config).layout
    transfer = Transfer(layout)

    def placed(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(layout.mesh, spec))

    state = jax.tree.map(placed, layout.shapes, layout.specs)
    weights = state.params if state.main is None else state.main
    there, back = [], []
    targets = jax.tree_util.tree_leaves_with_path(transfer.targets.params)
    for (path, target), leaf in zip(targets, jax.tree.leaves(weights), strict=True):
        spec, canonical, stacked = leaf.sharding.spec, target.sharding.spec, layout.is_stacked(path)
        by_stage = transfer.goes_by_stages(stacked, canonical)
        inputs = [np.int32(0)] if by_stage else []
        stored = (
            placed(leaf, PartitionSpec(None, PIPE, None, *canonical[1:])) if by_stage else placed(target, canonical)
        )
        there.append(needed(transfer.to_canonical(path, spec, canonical, target.dtype), leaf, *inputs))
        back.append(needed(transfer.from_canonical(path, canonical, spec, leaf.dtype), stored))
    figures = {
        "state": sum(shard_bytes(leaf) for leaf in jax.tree.leaves(state)),
        "all_at_once": needed(layout.to_canonical, state),
        "save_leaf_by_leaf": max(there),
        "restore_leaf_by_leaf": max(back),
        "largest_leaf": max(target.size * target.dtype.itemsize for _, target in targets),
    }
    return {name: round(size / 1e6, 1) for name, size in figures.items()}


def needed(function: Any, *types: Any) -> int:
    """Bytes that a compiled function writes and needs meanwhile, on a device."""
    found = function.lower(*types).compile().memory_analysis()
    return found.output_size_in_bytes + found.temp_size_in_bytes


def shard_bytes(leaf: Any) -> int:
    """Bytes of a device's part of an array."""
    part = jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
    return part.size * part.dtype.itemsize


def main() -> None:
    """Print one line of JSON."""
    own, flags, config = paired.command_line(__doc__, "demo", memory=False)
    print(json.dumps(memory(config) if own.memory else times(flags)))


if __name__ == "__main__":
    run(main)

"""What the devices need beside the state to save and restore it, by the compiler's account: nothing is allocated.

`python benchmarks/saving_memory.py PRESET [flags of train.py]`, such as `gpt2-355m --mesh.pipe 7 --simulate-devices 7`
(any `--data.path`, which is not read). Megabytes of a device: the state, all of it converted at once, and leaf by leaf
the most that a conversion writes and needs meanwhile; beside them the largest leaf as a whole.
"""

import json
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from megajax.host.ending import run
from megajax.settings.flags import parse
from megajax.start.launch import start


def needed(function: Any, *types: Any) -> int:
    """Bytes that a compiled function writes and needs meanwhile, on a device."""
    memory = function.lower(*types).compile().memory_analysis()
    return memory.output_size_in_bytes + memory.temp_size_in_bytes


def main() -> None:
    """Print one line of JSON."""
    config = parse(sys.argv[1:], "What saving needs of the devices' memory.")
    start(config)
    from megajax.core.parallel.collectives import PIPE, spec_axes
    from megajax.core.program.program import Program
    from megajax.core.program.state import is_stacked
    from megajax.core.program.transfer import Transfer

    layout = Program.on(config).layout
    transfer = Transfer(layout)
    state = jax.tree.map(
        lambda shape, spec: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(layout.mesh, spec)),
        layout.shapes,
        layout.specs,
    )
    weights = state.params if state.main is None else state.main
    specs = layout.specs.params if state.main is None else layout.specs.main
    there, back, largest = [], [], 0
    for (path, target), leaf, spec in zip(
        jax.tree_util.tree_leaves_with_path(transfer.targets.params),
        jax.tree.leaves(weights),
        jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)),
        strict=True,
    ):
        placed = NamedSharding(layout.mesh, target.sharding.spec)
        canonical = jax.ShapeDtypeStruct(target.shape, target.dtype, sharding=placed)
        stage = [] if PIPE in spec_axes(placed.spec) or not is_stacked(path) or config.mesh.pipe == 1 else [0]
        if stage:
            pipelined = NamedSharding(layout.mesh, PartitionSpec(None, PIPE, None, *placed.spec[1:]))
            canonical = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=pipelined)
        there.append(needed(transfer.to_canonical(is_stacked(path), spec, placed.spec), leaf, *map(np.int32, stage)))
        back.append(needed(transfer.from_canonical(is_stacked(path), placed.spec, spec), canonical))
        largest = max(largest, target.size * target.dtype.itemsize)
    figures = {
        "state": sum(shard_bytes(leaf) for leaf in jax.tree.leaves(state)),
        "all_at_once": needed(layout.to_canonical, state),
        "save_leaf_by_leaf": max(there),
        "restore_leaf_by_leaf": max(back),
        "largest_leaf": largest,
    }
    print(json.dumps({name: round(size / 1e6, 1) for name, size in figures.items()}))


def shard_bytes(leaf: Any) -> int:
    """Bytes of a device's part of an array."""
    part = jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
    return part.size * part.dtype.itemsize


if __name__ == "__main__":
    run(main)

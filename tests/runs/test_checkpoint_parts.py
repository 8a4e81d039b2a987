"""Parts of a checkpoint: what only computes with the weights reads nothing else; a state that is written leaf by leaf
is stored as one that was in memory as a whole."""

import dataclasses
import json
import os
import weakref
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tensorstore
from tiny import full, tiny_config, tiny_program

from megajax.core.errors import Damaged
from megajax.runs.checkpoint import Checkpoints
from megajax.runs.digests import read_manifest
from megajax.runs.trained import restore_params, weights_in_parts

STEP = 5


def remove_arrays(checkpoint: Path, prefix: str) -> None:
    """Remove arrays of a checkpoint from the disk: those whose names begin so."""
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{checkpoint / 'state'}/"}).result()
    names = [name for name in store.list().result() if name.startswith(prefix.encode())]
    assert names
    for name in names:
        store.write(name, None).result()


@pytest.mark.usefixtures("find_abandoned_reads")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
def test_weights_are_restored_without_the_moments(tmp_path: Path) -> None:
    """On another mesh, from a checkpoint that has lost the moments: training notices, evaluation does not need them."""
    first = tiny_program(tiny_config((1, 2, 1), precision="bf16", num_layers=2)).layout
    rng = np.random.default_rng(0)
    state = first.from_canonical(
        jax.tree.map(lambda leaf: rng.uniform(1, 9, leaf.shape).astype(leaf.dtype), first.canonical_shapes)
    )
    writer = Checkpoints(tmp_path, first, keep=1)
    writer.save(STEP, state)
    writer.close()
    checkpoint = tmp_path / "checkpoints" / str(STEP)
    remove_arrays(checkpoint, "optimizer.")
    remove_arrays(checkpoint, "recent_norms")
    program = tiny_program(tiny_config((2, 1, 1), precision="bf16", zero=3, num_layers=2))
    params, step = restore_params(program, tmp_path, "latest")
    assert step == STEP
    whole = first.canonical_weights(state.params)
    jax.tree.map(np.testing.assert_array_equal, program.layout.canonical_weights(params), whole)
    jax.tree.map(
        lambda leaf, spec: leaf.sharding.spec == spec or pytest.fail(str(spec)), params, program.layout.specs.params
    )
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{checkpoint / 'state'}/"}).result()
    name = "params.shared.final_norm.scale/.zarray"
    stored = store.read(name).result().value
    store.write(name, json.dumps(json.loads(stored) | {"chunks": [2**40]}).encode()).result()
    with pytest.raises(Damaged, match=r"final_norm\.scale/\.zarray has chunks of \[1099511627776\], larger than the"):
        restore_params(program, tmp_path, "latest")
    store.write(name, stored).result()
    for name in ("params.blocks.mlp.up", "params.shared.table"):
        reader = Checkpoints(tmp_path, program.layout)
        with pytest.raises(Damaged):
            reader.restore(STEP)
        remove_arrays(checkpoint, name)
        with pytest.raises(Damaged):
            reader.restore_params(STEP)


@pytest.mark.parametrize("precision", ["fp32", full("fp16")])
@pytest.mark.slow
def test_a_new_state(precision: str, tmp_path: Path) -> None:
    """The same checksums of all arrays, and the same state; of the weights one is there at a time."""
    config = dataclasses.replace(tiny_config(num_layers=3), precision=precision)
    layout = tiny_program(config).layout
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), layout.canonical_shapes.params)
    named = dict(jax.tree_util.tree_leaves_with_path(weights))
    there: list[weakref.ref] = []

    def weight(path: Any, shape: tuple[int, ...]) -> np.ndarray:
        assert not any(ref() is not None for ref in there)
        made = named[path].copy()
        assert made.shape == shape
        there.append(weakref.ref(made))
        return made

    parts, whole = (Checkpoints(tmp_path / name, layout, keep=1) for name in ("parts", "whole"))
    parts.save_new(weight)
    whole.save(0, layout.from_canonical(layout.begin(weights)))
    parts.wait()
    whole.wait()
    assert len(there) == len(named)
    sums = [read_manifest(tmp_path / name / "checkpoints/0").arrays for name in ("parts", "whole")]
    assert sums[0] == sums[1] and len(sums[0]) > 3 * len(named)

    states = [jax.device_get(Checkpoints(tmp_path / name, layout).restore(0)) for name in ("parts", "whole")]
    jax.tree.map(np.testing.assert_array_equal, *states)

    read, step = weights_in_parts(layout, tmp_path / "parts", "latest")
    for path, expected in named.items():
        np.testing.assert_array_equal(read([path])[0], expected)
    assert step == 0


@pytest.mark.usefixtures("no_waiting")
def test_damage_is_found_in_the_part_that_is_read(tmp_path: Path) -> None:
    """Or before: a named pipe is not opened, whoever reads."""
    layout = tiny_program(tiny_config(num_layers=2)).layout
    checkpoints = Checkpoints(tmp_path, layout, keep=1)
    checkpoints.save_new(lambda _, shape: np.ones(shape, np.float32))
    checkpoints.wait()
    manifest = read_manifest(tmp_path / "checkpoints/0")
    manifest.arrays[".params['shared']['table']"] += 1
    manifest.write(tmp_path / "checkpoints/0")
    read, _ = weights_in_parts(layout, tmp_path, "latest")
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(layout.canonical_shapes.params)]
    table, positions = (next(path for path in paths if name in str(path)) for name in ("table", "positions"))
    assert read([positions])[0].all()
    with pytest.raises(Damaged, match="1 arrays differ"):
        read([table])
    file = tmp_path / "checkpoints/0/state/manifest.ocdbt"
    file.unlink()
    os.mkfifo(file)
    for read_it, problem in ((lambda: read([positions]), "not a file"), (checkpoints.restore_newest, "missing")):
        with pytest.raises(Damaged, match=rf"state/manifest\.ocdbt is {problem}"):
            read_it()

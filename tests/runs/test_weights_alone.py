"""What only computes with the weights reads nothing else of a checkpoint."""

from pathlib import Path

import jax
import numpy as np
import pytest
import tensorstore
from tiny import tiny_config, tiny_program

from megajax.runs.checkpoint import Checkpoints
from megajax.runs.stored import DamagedCheckpoint
from megajax.runs.trained import restore_params

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
    for name in ("params.blocks.mlp.up", "params.shared.table"):
        reader = Checkpoints(tmp_path, program.layout)
        with pytest.raises(DamagedCheckpoint):
            reader.restore(STEP)
        remove_arrays(checkpoint, name)
        with pytest.raises(DamagedCheckpoint):
            reader.restore_params(STEP)

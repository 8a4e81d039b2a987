"""The mesh: Megatron-LM's rank groups, which dim of which weight is split over which axis, and a further axis."""

import dataclasses
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tiny import LATENT, MIXTURE, tiny_config, tiny_program

from megajax.core.axes import AXES
from megajax.core.backend import CPU
from megajax.core.config import MeshConfig
from megajax.core.mesh import (
    RULES,
    local_shape,
    make_abstract_mesh,
    make_mesh,
    mesh_spec,
    rank_groups,
    sharded_spec,
    zero_sharding,
)
from megajax.core.models.registry import FAMILIES
from megajax.core.models.staged import StagedModel
from megajax.core.optim.config import OptimizerConfig
from megajax.core.options import options as options_of
from megajax.core.parallel.boundary import F_AND_G
from megajax.core.parallel.collectives import spec_axes
from megajax.core.parallel.shards import NOT_SHARDED, Sharding
from megajax.data.synthetic import random_batch

# The documented placement of the weights, without the leading dims of the stacked layers (paper §3).
SHARED_SPECS = {
    "shared/table": P("tensor", None),  # the vocabulary's rows
    "shared/positions": P(None, None),
    "shared/final_norm/scale": P(None),
    "shared/final_norm/bias": P(None),
}
BLOCK_SPECS = {
    "blocks/attention_norm/scale": P(None),
    "blocks/attention_norm/bias": P(None),
    "blocks/attention/query/weight": P(None, "tensor", None),  # columns, by head
    "blocks/attention/query/bias": P("tensor", None),
    "blocks/attention/key/weight": P(None, "tensor", None),
    "blocks/attention/key/bias": P("tensor", None),
    "blocks/attention/value/weight": P(None, "tensor", None),
    "blocks/attention/value/bias": P("tensor", None),
    "blocks/attention/output/weight": P("tensor", None, None),  # rows, by head
    "blocks/attention/output/bias": P(None),
    "blocks/mlp_norm/scale": P(None),
    "blocks/mlp_norm/bias": P(None),
    "blocks/mlp/up/weight": P(None, "tensor"),  # columns
    "blocks/mlp/up/bias": P("tensor"),
    "blocks/mlp/down/weight": P("tensor", None),  # rows
    "blocks/mlp/down/bias": P(None),
}


@dataclass(frozen=True)
class Device:
    """Stands for a device where only its place in the mesh matters."""

    id: int


def by_path(tree) -> dict:
    """Leaves by path: `blocks/mlp/up/weight`."""
    paths = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, P))[0]
    return {"/".join(str(key.key) for key in path): leaf for path, leaf in paths}


def test_rank_groups_are_the_documented_ones():
    """16 devices, tensor 2, pipe 4, data 2: every group of REFERENCE §2."""
    groups = rank_groups(make_mesh(data=2, pipe=4, tensor=2, devices=[Device(i) for i in range(16)]))
    assert groups == {
        "tensor": [[i, i + 1] for i in range(0, 16, 2)],
        "pipe": [[i, i + 4, i + 8, i + 12] for i in range(4)],
        "data": [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
        "model": [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]],
        "embedding": [[0, 12], [1, 13], [2, 14], [3, 15]],
    }


def test_a_pipe_of_one_has_embedding_groups_of_one():
    """First and last stage are the same device."""
    groups = rank_groups(make_mesh(data=2, pipe=1, tensor=2, devices=[Device(i) for i in range(4)]))
    assert groups["embedding"] == groups["pipe"] == [[0], [1], [2], [3]]
    assert groups["model"] == groups["tensor"] == [[0, 1], [2, 3]]


def test_axes_have_their_sizes():
    """The axes are (data, expert, pipe, context, tensor), whatever the devices' order, and so are the options."""
    mesh = make_mesh(data=2, pipe=4, tensor=3, devices=[Device(i) for i in range(24)])
    assert list(mesh.shape.items()) == [("data", 2), ("expert", 1), ("pipe", 4), ("context", 1), ("tensor", 3)]
    assert [*options_of(MeshConfig)] == list(AXES) == list(mesh.shape)


def test_replicas_are_outside_of_what_zero_shards_over():
    """Of 8 ranks of data, 2 in each group of shards, which are neighbours. Without replicas there is no axis."""
    optimizer = OptimizerConfig(learning_rate=1.0, zero_ranks=2)
    config = dataclasses.replace(tiny_config((8, 1, 2), global_batch=8), optimizer=optimizer)
    groups = rank_groups(make_mesh([Device(i) for i in range(16)], **config.mesh.on_devices))
    assert groups["data"] == [[i, i + 2] for i in (0, 1, 4, 5, 8, 9, 12, 13)]
    assert groups["replica"] == [[i, i + 4, i + 8, i + 12] for i in range(4)]
    assert (config.mesh.row_shards, config.mesh.zero_shards, config.mesh.num_devices) == (8, 2, 16)
    for changes in ({"zero": 0}, {"zero_ranks": 8}, {"zero_ranks": 0}):
        other = dataclasses.replace(config, optimizer=dataclasses.replace(optimizer, **changes))
        assert "replica" not in other.mesh.on_devices and other.mesh.sizes == config.mesh.sizes
    assert dataclasses.replace(config, mesh=MeshConfig(data=3)).mesh.replica == 1  # only training refuses it


def test_tokens_of_a_batch_can_be_sharded(monkeypatch: pytest.MonkeyPatch):
    """Over an axis of tokens, of the arrays that have a dim of tokens."""
    monkeypatch.setattr("megajax.core.mesh.BATCH_RULES", {"tokens": "tensor"})
    program = tiny_program(tiny_config((2, 1, 2), family="bert"))
    batch = random_batch(program.config, 0)
    for name, array in program.put_batch(batch, program.local_rows).items():
        assert (np.asarray(array) == batch[name]).all()
        tokens = 2 if "tokens" in program.form.entries[name].dims else 1
        assert array.addressable_shards[0].data.size == array.size // 2 // tokens, name


def test_one_mesh_axis_splits_one_dim_only():
    """Two dims of one array on the same axis are an error, and so is a name without a rule."""
    assert mesh_spec(P("embed", "mlp")) == P(None, "tensor")
    with pytest.raises(ValueError, match="same mesh axis"):
        mesh_spec(P("vocabulary", "heads"))
    with pytest.raises(KeyError):
        mesh_spec(P("width"))


def test_every_logical_name_has_a_rule():
    """The names on the weights, and those of the pipelined layers' leading dims, are those of the table."""
    names = {"chunks", "stages"}
    families, linear = ({"family": family} for family in FAMILIES), {"linear_heads": 4, "linear_decay": "channel"}
    for options in (*families, MIXTURE | {"bias": "all"}, LATENT, linear):
        model = StagedModel(tiny_config(**options).model, F_AND_G, CPU)
        specs, shapes = by_path(model.logical_specs), by_path(model.shapes)
        names |= {name for spec in specs.values() for name in spec}
        assert {name: len(spec) for name, spec in specs.items()} == {name: leaf.ndim for name, leaf in shapes.items()}
    assert names | {"rank", "outer_rank"} == set(RULES)  # of LoRA's adapters


def test_weights_are_split_as_in_the_paper():
    """Table by rows, first matrices by columns, second ones by rows, the rest duplicated; layers over the pipe."""
    specs = by_path(tiny_program(tiny_config((2, 2, 2))).layout.specs.params)
    pipelined = {name: P(None, "pipe", None, *spec) for name, spec in BLOCK_SPECS.items()}
    assert specs == SHARED_SPECS | pipelined


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_moments_are_placed_like_the_weights_they_are_for(zero):
    """AdamW's moments and main weights have the specs of the weights (0), or also `data` on one dim (1); all of them
    (3). Counters are replicated."""
    layout = tiny_program(tiny_config((2, 2, 2), zero=zero, precision="bf16")).layout
    adam, params = layout.specs.optimizer[0], by_path(layout.specs.params)
    assert by_path(adam.mu) == by_path(adam.nu) == by_path(layout.specs.main) == by_path(layout.trained_specs)
    assert (by_path(layout.trained_specs) == params) == (zero != 1)
    assert all(("data" in spec_axes(spec)) == (zero == 3) for spec in params.values())
    assert all(("data" in spec_axes(spec)) == (zero > 0) for spec in by_path(layout.trained_specs).values())
    assert adam.count == P()


ZERO = ("data", "expert", "context")


@pytest.mark.parametrize(
    ("data", "spec", "shape", "expected"),
    [
        (2, P(), (6, 8, 4), P(ZERO, None, None)),  # the first dim
        (4, P(), (6, 8, 4), P(None, ZERO, None)),
        (2, P("tensor"), (64, 8), P(("tensor", *ZERO), None)),  # though it is split already
        (2, P(("pipe", "tensor")), (64,), P(("pipe", "tensor", *ZERO))),
        (2, P("tensor"), (6, 7), P("tensor", ZERO)),  # a device's three rows are not divisible: 7 is padded to 8
        (3, P(), (64, 32, 8), P(ZERO, None, None)),  # by 2 of 64 or, the same, 1 of 32; not by 1 of 8
        (3, P(), (8, 32, 62), P(None, None, ZERO)),
        (3, P("tensor"), (64, 1), P("tensor", None)),  # nothing else may be padded
        (64, P(), (64, 8), P(ZERO, None)),
        (63, P(), (64, 8), P(ZERO, None)),  # 32 devices have something, not 8
        (2, P(), (), P()),
        (1, P(), (8,), P(None)),
    ],
)
def test_the_dim_that_zero_shards(data, spec, shape, expected):
    spec = P(*spec, *[None] * (len(shape) - len(spec)))
    sizes = make_abstract_mesh(data=data, pipe=2, tensor=2).shape
    sharding = zero_sharding(spec, shape, sizes)
    assert sharded_spec(spec, sharding) == expected
    if sharding.axes:
        assert (local_shape(spec, shape, sizes)[sharding.dim] + sharding.padding) % data == 0
        assert 0 <= sharding.padding < data


def test_two_dims_that_zero_joins():
    """Neighbours that nothing else shards, where a single dim needs more than a 64th of padding."""
    sizes, shape = make_abstract_mesh(data=7, pipe=1, tensor=2).shape, (4, 30, 50)
    sharding = zero_sharding(P(None, None, None), shape, sizes, joins=range(3))
    assert sharding == Sharding(-1, ZERO, padding=5, joined=(30, 50)) and sharding.if_even == NOT_SHARDED
    assert sharded_spec(P(None, None, None), sharding) == P(None, ZERO)
    x = np.arange(6000).reshape(shape)
    padded = sharding.padded(jnp.asarray(x))
    assert padded.shape == sharding.padded_shape(shape) == (4, 1505) and not padded[:, 1500:].any()
    assert (sharding.without_padding(padded) == x).all()
    by_columns = zero_sharding(P(None, None, "tensor"), shape, sizes, joins=range(3))
    assert by_columns == Sharding(-2, ZERO, padding=6, joined=(4, 30))
    assert sharded_spec(P(None, None, "tensor"), by_columns) == P(ZERO, "tensor")
    assert by_columns.without_padding(by_columns.padded(jnp.asarray(x))).tolist() == x.tolist()
    assert zero_sharding(P(None, None), (512, 30), sizes, joins=range(2)) == Sharding(-2, ZERO, padding=6)


def test_a_context_group_sits_between_data_and_tensor():
    """In the devices' order; its groups are named where there are several."""
    groups = rank_groups(make_mesh(data=2, context=2, tensor=2, devices=[Device(i) for i in range(8)]))
    assert groups["context"] == [[0, 2], [1, 3], [4, 6], [5, 7]] and groups["data"] == [[0, 4], [1, 5], [2, 6], [3, 7]]


ROOT = Path(__file__).parents[2]
LINES = {  # by file: the line before, and the new one
    "core/axes.py": ('    "data": {"rows"},', '    "further": {"rows"},'),
    "core/config.py": ("    tensor: Annotated[", '    further: Annotated[int, "one more axis of rows", _AXIS] = 1'),
}
TRAIN = """
import dataclasses
import sys
import jax
import numpy as np

from megajax.core.config import MeshConfig
from megajax.settings.presets import load_preset, resolve
from megajax.core.program.program import Program
from megajax.core.program.transfer import Transfer
from megajax.core.parallel.collectives import spec_axes
from megajax.verify.exact import compare_exactly, compare_with_plan
from megajax.verify.fields import run_step
from megajax.verify.forms import in_blocks, plain, steady
from megajax.verify.run import drawn_state
from megajax.verify.shrink import shrink

jax.config.update("jax_num_cpu_devices", 8)
mesh = {"mesh.data": 2, "mesh.further": 2, "mesh.tensor": 2, "model.scan_layers": "true"}
small = steady(shrink(resolve(load_preset("demo"), mesh), 8).config)
reference = run_step(plain(small), branches=False)
zero = int(sys.argv[1])
config = dataclasses.replace(small, optimizer=dataclasses.replace(small.optimizer, zero=zero))
program = Program.on(config)
layout = program.layout
sharded = [{"data", "further"} <= spec_axes(spec) for spec in jax.tree.leaves(layout.trained_specs)]
assert dict(layout.mesh.shape) == {"data": 2, "further": 2, "expert": 1, "pipe": 1, "context": 1, "tensor": 2}
assert any(sharded), sharded
rows = small.train.global_batch
row_BT = np.tile(np.arange(rows, dtype=np.int32)[:, None], small.model.sequence_length)
batch = program.put_batch(dict.fromkeys(program.batch_types, row_BT), program.local_rows)
held = [shard.data[:, 0].tolist() for shard in batch["tokens"].addressable_shards]
assert sum(held[::2], []) == list(range(rows)) and held[::2] == held[1::2], held
step = run_step(config, in_blocks(config), branches=False)
found = [*compare_exactly(reference, step), compare_with_plan(step)]
assert found and all(finding.passed for finding in found), "\\n".join(map(str, found))
alone = dataclasses.replace(small, mesh=MeshConfig(further=2), train=dataclasses.replace(small.train, microbatch=1))
program = Program.on(alone, jax.devices()[:2])
state, transfer = program.layout.from_canonical(drawn_state(program)), Transfer(program.layout)
back = transfer.to_devices(transfer.to_host(state))
assert jax.tree.all(jax.tree.map(lambda one, other: (np.asarray(one) == np.asarray(other)).all(), state, back))
"""


@pytest.mark.full
@pytest.mark.parametrize("zero", ["1", "3"])
def test_a_further_axis_of_rows_trains_as_one_device(tmp_path: Path, zero: str) -> None:
    """With ZeRO on data 2 x further 2 x tensor 2: losses, gradients, weights, rows and communication, exactly; a state
    goes to its checkpoint's form and back where one of the axes of rows has size 1."""
    shutil.copytree(ROOT / "megajax", tmp_path / "megajax")  # with what Python has compiled
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for name, (before, line) in LINES.items():
        file = tmp_path / "megajax" / name
        lines = file.read_text().splitlines()
        (index,) = (index for index, text in enumerate(lines) if text.startswith(before))
        lines.insert(index + 1, line)
        file.write_text("\n".join(lines) + "\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", TRAIN, zero]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

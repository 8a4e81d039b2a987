"""Runs of earlier formats: restored on any mesh as they were written, and trained on as if nothing had been."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny import tiny_program

from megajax.config import Config, MeshConfig
from megajax.data.loader import train_batches
from megajax.errors import UserError
from megajax.evaluation.pretrained import evaluate_perplexity
from megajax.mesh import make_mesh, shardings
from megajax.presets import load_preset, resolve
from megajax.program.program import Program
from megajax.program.train_step import train_step
from megajax.program.transfer import Transfer
from megajax.runs.checkpoint import Checkpoints
from megajax.runs.data import open_run_data
from megajax.runs.directory import claim
from megajax.runs.formats import FORMAT, upgraded, written_as
from megajax.runs.metrics import read_metrics
from megajax.runs.ownership import MARK, run_format
from megajax.runs.stored import Reader
from megajax.runs.trained import check_run, restore_params, weights_in_parts

WRITTEN = Path(__file__).parent / "written_by_format_1"
RUN, STEP = WRITTEN / "run", 3
MESHES = [(1, 1, 1), (2, 2, 2)]
PARTS = ("query", "key", "value")


def program_on(mesh: tuple[int, int, int], **others: Any) -> Program:
    """The program of the run of format 1 on a mesh."""
    config: Config = dataclasses.replace(resolve(load_preset(RUN / "config.toml")), **others)
    data, pipe, tensor = mesh
    return tiny_program(dataclasses.replace(config, mesh=MeshConfig(data=data, pipe=pipe, tensor=tensor)))


def stored_arrays() -> dict[str, np.ndarray]:
    """Every array of the checkpoint of format 1 by name, read by Orbax alone."""
    folder = RUN / "checkpoints" / str(STEP) / "state"
    with ocp.PyTreeCheckpointer() as reader:
        names = reader.metadata(folder).item_metadata.tree
        plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), names)
        return by_name(reader.restore(folder, restore_args=plain))


def by_name(tree: Any) -> dict[str, np.ndarray]:
    """Arrays by dotted name, query, key and value joined where they are apart."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    arrays = {
        ".".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", None)))) for key in path): leaf
        for path, leaf in leaves
    }
    arrays = {name: np.asarray(leaf) for name, leaf in arrays.items()}
    for name in [name for name in arrays if ".query." in name]:
        parts = [arrays.pop(name.replace(".query.", f".{part}.")) for part in PARTS]
        arrays[name.replace(".query.", ".qkv.")] = np.stack(parts, axis=-3)
    return arrays


def restored(program: Program) -> Any:
    """The state of the run on a program's mesh."""
    checkpoints = Checkpoints(RUN, program.layout)
    try:
        return checkpoints.restore(STEP)
    finally:
        checkpoints.close()


@pytest.mark.parametrize("mesh", MESHES)
def test_every_array_of_format_1_is_restored(mesh: tuple[int, int, int]) -> None:
    """Weights and both moments, bit for bit what Orbax reads, where today's state lies."""
    program = program_on(mesh)
    state = restored(program)
    expected = stored_arrays()
    found = by_name(program.layout.to_canonical(state))
    assert found.keys() == expected.keys() and len(found) > 50
    for name, array in found.items():
        assert array.dtype == expected[name].dtype and np.array_equal(array, expected[name]), name
    places = shardings(program.layout.mesh, program.layout.specs)
    jax.tree.map(lambda leaf, place: leaf.sharding.is_equivalent_to(place, leaf.ndim) or pytest.fail(), state, places)


@pytest.mark.parametrize("mesh", [pytest.param(MESHES[0], marks=pytest.mark.full), MESHES[1]])
def test_training_goes_on_from_format_1(mesh: tuple[int, int, int]) -> None:
    """The losses of the next two steps are those that the program of then had."""
    program = program_on(mesh)
    state = restored(program)
    data = open_run_data(program.config, RUN / "data")
    rows = program.local_rows
    batches = train_batches(data.train, rows=rows, global_batch=program.config.train.global_batch, start_step=STEP)
    for loss in json.loads((WRITTEN / "next_losses.json").read_text()).values():
        state, metrics = train_step(program)(state, program.put_batch(next(batches), rows))
        assert abs(float(metrics["loss"]) - loss) <= 1e-6 * loss


def test_evaluating_format_1() -> None:
    """The weights by themselves, and the validation loss on two devices."""
    program = program_on((2, 2, 2))
    params, step = restore_params(program, RUN, "latest")
    jax.tree.map(np.testing.assert_array_equal, params, restored(program).params)
    assert step == STEP
    read, _ = weights_in_parts(program.layout, RUN, "latest")  # of an older format, whose leaves are others
    for path, leaf in jax.tree_util.tree_leaves_with_path(program.layout.canonical_weights(params)):
        np.testing.assert_array_equal(read([path])[0], leaf)
    (loss,) = [record["validation_loss"] for record in read_metrics(RUN) if "validation_loss" in record]
    found = evaluate_perplexity(RUN, step="latest", data="", overrides={})
    assert found["loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("mesh", MESHES)
def test_query_key_and_value_are_divided_in_host_memory(mesh: tuple[int, int, int]) -> None:
    """Read for today's model, they are the parts of format 1's array, split as the model's are, and on no device."""
    transfer = Transfer(program_on(mesh).layout)
    state = Reader(RUN / "checkpoints").read(STEP, transfer.targets)
    assert jax.tree.structure(state) == jax.tree.structure(transfer.targets)
    attention = state.params["blocks"]["attention"]
    assert "qkv" not in attention and "query" in attention
    expected, found = stored_arrays(), by_name(state)
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert np.array_equal(array, expected[name]), name
    for leaf, target in zip(jax.tree.leaves(state), jax.tree.leaves(transfer.targets), strict=True):
        assert leaf.sharding.memory_kind == target.sharding.memory_kind == "pinned_host"
        assert leaf.sharding.is_equivalent_to(target.sharding, leaf.ndim), leaf.sharding


def test_a_tree_without_attention_in_parts_stays() -> None:
    """Where today's tree has one leaf nothing is upgraded; where it has three one is divided, whatever is beside."""
    mesh = make_mesh(jax.devices()[:4], data=2, tensor=2)

    def struct(shape: tuple[int, ...], *spec: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    joint = {"attention": {"qkv": {"weight": struct((2, 6, 3, 4, 5))}}, "table": struct((8, 6), "tensor")}
    assert written_as(joint, 1) == joint == written_as(joint, FORMAT)
    weight, bias = struct((2, 6, 4, 5), None, "data", "tensor"), struct((2, 4, 5), None, "tensor")
    parts = {name: {"weight": weight, "bias": bias} for name in PARTS}
    today = {"shared": struct((8, 6)), "layers": [{"attention": {**parts, "output": struct((4, 6))}}]}
    old = written_as(today, 1)
    attention = old["layers"][0]["attention"]
    assert attention.keys() == {"qkv", "output"} and old["shared"] == today["shared"]
    assert attention["qkv"]["weight"] == struct((2, 6, 3, 4, 5), None, "data", None, "tensor", None)
    assert attention["qkv"]["bias"] == struct((2, 3, 4, 5), None, None, "tensor", None)
    rng = np.random.default_rng(0)
    stored = jax.tree.map(lambda leaf: jax.device_put(rng.random(leaf.shape, np.float32), leaf.sharding), old)
    found = upgraded(today, 1, stored)
    assert jax.tree.structure(found) == jax.tree.structure(today)
    assert found["shared"] is stored["shared"]
    for number, name in enumerate(PARTS):
        part = found["layers"][0]["attention"][name]
        joint_arrays = stored["layers"][0]["attention"]["qkv"]
        np.testing.assert_array_equal(part["weight"], joint_arrays["weight"][:, :, number])
        np.testing.assert_array_equal(part["bias"], joint_arrays["bias"][:, number])
        assert part["weight"].sharding.is_equivalent_to(weight.sharding, 4)
        assert part["weight"].addressable_shards[0].data.shape == (2, 3, 2, 5)
    assert upgraded(today, FORMAT, found) is found


def copy_of_run(tmp_path: Path) -> Path:
    """A copy to change."""
    return shutil.copytree(RUN, tmp_path / "run")


def test_both_formats_in_one_run(tmp_path: Path) -> None:
    """A checkpoint written today says so, beside one that says nothing."""
    run, program = copy_of_run(tmp_path), program_on((1, 1, 1))
    checkpoints = Checkpoints(run, program.layout, keep=2)
    state = checkpoints.restore(STEP)
    checkpoints.save(4, state)
    checkpoints.wait()
    for step in (STEP, 4):
        jax.tree.map(np.testing.assert_array_equal, checkpoints.restore(step), state)
    checkpoints.close()
    digests = {step: json.loads((run / f"checkpoints/{step}/digest/metadata").read_text()) for step in (STEP, 4)}
    assert "format" not in digests[STEP] and digests[4]["format"] == FORMAT


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    """In one line: a checkpoint, which is not taken for damaged, and a whole run."""
    run, program = copy_of_run(tmp_path), program_on((1, 1, 1))
    digest = run / "checkpoints" / str(STEP) / "digest" / "metadata"
    digest.write_text(json.dumps({**json.loads(digest.read_text()), "format": FORMAT + 1}))
    checkpoints = Checkpoints(run, program.layout)
    for restore in (checkpoints.restore_newest, lambda: checkpoints.restore_params(STEP)):
        with pytest.raises(UserError, match=rf"^\S+checkpoints/3 was written by a newer .* format {FORMAT + 1}; valid"):
            restore()
    checkpoints.close()
    (run / MARK).write_text(json.dumps({"program": "megajax", "format": FORMAT + 1}))
    with pytest.raises(UserError, match=r"^--run-dir \S+run was written by a newer version"):
        claim(run, program.config)
    with pytest.raises(UserError, match=r"^--checkpoint \S+run was written by a newer version"):
        check_run(run)


def test_a_run_of_format_1_is_marked_when_it_goes_on(tmp_path: Path) -> None:
    run = copy_of_run(tmp_path)
    assert run_format(run) == 1
    claim(run, program_on((1, 1, 1)).config)
    assert run_format(run) == FORMAT and (run / MARK).is_file()

"""Checkpoints: the same state on any mesh, and damage that is noticed."""

import dataclasses
import itertools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from damages import DAMAGES
from pytest import MonkeyPatch
from tiny import full, tiny_config, tiny_program

from megajax.core.errors import Damaged, UserError
from megajax.core.optim.loss_scale import LossScale
from megajax.core.program.state import StateLayout, TrainState
from megajax.runs import stored
from megajax.runs.checkpoint import Checkpoints
from megajax.runs.digests import read_manifest
from megajax.runs.step_folders import Retention

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("find_abandoned_reads"),
]

PLACES = [((1, 4, 2), 1, "fp32"), ((1, 1, 1), 0, "fp16")]
MORE_PLACES = [((8, 1, 1), 3, "fp32"), ((4, 1, 2), 1, "bf16"), ((5, 1, 1), 3, "bf16"), ((3, 2, 1), 1, "fp16")]


def layout(mesh: tuple[int, int, int], zero: int = 1, precision: str = "fp32", name: str = "adamw") -> StateLayout:
    """The placement of a state; neither two nor four stages divide the five layers."""
    options = {"zero": zero, "precision": precision, "num_layers": 5, "optimizer": {"name": name}, "bias": "none"}
    return tiny_program(tiny_config(mesh, ema=0.5 if name == "muon" else 0.0, **options)).layout


def random_state(where: StateLayout, step: int, seed: int = 0) -> TrainState:
    """A state without a zero anywhere, moments included."""
    rng = np.random.default_rng(seed)
    canonical = jax.tree.map(lambda x: jnp.asarray(rng.uniform(1, 9, x.shape), x.dtype), where.canonical_shapes)
    return where.from_canonical(dataclasses.replace(canonical, step=jnp.int32(step)))


def canonical_arrays(where: StateLayout, state: TrainState) -> dict[str, np.ndarray]:
    """Every array of a state in canonical form, by name, without the loss scale, which is fp16's only."""
    leaves = jax.tree_util.tree_leaves_with_path(where.to_canonical(state))
    arrays = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    return {name: array for name, array in arrays.items() if "loss_scale" not in name}


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert array.dtype == expected[name].dtype, name
        assert array.tobytes() == expected[name].tobytes(), name


@pytest.fixture(scope="module")
def small() -> StateLayout:
    return layout((1, 1, 1))


@pytest.fixture(scope="module")
def written(small: StateLayout, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with checkpoints of the steps 10 and 20, of different states."""
    run = tmp_path_factory.mktemp("written")
    checkpoints = Checkpoints(run, small, keep=2)
    for step in (10, 20):
        checkpoints.save(step, random_state(small, step, seed=step))
    checkpoints.wait()
    return run


@pytest.mark.parametrize(
    ("places", "name"),
    [
        (PLACES[1:], "muon"),
        full(PLACES, "muon"),
        full(PLACES[1:] + MORE_PLACES, "adamw"),
        full(MORE_PLACES + PLACES, "muon"),
    ],
)
@pytest.mark.slow
def test_another_mesh_restores_the_same_bits(places: list, name: str, tmp_path: Path) -> None:
    """Written on (2, 2, 2), read on other meshes, with other ZeRO, in other precisions, and after that written from one
    device in fp16 and read on (2, 2, 2): weights, their average, moments and step are the same in canonical form."""
    first = layout((2, 2, 2), name=name)
    state = random_state(first, 7)
    expected = canonical_arrays(first, state)
    checkpoints = Checkpoints(tmp_path / "first", first, keep=1)
    checkpoints.save(7, state)
    checkpoints.wait()
    for place in places:
        other = layout(*place, name=name)
        found = Checkpoints(tmp_path / "first", other).restore(7)
        assert int(found.step) == 7
        assert_equal(canonical_arrays(other, found), expected)
        if found.main is not None:
            jax.tree.map(np.testing.assert_array_equal, found.params, other.computed(found.main))
        if place[0] == (1, 1, 1):
            writer = Checkpoints(tmp_path / "second", other, keep=1)
            writer.save(7, found)
            writer.close()
    back = Checkpoints(tmp_path / "second", first).restore(7)
    assert_equal(canonical_arrays(first, back), expected)


def test_fp64_widens_what_is_stored_in_fp32(small: StateLayout, written: Path) -> None:
    """Weights and moments, to check an imported model; numbers stay what they are. Damage is noticed as before."""
    expected = canonical_arrays(small, random_state(small, 20, seed=20))
    with jax.enable_x64(True):
        wide = layout((1, 1, 1), precision="fp64")
        found = canonical_arrays(wide, Checkpoints(written, wide).restore(20))
        assert {array.dtype for name, array in found.items() if "params" in name} == {np.dtype(np.float64)}
        assert_equal({name: found[name].astype(array.dtype) for name, array in expected.items()}, expected)


def test_a_loss_scale_is_for_fp16_only() -> None:
    """Another precision neither uses nor keeps it, and fp16 starts anew after one."""
    places = {precision: layout((1, 1, 1), precision=precision) for precision in ("fp16", "bf16", "fp32")}
    state = random_state(places["fp16"], 0)
    state = dataclasses.replace(state, loss_scale=LossScale(jnp.float32(1024.0), jnp.int32(7)))

    def go_on(state: TrainState, *precisions: str) -> tuple[float, int]:
        for before, after in itertools.pairwise(precisions):
            state = places[after].from_canonical(places[before].to_canonical(state))
        return float(state.loss_scale.scale), int(state.loss_scale.good_steps)

    assert go_on(state, "fp16", "fp16") == (1024.0, 7)
    assert go_on(state, "fp16", "bf16") == go_on(state, "fp16", "fp32") == (1.0, 0)
    assert go_on(state, "fp16", "bf16", "fp32", "fp16") == (65536.0, 0)


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(file for file in checkpoint.rglob("*") if file.is_file())


def newest(where: StateLayout, run: Path) -> tuple[TrainState, list[str]]:
    """What `restore_newest` finds in a run that has a good checkpoint."""
    state, step, damaged = Checkpoints(run, where).restore_newest()
    assert state is not None and int(state.step) == step
    return state, damaged


DIGESTS = Path("checkpoint.json")
WAYS = ["deleted", "emptied", "zeroed", "halved", "middle byte", "doubled"]


@pytest.mark.parametrize(
    ("damage", "chosen"),
    [("middle byte", ["largest", str(DIGESTS)]), ("deleted", ["state/_METADATA", str(DIGESTS)])]
    + [full(damage, None) for damage in WAYS],
)
def test_damage_of_any_file_is_noticed(
    damage: str, chosen: list[str] | None, small: StateLayout, written: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """Whatever happens to whichever file of the newest checkpoint, it is found before anything is read, and named, and
    the checkpoint before is used."""
    expected = canonical_arrays(small, random_state(small, 10, seed=10))
    checkpoint = written / "checkpoints" / "20"
    names = [file.relative_to(checkpoint) for file in files_of(checkpoint)]
    assert len(names) > 8 and DIGESTS in names
    if chosen is not None:
        largest = max(names, key=lambda name: (checkpoint / name).stat().st_size)
        names = [largest if name == "largest" else Path(name) for name in chosen]
    read: list[str] = []
    plain = stored._read_arrays
    monkeypatch.setattr(
        stored, "_read_arrays", lambda folder, target: read.append(folder.parent.name) or plain(folder, target)
    )
    for number, name in enumerate(names):
        run = shutil.copytree(written, tmp_path / str(number))
        DAMAGES[damage](run / "checkpoints" / "20" / name)
        read.clear()
        state, damaged = newest(small, run)
        assert_equal(canonical_arrays(small, state), expected)
        assert int(state.step) == 10 and read == ["10"], (name, read)
        named = "" if name == DIGESTS else name  # a damaged digest speaks against its file
        assert len(damaged) == 1 and damaged[0].startswith(f"{run / 'checkpoints' / '20'}: {named}"), damaged


def forget_files(checkpoint: Path) -> None:
    """Take the digests of the files out of a checkpoint's manifest."""
    dataclasses.replace(read_manifest(checkpoint), files={}).write(checkpoint)


def test_a_newer_format_is_refused(small: StateLayout, written: Path, tmp_path: Path) -> None:
    """In one line; it is not taken for damaged, whatever else the manifest holds."""
    run = shutil.copytree(written, tmp_path / "run")
    (run / "checkpoints" / "20" / DIGESTS).write_text('{"format": 2, "other": []}')
    checkpoints = Checkpoints(run, small)
    for restore in (checkpoints.restore_newest, lambda: checkpoints.restore_params(20)):
        with pytest.raises(UserError, match=r"^\S+checkpoints/20 was written by a newer .* format 2; valid"):
            restore()


def test_what_is_no_checkpoint_blocks_none(small: StateLayout, written: Path, tmp_path: Path) -> None:
    """Files, folders with other names, an empty one with a step's name, one that holds something else, what a killed
    process left: the last is removed, the rest stays, and what stands in the way of a new checkpoint is set aside."""
    run = shutil.copytree(written, tmp_path / "run")
    folder = run / "checkpoints"
    (folder / "12.txt").write_text("mine")
    (folder / "25").write_text("a file")
    for name in ("abc", "15", "30", "010", "٣", "99999999999999999999", "7.orbax-checkpoint-tmp/state", "40/notes"):
        (folder / name).mkdir(parents=True)
    (folder / "30" / "garbage").write_text("mine")
    before = {entry.name for entry in folder.iterdir()}
    checkpoints = Checkpoints(run, small, keep=9)
    assert checkpoints.steps() == [10, 20]
    state, step, damaged = checkpoints.restore_newest()
    assert state is not None and step == 20
    assert damaged == [f"{folder / name}: it is not a checkpoint" for name in ("40", "30")]
    for number in (15, 30):
        checkpoints.save(number, state)
        checkpoints.wait()
    assert checkpoints.steps() == [10, 15, 20, 30]
    after = {entry.name for entry in folder.iterdir()}
    assert after == (before - {"7.orbax-checkpoint-tmp"}) | {"damaged-15-0", "damaged-30-0"}
    assert (folder / "damaged-30-0" / "garbage").read_text() == "mine"


def test_a_checkpoint_of_other_numbers_is_damaged(small: StateLayout, written: Path, tmp_path: Path) -> None:
    """Arrays that can be read but are not those that were written: those of step 10 under the name 20."""
    run = shutil.copytree(written, tmp_path / "run")
    forget_files(run / "checkpoints" / "20")
    shutil.rmtree(run / "checkpoints" / "20" / "state")
    shutil.copytree(run / "checkpoints" / "10" / "state", run / "checkpoints" / "20" / "state")
    with pytest.raises(Damaged, match="20"):
        Checkpoints(run, small).restore(20)
    assert int(newest(small, run)[0].step) == 10


def test_all_damaged_is_an_error_and_none_is_a_start(small: StateLayout, written: Path, tmp_path: Path) -> None:
    """A run whose checkpoints cannot be read must not start from the beginning by itself."""
    run = shutil.copytree(written, tmp_path / "run")
    for step in ("10", "20"):
        max(files_of(run / "checkpoints" / step), key=lambda file: file.stat().st_size).write_bytes(b"")
    with pytest.raises(Damaged, match="no checkpoint"):
        Checkpoints(run, small).restore_newest()
    assert Checkpoints(tmp_path / "empty", small, keep=1).restore_newest() == (None, 0, [])


def test_the_newest_are_kept(small: StateLayout, tmp_path: Path) -> None:
    """Of five checkpoints, the last two. Later ones than a step can be set aside; they are kept and written again."""
    checkpoints = Checkpoints(tmp_path, small, keep=2)
    for step in range(1, 6):
        checkpoints.save(step, random_state(small, step))
    checkpoints.wait()
    assert checkpoints.steps() == [4, 5]
    checkpoints.set_aside(after=4)
    assert checkpoints.steps() == [4]
    assert len([entry for entry in (tmp_path / "checkpoints").iterdir() if not entry.name.isdecimal()]) == 1
    checkpoints.save(5, random_state(small, 5, seed=1))
    checkpoints.wait()
    assert checkpoints.steps() == [4, 5]
    again = canonical_arrays(small, random_state(small, 5, seed=1))
    assert_equal(canonical_arrays(small, checkpoints.restore(5)), again)


def test_the_best_and_every_third_are_kept_besides(small: StateLayout, tmp_path: Path) -> None:
    """By the validation losses of this start and of the one before; step 0 is a multiple of everything."""
    state = random_state(small, 0)
    keep = Retention(newest=1, best=1, every=3)
    for steps in ((0, 1, 2), (3, 4, 5)):
        checkpoints = Checkpoints(tmp_path, small, keep)
        for step in steps:
            checkpoints.losses |= {step: loss} if (loss := {1: 3.0, 2: 2.0, 4: 2.5}.get(step)) else {}
            checkpoints.save(step, state)
            with (tmp_path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "validation_loss": loss}) + "\n")
        checkpoints.wait()
    assert checkpoints.steps() == [0, 2, 3, 5]
    assert sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir()) == ["0", "2", "3", "5"]

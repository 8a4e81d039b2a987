"""Damage is found by a file's digest, by an array's checksum; the folders in checkpoints/, and which stay."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from megajax.core.errors import UserError
from megajax.core.mesh import make_mesh
from megajax.runs import step_folders
from megajax.runs.digests import MANIFEST, Manifest, checksum, local_checksums, problem_of, read_manifest
from megajax.runs.ownership import FORMAT
from megajax.runs.step_folders import Retention
from megajax.runs.stored import check_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files with their digests."""
    (tmp_path / "state").mkdir()
    for name, content in (("a", b"one"), ("state/b", bytes(range(256))), ("state/empty", b"")):
        (tmp_path / name).write_bytes(content)
    Manifest.for_folder(tmp_path, {"x": 7}).write(tmp_path)
    return tmp_path


def problem(folder: Path) -> str:
    return problem_of(folder, read_manifest(folder))


def test_what_this_user_may_not_read_is_not_damaged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "state" / "b").write_bytes(b"")
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name != "b")
    with pytest.raises(UserError, match="state/b: Permission denied; valid: a checkpoint whose files"):
        check_files(folder, digests=True)


def test_what_was_written_is_whole(folder: Path) -> None:
    """Also when the manifest is written again; a file more is nobody's. A changed manifest is not, even if it could be
    one."""
    assert problem(folder) == ""
    Manifest.for_folder(folder, {"x": 7}).write(folder)
    manifest = read_manifest(folder)
    assert manifest.files.keys() == {"a", "state/b", "state/empty"} and manifest.arrays == {"x": 7}
    (folder / "more").write_text("")
    assert problem(folder) == ""
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"x": 7', '"x": 8'))
    with pytest.raises(ValueError, match="damaged"):
        read_manifest(folder)


@pytest.mark.parametrize("content", [bytes(255), bytes([*range(255), 254]), None])
def test_damage_is_named(folder: Path, content: bytes | None) -> None:
    """The first file that differs."""
    (folder / "state/b").unlink()
    if content is not None:
        (folder / "state/b").write_bytes(content)
    assert problem(folder) == "state/b is missing or was changed since it was written"


@pytest.mark.parametrize("content", [b"", b"[]", b"[" * 100_000, b'{"format": 1}', b'{"format": 1, "checksum": 0}'])
def test_no_manifest(folder: Path, content: bytes) -> None:
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(ValueError):
        read_manifest(folder)


@pytest.mark.parametrize(
    "change",
    [
        *({"format": "1"}, {"format": 0}, {"arrays": {"x": 1.5}}, {"arrays": 1}, {"files": []}, {"files": {"a": 1}}),
        *({"files": {"a": [1.5, "0"]}}, {"files": {"../a": [3, "0"]}}, {"files": {"/a": [3, "0"]}}),
    ],
)
def test_a_manifest_that_says_what_none_can(folder: Path, change: dict[str, Any]) -> None:
    Manifest(**{"format": FORMAT, "arrays": {}, "files": {}} | change).write(folder)
    with pytest.raises(ValueError, match="damaged"):
        read_manifest(folder)


def test_what_is_no_file(folder: Path) -> None:
    """A folder in the place of one is not read, nor a name with a NUL."""
    (folder / "a").unlink()
    (folder / "a").mkdir()
    assert problem(folder) == "a is missing or was changed since it was written"
    Manifest(FORMAT, {}, {"a\0": [3, "0"]}).write(folder)
    assert problem(folder) == "a\0 is missing or was changed since it was written"
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).mkdir()
    with pytest.raises(OSError):
        read_manifest(folder)


def plain(array: np.ndarray) -> int:
    """By the definition, in Python's whole numbers."""
    words = array.view(np.uint32) if array.dtype != np.float64 else array[..., None].view(np.uint32)
    return (
        sum(
            int(words[place]) * (1 + sum(2 * 31**dim * index for dim, index in enumerate(place)))
            for place in np.ndindex(words.shape)
        )
        % 2**32
    )


@pytest.mark.parametrize("shape", [(), (37,), (5, 33), (3, 4, 6), (2, 1, 3, 2, 5)])
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.float64])
def test_any_changed_element_and_swapped_neighbours_are_noticed(shape: tuple[int, ...], dtype: type) -> None:
    """Every element, a change of the last bit, and neighbours in every dim; the sign of zero."""
    assert checksum(dtype(0.0)[...]) != checksum(dtype(-0.0)[...]) or dtype == np.int32
    array = np.random.default_rng(0).integers(1, 100, shape).astype(dtype)
    before = checksum(array)
    assert before == plain(array)
    for place in np.ndindex(shape):
        changed = array.copy()
        changed[place] = array[place] + 1 if dtype == np.int32 else np.nextafter(array[place], dtype(1000))
        assert checksum(changed) != before, place
        for dim in range(len(shape)):
            neighbour = tuple((index + (other == dim)) % shape[other] for other, index in enumerate(place))
            swapped = array.copy()
            swapped[place], swapped[neighbour] = array[neighbour], array[place]
            assert checksum(swapped) != before or array[place] == array[neighbour], (place, neighbour)


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_it_does_not_depend_on_the_mesh(memory: str) -> None:
    """Divided over all, over some and over no devices, a part that several have counts once."""
    mesh = make_mesh(jax.devices()[:8], data=2, pipe=2, tensor=2)
    array = np.random.default_rng(0).normal(size=(5, 8, 4)).astype(np.float32)
    tree = {
        str(spec): jax.device_put(array, NamedSharding(mesh, spec, memory_kind=memory))
        for spec in (
            PartitionSpec(),
            PartitionSpec(None, ("pipe", "data"), "tensor"),
            PartitionSpec(None, None, "pipe"),
        )
    }
    assert set(local_checksums(tree).values()) == {plain(array)} and len(tree) == 3


LOSSES = {10: 3.0, 20: 1.0, 30: 2.0, 40: 1.0, 50: 4.0}


@pytest.mark.parametrize("hidden", ["checkpoints", "7"])
@pytest.mark.parametrize("look", [step_folders.candidates, step_folders.complete])
def test_what_may_not_be_read_is_a_mistake_not_an_empty_folder(
    hidden: str, look: Callable[[Path], list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, listed = tmp_path / "checkpoints", Path.iterdir
    for step in (3, 7):
        (folder / str(step) / "state").mkdir(parents=True)
    assert look(folder) == [3, 7]

    def refuse(path: Path) -> Iterator[Path]:
        if path.name == hidden:
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(UserError, match=rf"/{hidden}: cannot be read: Permission denied; valid: "):
        look(folder)


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (Retention(1), [60]),
        (Retention(2), [50, 60]),
        (Retention(9), [10, 20, 30, 40, 50, 60]),
        (Retention(1, best=1), [40, 60]),  # of equal losses the later step's
        (Retention(1, best=2), [20, 40, 60]),
        (Retention(1, best=3), [20, 30, 40, 60]),
        (Retention(1, every=30), [30, 60]),
        (Retention(1, best=1, every=20), [20, 40, 60]),
        (Retention(2, best=1, every=100), [40, 50, 60]),
    ],
)
def test_what_is_kept(keep: Retention, kept: list[int]) -> None:
    """Whatever order the steps come in; step 60 has no validation loss."""
    steps = [60, 10, 50, 20, 40, 30]
    assert sorted(set(steps) - set(keep.removed(steps, LOSSES))) == kept


def test_imported_weights_stay() -> None:
    """Imported weights are not counted."""
    assert Retention(1, every=5).removed([0, 1, 2], {}) == [1]
    assert Retention(2).removed([0, 1, 2, 3], {}) == [1]
    assert Retention(1).removed([], {}) == []

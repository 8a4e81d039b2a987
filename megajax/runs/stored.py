"""Read a checkpoint into host memory, finding damage before anything goes to the devices. To restore a state, the
digests of all files are checked first, and every array that is read is compared with its checksum (`digests.py`). All
processes call these functions together."""

import contextlib
import dataclasses
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from etils import epath  # Orbax's paths

from megajax.core.backend import CPU
from megajax.core.errors import Damaged, RunError, UserError
from megajax.core.models.config import ModelConfig
from megajax.core.models.staged import StagedModel
from megajax.core.options import options
from megajax.core.parallel.boundary import RegionBoundary
from megajax.core.program.state import TrainState
from megajax.core.program.transfer import cast
from megajax.core.traits import Size, Through
from megajax.host import reading
from megajax.host.processes import all_agree, is_first_process, of_first_process, sums_over_processes
from megajax.runs.digests import Manifest, local_checksums, no_file, problem_of, read_manifest
from megajax.runs.failures import forget_abandoned, in_one_line
from megajax.runs.ownership import check_format
from megajax.runs.store import store_of
from megajax.settings.config import Config

T = TypeVar("T")
_AS_WRITTEN = "the files as they were written, or another checkpoint (--step, --init-step)"


def fetch(checkpoint: Path) -> None:
    """Copy a checkpoint from its run's store, if it is in one; raises `RunError` if the store fails."""
    problem = ""
    if (store := store_of(checkpoint.parents[1])) is not None:
        try:
            store.fetch(checkpoint)
        except OSError as error:
            problem = in_one_line(error)
        if not all_agree(not problem):
            raise RunError(f"{checkpoint} cannot be read: {problem or 'another process says why'}; rerun the command")


def check_files(checkpoint: Path, *, digests: bool) -> None:
    """Compare a checkpoint's files with their digests, or only check that they are regular files; raises
    `Damaged` if one differs."""
    manifest = _manifest(checkpoint)
    problem = (problem_of if digests else no_file)(checkpoint, manifest) if is_first_process() else ""
    if of_first_process(bool(problem)):
        raise _damaged(checkpoint, problem or "process 0 says why")


def _damaged(checkpoint: Path, problem: str) -> Damaged:
    """The error for a checkpoint; raises `UserError` if this user may not read its files, which is no damage."""
    for path in (checkpoint, *checkpoint.rglob("*")):
        if os.path.exists(path) and not os.access(path, os.R_OK | os.X_OK if path.is_dir() else os.R_OK):
            raise UserError(f"{path}: Permission denied; valid: a checkpoint whose files this user can read")
    return Damaged(checkpoint, problem, _AS_WRITTEN)


def read(checkpoint: Path, target: TrainState) -> TrainState:
    """The arrays of `target`, canonical, in host memory, compared with their checksums; only the weights if `target`
    has no optimizer. fp64 widens what is stored in fp32. Raises `Damaged`."""
    manifest = _manifest(checkpoint)
    as_stored = _as_stored(checkpoint, target)
    stored = _try(checkpoint, lambda: _read_arrays(checkpoint / "state", as_stored))
    local = local_checksums(stored)
    actual = dict(zip(local, sums_over_processes(list(local.values())), strict=True))
    wrong = [name for name in actual if manifest.arrays.get(name) != actual[name]]
    if wrong:
        raise Damaged(checkpoint, f"{len(wrong)} arrays differ from what was written", _AS_WRITTEN)
    return jax.tree.map(
        lambda leaf, type_: leaf if leaf.dtype == type_.dtype else cast(leaf, type_.dtype), stored, target
    )


def _as_stored(checkpoint: Path, target: TrainState) -> TrainState:
    """`target` with fp64 leaves changed to fp32, if the checkpoint is not in fp64."""
    wide = any(leaf.dtype == np.float64 for leaf in jax.tree.leaves((target.params, target.average)))
    if not wide or any(type_.dtype == np.float64 for type_ in _stored_weights(checkpoint / "state").values()):
        return target
    return jax.tree.map(lambda leaf: leaf.update(dtype=np.float32) if leaf.dtype == np.float64 else leaf, target)


def has_average(checkpoint: Path) -> bool:
    """Whether a checkpoint has an average of the weights; raises `Damaged`."""
    return any(name.startswith(".average") for name in _manifest(checkpoint).arrays)


def _manifest(checkpoint: Path) -> Manifest:
    manifest = _try(checkpoint, lambda: read_manifest(checkpoint))
    check_format(manifest.format, str(checkpoint))
    return manifest


def _try(checkpoint: Path, read: Callable[[], T]) -> T:
    """Call `read` on every process. If it fails on any, raise `Damaged` on all, since none may go on alone to
    the next collective."""
    results: list[T] = []
    problem = "another process cannot read it"
    try:
        with warnings.catch_warnings(action="ignore"):
            results.append(read())
    except Exception as error:
        problem = in_one_line(error)
    if not results:
        forget_abandoned()
    if not all_agree(bool(results)):
        raise _damaged(checkpoint, problem)
    return results[0]


def _read_arrays(folder: Path, target: TrainState) -> TrainState:
    wanted = {name: part for name, part in vars(target).items() if part is not None}
    _check_chunks(folder)
    with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
        places = ocp.checkpoint_utils.construct_restore_args(wanted)
        arguments = ocp.args.PyTreeRestore(wanted, restore_args=places, partial_restore=True)
        arrays = handler.restore(epath.Path(folder), args=arguments)
    if not all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(arrays)):
        raise ValueError("arrays are missing")
    return dataclasses.replace(target, **arrays)


def _check_chunks(folder: Path) -> None:
    """Refuse chunks larger than their array, which would be allocated whole: where that fails, TensorStore aborts."""
    files = tensorstore.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}).result()
    for name in files.list().result():
        if name.endswith(b"/.zarray"):
            array = reading.parse_json(files.read(name).result().value.decode())
            if math.prod(array["chunks"]) > max(1, math.prod(array["shape"])):
                raise ValueError(f"{name.decode()} has chunks of {array['chunks']}, larger than the array")


def check_fits(checkpoint: Path, model: ModelConfig) -> None:
    """Refuse a configuration whose model does not fit the checkpoint; called when the checkpoint could not be read."""
    stored = {name: tuple(type_.shape) for name, type_ in _stored_weights(checkpoint / "state").items()}
    cut = StagedModel(model, RegionBoundary(), CPU)
    specs = jax.tree.leaves(cut.logical_specs)
    sizes: dict[str, tuple[int, int]] = {}
    for (path, leaf), spec in zip(jax.tree_util.tree_leaves_with_path(cut.shapes), specs, strict=True):
        name = jax.tree_util.keystr(path)
        dims = ["layers", *spec[1:]] if name.startswith("['blocks']") else list(spec)
        found = stored.get(name, ())
        if len(found) == leaf.ndim:
            for dim, wanted, size in zip(dims, leaf.shape, found, strict=False):
                if wanted != size:
                    sizes.setdefault(dim, (wanted, size))
    for key, option in options(Config).items():
        is_of, through = option.trait(Size), option.trait(Through)
        if is_of and is_of.dim in sizes:
            wanted, size = sizes[is_of.dim]
            name = f"{through.words} (see {key})" if through else key
            file = checkpoint.parents[1] / "config.toml"
            raise UserError(f"{file}: {name} is {wanted}; valid: {size}, as in the weights of {checkpoint}")


def check_same_optimizer(checkpoint: Path, target: TrainState) -> None:
    """Refuse a target with the state of another optimizer; called when the checkpoint could not be read."""
    part = TrainState(None, None, None, target.optimizer, None, None)  # type: ignore[arg-type]
    wanted = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(part)}
    there = {name for name in _manifest(checkpoint).arrays if name.startswith(".optimizer")}
    if wanted != there:
        raise UserError(
            f"{checkpoint} holds the state of another optimizer; valid: the one that it was trained with, or "
            "set_weights in a new model"
        )


def _stored_weights(state: Path) -> dict[str, Any]:
    """Shape and dtype of a checkpoint's weights by path; empty if it cannot be read."""
    with contextlib.suppress(Exception), ocp.PyTreeCheckpointer() as reader:  # damage raises exceptions of many kinds
        found: Any = reader.metadata(state).item_metadata
        weights = jax.tree_util.tree_leaves_with_path(found.tree["params"])
        return {jax.tree_util.keystr(path): leaf for path, leaf in weights}
    return {}

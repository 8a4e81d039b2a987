"""Reading a checkpoint to the host's memory, where damage is found before anything goes to the devices: to restore a
state, the digests of all files are compared first, and every array that is read is compared with its checksum
(`digests.py`)."""

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath  # Orbax's paths

from megajax.host.processes import all_agree, is_first_process, of_first_process, sums_over_processes
from megajax.program.state import TrainState
from megajax.runs.digests import Manifest, local_checksums, problem_of, read_manifest
from megajax.runs.failures import forget_abandoned, in_one_line
from megajax.runs.ownership import check_format

T = TypeVar("T")


class DamagedCheckpoint(Exception):
    """A checkpoint that cannot be read, or is not what was written."""


class Reader:
    """Reads the checkpoints in a folder. All processes make one and call its methods together."""

    def __init__(self, folder: Path):
        self._folder = folder

    def check_files(self, step: int) -> None:
        """Compare the files of a checkpoint with their digests.

        Raises:
            DamagedCheckpoint: a file differs.
        """
        folder, manifest = self._folder / str(step), self._manifest(step)
        problem = problem_of(folder, manifest) if is_first_process() else ""
        if of_first_process(bool(problem)):
            raise DamagedCheckpoint(f"{folder}: {problem or 'process 0 says why'}")

    def read(self, step: int, target: TrainState) -> TrainState:
        """The arrays of `target`, canonical, in host memory, compared with their checksums; only weights where `target`
        has no optimizer.

        Raises:
            DamagedCheckpoint: it cannot be read, or differs from what was written.
        """
        folder, manifest = self._folder / str(step), self._manifest(step)
        stored = self._try(step, lambda: _read_arrays(folder / "state", target))
        local = local_checksums(stored)
        actual = dict(zip(local, sums_over_processes(list(local.values())), strict=True))
        wrong = [name for name in actual if manifest.arrays.get(name) != actual[name]]
        if wrong:
            raise DamagedCheckpoint(f"{folder}: {len(wrong)} arrays differ from what was written")
        return stored

    def _manifest(self, step: int) -> Manifest:
        folder = self._folder / str(step)

        def read() -> Manifest:
            if not (folder / "state").is_dir():
                raise ValueError("it is no checkpoint")
            return read_manifest(folder)

        manifest = self._try(step, read)
        check_format(manifest.format, str(folder))
        return manifest

    def _try(self, step: int, read: Callable[[], T]) -> T:
        """Call `read` on every process. If it fails anywhere, raise `DamagedCheckpoint` everywhere: no process may go
        on to the next collective alone."""
        found: list[T] = []
        problem = "another process cannot read it"
        try:
            with warnings.catch_warnings(action="ignore"):
                found.append(read())
        except Exception as error:
            problem = in_one_line(error)
        if not found:
            forget_abandoned()
        if not all_agree(bool(found)):
            raise DamagedCheckpoint(f"{self._folder / str(step)}: {problem}")
        return found[0]


def weights_of(state: TrainState) -> TrainState:
    """A target that has only the weights."""
    others: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(state) if field.name != "params")
    return dataclasses.replace(state, **others)


def _read_arrays(folder: Path, target: TrainState) -> TrainState:
    weights_alone = target.optimizer is None
    wanted = {"params": target.params} if weights_alone else target
    handler = ocp.PyTreeCheckpointHandler()
    try:
        arguments = ocp.args.PyTreeRestore(
            wanted,
            restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
            partial_restore=weights_alone,
        )
        found = handler.restore(epath.Path(folder), args=arguments)
    finally:
        handler.close()
    if not all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(found)):
        raise ValueError("arrays are missing")
    return dataclasses.replace(target, **found) if weights_alone else found

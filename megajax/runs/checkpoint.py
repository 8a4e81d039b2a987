"""Checkpoints: the state in mesh-independent form, written by Orbax in the background, atomically, the last N kept.

A digest of every array is stored with it and compared after reading, so that a damaged checkpoint is noticed whatever
part of it is damaged; the one before it is then used.
"""

import logging
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import Array, lax

from megajax.errors import RunError, UserError
from megajax.mesh import shardings
from megajax.processes import all_agree, is_first_process, wait_for_all
from megajax.program.state import StateLayout, TrainState
from megajax.runs.metrics import read_metrics

logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every file it touches


class Checkpoints:
    """The folder `checkpoints/` of a run. All processes make one and call its methods together."""

    def __init__(self, run_dir: Path, layout: StateLayout, keep: int | None = None):
        """`keep` newest checkpoints stay when a new one is written; without it nothing is ever written."""
        self.folder = Path(run_dir).absolute() / "checkpoints"
        self._layout, self._mesh = layout, layout.mesh
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=keep is not None, read_only=keep is None)
        self._manager = ocp.CheckpointManager(self.folder, options=options)
        self._digest = jax.jit(digest)

    def steps(self) -> list[int]:
        """Steps of the checkpoints there are, ascending."""
        return sorted(self._manager.all_steps(read=True))

    def save(self, step: int, state: TrainState) -> None:
        """Write the `state` after `step` steps; returns when it is copied, the files are complete later (`wait`)."""
        natural = self._layout.to_natural(state)
        sums = {name: int(value) for name, value in _named(self._digest(natural)).items()}
        self._manager.save(
            step,
            args=ocp.args.Composite(state=ocp.args.StandardSave(natural), digest=ocp.args.JsonSave(sums)),
        )

    def wait(self) -> None:
        """Wait until what was saved is complete."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()

    def restore(self, step: int) -> TrainState:
        """The state after `step` steps, on this mesh.

        Raises:
            DamagedCheckpoint: it cannot be read, or not all of it is what was written.
        """
        read: list[tuple[TrainState, dict[str, int]]] = []
        problem = "another process cannot read it"
        try:
            read.append(self._read(step))
        except Exception as error:
            problem = " ".join(str(error).split()).partition(" See full")[0][:200]
        # The processes agree at each turn: none may go on to the next collective alone.
        if not all_agree(bool(read)):
            raise DamagedCheckpoint(f"{self.folder / str(step)}: {problem}")
        stored, sums = read[0]
        actual = {name: int(value) for name, value in _named(self._digest(stored)).items()}
        wrong = sorted(name for name in actual if sums.get(name) != actual[name])
        if not all_agree(not wrong):
            raise DamagedCheckpoint(f"{self.folder / str(step)}: {len(wrong)} arrays differ from what was written")
        return self._layout.from_natural(stored)

    def _read(self, step: int) -> tuple[TrainState, dict[str, int]]:
        """The natural state and the digest stored with it."""
        target = jax.tree.map(
            lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
            self._layout.natural_shapes,
            shardings(self._mesh, self._layout.natural_specs),
        )
        with warnings.catch_warnings(action="ignore"):
            stored = self._manager.restore(
                step, args=ocp.args.Composite(state=ocp.args.StandardRestore(target), digest=ocp.args.JsonRestore())
            )
        return stored.state, stored.digest

    def restore_newest(self) -> tuple[TrainState | None, int, list[str]]:
        """The newest state that can be read, after how many steps it was saved, and what is wrong with newer ones.

        The state is None where there is no checkpoint.

        Raises:
            RunError: there are checkpoints, and none can be read.
        """
        damaged: list[str] = []
        for step in reversed(self.steps()):
            try:
                return self.restore(step), step, damaged
            except DamagedCheckpoint as error:
                damaged.append(str(error))
        if damaged:
            raise RunError(f"no checkpoint in {self.folder} can be read; the newest: {damaged[0]}")
        return None, 0, damaged

    def set_aside(self, after: int) -> None:
        """Rename the checkpoints of later steps than `after`, so that they can be written again."""
        if is_first_process():
            for step in self.steps():
                if step > after:
                    folder = self.folder / str(step)
                    folder.rename(
                        next(p for n in range(1000) if not (p := self.folder / f"damaged-{step}-{n}").exists())
                    )
        wait_for_all("checkpoints set aside")
        self._manager.reload()


class DamagedCheckpoint(Exception):
    """A checkpoint that cannot be read, or is not what was written."""


def digest(tree: Any) -> Any:
    """A uint32 checksum of the bits of every array: independent of how it is split over devices."""

    def checksum(x: Array) -> Array:
        bits = x if jnp.issubdtype(x.dtype, jnp.integer) else lax.bitcast_convert_type(x, jnp.uint32)
        weight = jnp.ones(bits.shape, jnp.uint32)  # odd, and different for neighbours in every dim
        for dim in range(bits.ndim):
            weight += lax.broadcasted_iota(jnp.uint32, bits.shape, dim) * jnp.uint32(2 * (31**dim))
        return jnp.sum(bits.astype(jnp.uint32) * weight, dtype=jnp.uint32)

    return jax.tree.map(checksum, tree)


def _named(tree: Any) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def choose_step(run_dir: Path, steps: list[int], wanted: str) -> int:
    """The checkpoint that `latest`, `best` (lowest validation loss) or a number means.

    Raises:
        UserError: there is none like that.
    """
    if not steps:
        raise UserError(f"{run_dir} holds no checkpoint; valid: the run directory of a training that wrote one")
    if wanted == "latest":
        return steps[-1]
    if wanted == "best":
        losses = {
            record["step"]: record["validation_loss"]
            for record in read_metrics(run_dir)
            if record.get("validation_loss") is not None  # null: it was not finite
        }
        measured = [step for step in steps if step in losses]
        if not measured:
            raise UserError(f"--step best: no checkpoint in {run_dir} has a validation loss; valid: latest, or a step")
        return min(measured, key=losses.__getitem__)
    if not wanted.isdecimal() or int(wanted) not in steps:
        raise UserError(f"--step {wanted}; valid: latest, best, or one of {', '.join(map(str, steps))}")
    return int(wanted)

"""Checkpoints: the state in mesh-independent form, written by Orbax in the background, atomically, the last N kept.

A digest of every array is stored with it and compared after reading, so that a damaged checkpoint is noticed whatever
part of it is damaged; the one before it is then used. Beside the digest stands the format (`formats.py`).
"""

import dataclasses
import gc
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import Array, lax

from megajax.errors import RunError, UserError
from megajax.mesh import shardings
from megajax.processes import all_agree, is_first_process, wait_for_all
from megajax.program.state import StateLayout, TrainState
from megajax.runs.formats import FORMAT, check_known, upgraded, written_as
from megajax.runs.metrics import read_metrics

logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every file it touches

_FORMAT = "format"  # among the digest's names; a checkpoint without it is of format 1

T = TypeVar("T")


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
        """Write the `state` after `step` steps: copied when this returns, the files are complete later (`wait`)."""
        natural = self._layout.to_natural(state)
        sums = {name: int(value) for name, value in _named(self._digest(natural)).items()}
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(natural), digest=ocp.args.JsonSave({_FORMAT: FORMAT, **sums})
            ),
        )

    def wait(self) -> None:
        """Wait until what was saved is complete."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait, and end what runs in the background."""
        self._manager.close()

    def restore(self, step: int) -> TrainState:
        """The state after `step` steps, on this mesh.

        Raises:
            DamagedCheckpoint: it cannot be read, or not all of it is what was written.
            UserError: a newer version of this program wrote it.
        """
        return self._layout.from_natural(self._restore(step, self._target))

    def restore_params(self, step: int) -> Any:
        """The weights after `step` steps, as layers compute with them on this mesh; nothing else is read.

        Raises:
            DamagedCheckpoint: they cannot be read, or are not what was written.
            UserError: a newer version of this program wrote them.
        """
        others: dict[str, Any] = {"optimizer": None, "loss_scale": None, "recent_norms": None}
        weights = dataclasses.replace(self._target, **others)
        return self._layout.params_from_natural(self._restore(step, weights).params)

    @property
    def _target(self) -> TrainState:
        """Types and places of the natural state."""
        return jax.tree.map(
            lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
            self._layout.natural_shapes,
            shardings(self._mesh, self._layout.natural_specs),
        )

    def _restore(self, step: int, target: TrainState) -> TrainState:
        """What `target` has of the natural state; a part of it that is None is not read."""
        folder = self.folder / str(step)
        sums = self._try(step, lambda: self._read_digest(step))
        number = sums.pop(_FORMAT, 1)
        check_known(number, str(folder))
        stored = self._try(step, lambda: self._read(step, written_as(target, number)))
        actual = {name: int(value) for name, value in _named(self._digest(stored)).items()}
        wrong = sorted(name for name in actual if sums.get(name) != actual[name])
        if not all_agree(not wrong):
            raise DamagedCheckpoint(f"{folder}: {len(wrong)} arrays differ from what was written")
        return upgraded(target, number, stored)

    def _try(self, step: int, read: Callable[[], T]) -> T:
        """What is read, if all processes can: none may go on to the next collective alone.

        Raises:
            DamagedCheckpoint: one of them cannot.
        """
        found: list[T] = []
        problem = "another process cannot read it"
        try:
            with warnings.catch_warnings(action="ignore"):
                found.append(read())
        except Exception as error:
            problem = " ".join(str(error).split()).partition(" See full")[0][:200]
        if not found:
            _forget_abandoned_reads()
        if not all_agree(bool(found)):
            raise DamagedCheckpoint(f"{self.folder / str(step)}: {problem}")
        return found[0]

    def _read_digest(self, step: int) -> dict[str, int]:
        digest = self._manager.restore(step, args=ocp.args.Composite(digest=ocp.args.JsonRestore())).digest
        if not isinstance(digest, dict) or not isinstance(digest.get(_FORMAT, 1), int):
            raise ValueError("the digest is damaged")
        return digest

    def _read(self, step: int, target: TrainState) -> TrainState:
        if target.optimizer is not None:
            state = ocp.args.StandardRestore(target)
            return self._manager.restore(step, args=ocp.args.Composite(state=state)).state
        parts = {"step": target.step, "params": target.params}
        wanted = ocp.args.PyTreeRestore(
            parts, restore_args=ocp.checkpoint_utils.construct_restore_args(parts), partial_restore=True
        )
        with ocp.PyTreeCheckpointer() as reader:
            return dataclasses.replace(target, **reader.restore(self.folder / str(step) / "state", args=wanted))

    def restore_newest(self) -> tuple[TrainState | None, int, list[str]]:
        """The newest state that can be read, after how many steps it was saved, and what is wrong with newer ones.

        The state is None where there is no checkpoint.

        Raises:
            RunError: there are checkpoints, and none can be read.
            UserError: a newer version of this program wrote the newest.
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


def _forget_abandoned_reads() -> None:
    """Remove what Orbax left of the reads beside one that failed: later, anywhere, they would print tracebacks."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        gc.collect()
    finally:
        sys.unraisablehook = hook


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

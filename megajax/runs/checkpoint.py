"""Checkpoints: the state in mesh-independent form, written atomically in the background, and read on any mesh.

The state is copied to host memory leaf by leaf (`core/program/transfer.py`), written to disk in the background
(`writing.py`), and read back (`stored.py`). A failed write is reported; only several in a row end the run.
"""

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from megajax.core.errors import Damaged, RunError, UserError
from megajax.core.models.lora import LORA
from megajax.core.options import is_whole
from megajax.core.program.state import StateLayout, TrainState
from megajax.core.program.transfer import Transfer, canonical_bytes
from megajax.host.processes import is_first_process, numbers_of_first_process, of_first_process, on_first_process
from megajax.runs import step_folders, stored
from megajax.runs.failures import in_one_line
from megajax.runs.metrics import validation_losses
from megajax.runs.step_folders import Retention
from megajax.runs.store import store_of
from megajax.runs.writing import Write, new_state

_OVERHEAD = 2**20  # bytes in a checkpoint besides its arrays, at most


class Checkpoints:
    """The folder `checkpoints/` of a run. All processes make one and call its methods together.

    Reading raises `Damaged` if a file or array cannot be read or differs from what was written, and
    `UserError` for a checkpoint of another model. `save`, `save_new` and `news` raise `RunError` after too many failed
    writes in a row.
    """

    def __init__(self, run_dir: Path, layout: StateLayout, keep: Retention | int | None = None, max_failures: int = 1):
        """With `keep`, checkpoints can be written, and those that it does not keep are removed; `max_failures` failed
        writes in a row end the run."""
        self.folder = Path(run_dir).absolute() / "checkpoints"
        self.saved: int | None = None  # the newest step whose state was restored, or saved completely
        self._layout, self._transfer = layout, Transfer(layout)
        self._store = store_of(self.folder.parent)
        self._keep = Retention(keep) if isinstance(keep, int) else keep
        self._max_failures, self._failures = max_failures, 0
        self._write: Write | None = None
        self._problem = ""  # why the last write failed, if it did
        self._news: list[str] = []
        self.losses: dict[int, float] = {}  # of validations by step, by which the best are kept
        self.average_news = ""  # what happened to the weight average in the restored state
        if keep is not None:
            on_first_process(self._prepare)

    def _prepare(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            step_folders.clear(self.folder)
        except OSError as error:
            raise UserError(f"{self.folder}: {error.strerror}; valid: a writable place with free space") from None
        self.losses = validation_losses(self.folder.parent)

    def steps(self) -> list[int]:
        """The steps of all checkpoints, ascending."""
        return numbers_of_first_process(step_folders.complete(self.folder))

    def save(self, step: int, state: TrainState) -> None:
        """Begin to write the `state` after `step` steps. When this returns, the state has been copied; the files are
        complete later (`wait`). `news` reports failures of this write and the previous one."""
        self._begin(step, lambda: self._transfer.to_host(state))

    def save_new(self, weight: Callable[[Any, tuple[int, ...]], np.ndarray]) -> None:
        """Begin to write the state before the first step. `weight`, called in another thread, makes each canonical main
        weight from its path and shape when it is written."""
        self._begin(0, lambda: new_state(self._layout, weight))

    def _begin(self, step: int, canonical: Callable[[], TrainState]) -> None:
        self._settle()
        obstacle = self._obstacle(step) if is_first_process() else ""
        if of_first_process(bool(obstacle)):
            self._failed(step, obstacle or "process 0 says why")
        else:
            self._write = Write(self.folder, step, canonical(), then=self._retire)

    def wait(self) -> None:
        """Wait until everything saved is complete; raises `RunError` if the last state could not be written."""
        self._settle()
        if self._problem:
            raise RunError(f"{self._problem}; last good checkpoint: {self.last_good}")

    def close(self) -> None:
        """Wait for this process's own write only; just `wait` guarantees a complete checkpoint."""
        if self._write is not None:
            self._write.abandon()

    def news(self) -> list[str]:
        """One line for each failed write since the last call, and for what happened to the run's store."""
        if jax.process_count() == 1 and self._write is not None and not self._write.is_under_way:
            self._settle()
        news, self._news = self._news, []
        if self._store is not None:
            news = [*self._store.news, *news]
            self._store.news.clear()  # another thread may be adding to it
        return news

    @property
    def writing(self) -> int | None:
        """The step whose checkpoint this process is writing; None if it is not writing."""
        return self._write.step if self._write is not None and self._write.is_under_way else None

    @property
    def last_good(self) -> str:
        """Folder and step of the newest complete checkpoint, in words."""
        return "none yet" if self.saved is None else f"{self.folder / str(self.saved)} (step {self.saved})"

    def _settle(self) -> None:
        """Wait for the current write to end, and note its outcome."""
        if self._write is None:
            return
        write, self._write = self._write, None
        if not write.wait():
            self._failed(write.step, write.problem or "process 0 says why")
            return
        self.saved, self._failures, self._problem = write.step, 0, ""
        if write.problem:
            self._news.append(f"the checkpoint of step {write.step} was written on the second attempt; {write.problem}")

    def _failed(self, step: int, why: str) -> None:
        self._failures += 1
        self._problem = f"the checkpoint of step {step} could not be written: {why}"
        if self._failures >= self._max_failures:
            raise RunError(
                f"{self._problem}; that is {self._failures} in a row (--checkpoint.max-failures {self._max_failures}), "
                f"so training stops; last good checkpoint: {self.last_good}"
            )
        self._news.append(f"{self._problem}; training continues ({self._failures} of {self._max_failures} in a row)")

    def _obstacle(self, step: int) -> str:
        """Why a checkpoint cannot be written now; empty if nothing is in the way."""
        needed = canonical_bytes(self._layout) + _OVERHEAD
        try:
            step_folders.clear(self.folder, step)
            free = shutil.disk_usage(self.folder if self.folder.exists() else self.folder.parent).free
        except OSError as error:
            return in_one_line(error)
        if free < needed:
            return f"{self.folder} has {free / 1e6:.1f} MB free, but a checkpoint takes {needed / 1e6:.1f} MB"
        return ""

    def _retire(self) -> None:
        """Remove checkpoints that are not to be kept."""
        assert self._keep is not None
        try:
            with self._store.lock if self._store else contextlib.nullcontext():
                for step in self._keep.removed(step_folders.complete(self.folder), self.losses):
                    step_folders.discard(self.folder, step)
        except (OSError, UserError) as error:
            self._news.append(f"an old checkpoint cannot be removed: {in_one_line(error)}")

    def restore(self, step: int) -> TrainState:
        """The state after `step` steps, on this mesh."""
        targets, layout = self._transfer.targets, self._layout
        stored.fetch(self.folder / str(step))  # first, so that one with a damaged manifest is set aside as a whole
        averaged, wanted = stored.has_average(self.folder / str(step)), targets.average is not None
        canonical = self._read(step, targets if averaged else dataclasses.replace(targets, average=None))
        if wanted and not averaged:
            canonical = dataclasses.replace(canonical, average=layout.trained(canonical.params))
            self.average_news = f"the weight average (--train.ema) starts from the weights of step {step}"
        elif averaged and not wanted:
            self.average_news = f"the weight average is dropped after step {step} (--train.ema 0)"
        state = self._transfer.to_devices(canonical)
        self.saved = step
        return state

    def averaged(self, step: int) -> bool:
        """Whether the weights read for a step are averages: both the configuration and the checkpoint have them."""
        return self._transfer.targets.average is not None and stored.has_average(self.folder / str(step))

    def restore_params(self, step: int) -> Any:
        """The weights after `step` steps on this mesh, in the compute dtype, including LoRA's; their average if they
        are `averaged`. Only these arrays are read and compared with their checksums; the digests of files are not."""
        return self._transfer.params_to_devices(self._read_weights(step, self._transfer.targets.params))

    def read_weights(self, step: int) -> Any:
        """The canonical main weights in host memory, with LoRA merged; otherwise like `restore_params`."""
        return self._transfer.merged(self._read_weights(step, self._transfer.targets.params))

    def read_some_weights(self, step: int, paths: Collection[Any]) -> dict[Any, np.ndarray]:
        """The canonical main weights and adapters at `paths`, as stored; otherwise like `restore_params`."""
        leaves = jax.tree_util.tree_leaves_with_path(self._transfer.targets.params)
        wanted = {tuple(key.key for key in path): target for path, target in leaves if path in paths}
        found = self._read_weights(step, traverse_util.unflatten_dict(wanted))
        return {path: np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(found)}

    def _read_weights(self, step: int, targets: Any) -> Any:
        params, average = targets, None
        if self.averaged(step):
            adapted = self._layout.adapters is not None
            params = {name: part for name, part in targets.items() if adapted and name != LORA} or None
            average = targets.get(LORA) if adapted else targets
        found = self._read(step, TrainState(None, params, None, None, None, None, average))  # type: ignore[arg-type]
        return found.params if average is None else (found.params or {}) | self._named(found.average)

    def _named(self, trained: Any) -> Any:
        """The trained weights, as a part of all weights."""
        return trained if self._layout.adapters is None else {LORA: trained}

    def _read(self, step: int, targets: TrainState) -> TrainState:
        checkpoint = self.folder / str(step)
        stored.fetch(checkpoint)
        stored.check_files(checkpoint, digests=targets.optimizer is not None)  # only for a whole state
        try:
            return stored.read(checkpoint, targets)
        except Damaged:
            stored.check_fits(checkpoint, self._layout.model)
            if targets.optimizer is not None:
                stored.check_same_optimizer(checkpoint, targets)
            raise

    def restore_newest(self) -> tuple[TrainState | None, int, list[str]]:
        """The newest readable state (None if there is no checkpoint), its step, and what is wrong with newer ones.
        Raises `Damaged` if there are checkpoints but none can be read."""
        damaged: list[str] = []
        for step in reversed(numbers_of_first_process(step_folders.candidates(self.folder))):
            try:
                return self.restore(step), step, damaged
            except Damaged as error:
                damaged.append(str(error).partition("; valid: ")[0])
        if damaged:
            raise Damaged(self.folder, f"no checkpoint can be read; the newest: {damaged[0]}", "a new --run-dir")
        return None, 0, damaged

    def set_aside(self, after: int) -> None:
        """Rename the checkpoints of steps after `after`, so that they can be written again."""

        def rename() -> None:
            for step in step_folders.candidates(self.folder):
                if step > after:
                    try:
                        step_folders.set_aside(self.folder, step)
                    except OSError as error:
                        problem = in_one_line(error)
                        raise UserError(f"{self.folder}: {problem}; valid: a writable place with free space") from None

        on_first_process(rename)


def choose_step(run_dir: Path, steps: list[int], wanted: str, flag: str = "--step") -> int:
    """The step that `latest`, `best` (lowest validation loss) or a number refers to; `flag` names it in error
    messages."""
    if not steps:
        raise UserError(f"{run_dir} holds no checkpoint; valid: the directory of a run that wrote one")
    if wanted == "latest":
        return steps[-1]
    if wanted == "best":
        losses = validation_losses(run_dir)
        measured = [step for step in steps if step in losses]
        if not measured:
            raise UserError(f"{flag} best: no checkpoint in {run_dir} has a validation loss; valid: latest, or a step")
        return min(measured, key=losses.__getitem__)
    if not is_whole(wanted) or int(wanted) not in steps:
        raise UserError(f"{flag} {wanted[:100]}; valid: latest, best, or one of {', '.join(map(str, steps))}")
    return int(wanted)

"""Write a checkpoint from host memory to disk, in a thread of every process, while training continues.

Every process writes the shards on its devices. Process 0 learns from files that the others have written theirs, merges
everything, adds the manifest and gives the folder its final name; until then the checkpoint does not exist. No thread
waits for a process that failed: the main threads find out together whether all shards were written (`Write.wait`).
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath  # Orbax's paths

from megajax.core.program.state import StateLayout, TrainState
from megajax.host.paths import identity
from megajax.host.processes import all_agree, is_first_process, of_first_process
from megajax.runs import step_folders
from megajax.runs.digests import Manifest, checksum, local_checksums, read_json, write_json
from megajax.runs.failures import expect_abandoned, forget_abandoned, in_one_line
from megajax.runs.store import store_of

_PATIENCE = 30.0  # seconds that `abandon` waits for other processes
_POLL = 0.05  # seconds
_numbers = itertools.count()  # of writes, the same on all processes


class Write:
    """The writing of one checkpoint. All processes make one at the same time."""

    def __init__(self, folder: Path, step: int, canonical: Any, then: Callable[[], None] = lambda: None):
        """Begin to write the arrays of `canonical`, either all or none of them `LazyArray`, to the folder of `step` in
        `folder`; process 0 calls `then` in its thread when they are complete."""
        self.step = step
        self.problem: str | None = None  # the latest failure, in one line
        self._folder, self._canonical, self._then = folder, canonical, then
        self._sums: dict[str, int] = {}  # this process's terms of the checksums; on process 0 later their totals
        self._place = step_folders.temporary(folder, step)
        self._store, self._shares = store_of(folder.parent), f"{step}-{next(_numbers)}"  # not those of a failed write
        self._run_dir, self._made = identity(folder.parent), identity(self._place)
        self._part_tried = threading.Event()
        self._part_written = self._complete = False
        self._others: bool | None = None  # whether the other processes have written their parts; None: not known yet
        self._deadline: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"checkpoint of step {step}")
        expect_abandoned()
        self._thread.start()

    @property
    def is_under_way(self) -> bool:
        """Whether this process is still writing."""
        return self._thread.is_alive()

    def wait(self) -> bool:
        """Wait, on all processes together; returns whether the checkpoint is complete. Otherwise nothing remains."""
        self._part_tried.wait()
        self._others = all_agree(self._part_written)
        self._thread.join()
        done = bool(of_first_process(self._complete))
        if self._store if not is_first_process() else not done:  # what was handed over is removed, too
            self._clean()
        return done

    def abandon(self) -> None:
        """Wait only for this process's own work, because another process may have ended."""
        self._deadline = time.monotonic() + _PATIENCE
        self._thread.join()

    def _run(self) -> None:
        alone = jax.process_count() == 1
        try:
            self._part_written = self._tried(self._write_all if alone else self._write_part)
            if not alone:
                self._leave_marker()
        finally:
            self._part_tried.set()
        if alone:
            self._complete = self._part_written
        elif is_first_process() and self._part_written and self._others_wrote():
            self._complete = self._tried(self._finish)
        self._canonical = None
        if self._complete and self._store:  # if that fails, it is uploaded later
            self._complete = self._tried(self._store.publish, times=1)
        if self._complete:
            self._then()

    def _tried(self, action: Callable[[], None], times: int = 2) -> bool:
        """Try `action` up to twice; returns whether it succeeded."""
        for _ in range(times):
            try:
                action()
                return True
            except Exception as error:
                self.problem = in_one_line(error)
            forget_abandoned()
        return False

    def _write_all(self) -> None:
        try:
            self._write_part()
            self._finish()
        except BaseException:
            self._clean()
            raise

    def _write_part(self) -> None:
        if self._run_dir is None or identity(self._folder.parent) != self._run_dir:
            raise FileNotFoundError(f"{self._folder.parent} is gone")
        state = self._place / "state"
        state.mkdir(parents=True, exist_ok=True)
        if self._store and not is_first_process():
            (state / "array_metadatas").mkdir(exist_ok=True)  # Orbax waits until process 0 has made it
        self._made = identity(self._place)
        try:
            self._write_arrays(state)
            self._sums = local_checksums(self._canonical)
        finally:
            self._check_place()

    def _write_arrays(self, state: Path) -> None:
        lazy = isinstance(jax.tree.leaves(self._canonical)[0], LazyArray)
        handler = ocp.PyTreeCheckpointHandler(type_handler_registry=_LAZY) if lazy else ocp.StandardCheckpointHandler()
        with contextlib.closing(handler), warnings.catch_warnings(action="ignore"):
            wanted = (ocp.args.PyTreeSave if lazy else ocp.args.StandardSave)(self._canonical)
            for written in asyncio.run(handler.async_save(epath.Path(state), args=wanted)) or []:
                written.result()

    def _check_place(self) -> None:
        """Check that the files are in the folder that was made for them. If that was removed meanwhile, TensorStore has
        recreated it: remove it, with parents that hold nothing else, and raise `FileNotFoundError`."""
        if identity(self._place) == self._made:
            return
        step_folders.remove(self._place)
        with contextlib.suppress(OSError):  # they hold more, or are gone
            self._folder.rmdir()
            self._folder.parent.rmdir()
        raise FileNotFoundError(f"{self._place} was removed")

    def _leave_marker(self) -> None:
        """Leave a file that says whether this process's shards were written."""
        try:
            marker = self._marker(jax.process_index(), self._part_written)
            write_json(marker.with_name(f"{marker.name}.partial"), self._sums)
            marker.with_name(f"{marker.name}.partial").rename(marker)
            if self._store and not is_first_process():
                self._store.hand_over(self._place, self._shares)
        except OSError as error:
            self._part_written, self.problem = False, self.problem or in_one_line(error)

    def _marker(self, process: int, written: bool) -> Path:
        return self._place / f"{'written' if written else 'failed'}-{process}"

    def _others_wrote(self) -> bool:
        processes = range(1, jax.process_count())
        while True:
            others = self._others
            if self._store and not self._tried(functools.partial(self._store.gather, self._place, self._shares)):
                return False
            if others or all(self._marker(process, True).exists() for process in processes):
                return True
            late = self._deadline is not None and time.monotonic() > self._deadline
            if others is False or late or any(self._marker(process, False).exists() for process in processes):
                self.problem = self.problem or "another process could not write its share"
                return False
            time.sleep(20 * _POLL if self._store else _POLL)

    def _finish(self) -> None:
        """Merge what the processes have written and give the folder its final name."""
        for process in range(jax.process_count()):
            marker = self._marker(process, True)
            if process and marker.exists():  # it is gone on the second attempt
                parts = read_json(marker)
                self._sums = {name: (total + parts[name]) % 2**32 for name, total in self._sums.items()}
            marker.unlink(missing_ok=True)
        with contextlib.closing(ocp.StandardCheckpointHandler()) as handler, warnings.catch_warnings(action="ignore"):
            handler.finalize(epath.Path(self._place / "state"))
        self._check_place()
        Manifest.for_folder(self._place, self._sums).write(self._place)
        if os.path.lexists(self._folder / str(self.step)):
            step_folders.set_aside(self._folder, self.step)
        self._place.rename(self._folder / str(self.step))

    def _clean(self) -> None:
        try:
            step_folders.clear(self._folder, self.step)
        except OSError as error:
            self.problem = f"{self.problem}; the partial checkpoint cannot be removed: {in_one_line(error)}"


@dataclass
class LazyArray:
    """An array that is made when it is written and dropped afterwards, so that the whole state is never in memory. Only
    one process writes such arrays."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]
    sum: int | None = field(default=None, compare=False)  # its checksum, once it is written

    @property
    def size(self) -> int:
        """Needed by Orbax, like `nbytes`."""
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


def new_state(layout: StateLayout, weight: Callable[[Any, tuple[int, ...]], np.ndarray]) -> TrainState:
    """The canonical state before the first step; `weight` makes a canonical main weight from its path and shape."""
    shapes = layout.canonical_shapes
    copied = layout.own is not None or shapes.average is not None  # numbers of weights, in the rest of the state
    first = lambda path, of: weight(path, of.shape).astype(of.dtype) if copied else jnp.zeros((), of.dtype)  # noqa: E731
    begun = layout.begin(jax.tree_util.tree_map_with_path(first, shapes.params))
    begun = dataclasses.replace(begun, params=None, loss_scale=begun.loss_scale.stored(layout.loss_scale))

    def filled(shape: jax.ShapeDtypeStruct, value: Any) -> LazyArray:
        """A leaf other than the weights, filled with one number if that is all there is."""
        number = np.asarray(value)
        whole = np.zeros if not number.any() else lambda *given: np.full(given[0], number, given[1])
        return LazyArray(shape.shape, number.dtype, lambda: whole(shape.shape, number.dtype))

    def made(path: Any, shape: jax.ShapeDtypeStruct) -> LazyArray:
        dtype = np.dtype(shape.dtype)
        return LazyArray(shape.shape, dtype, lambda: weight(path, shape.shape).astype(dtype, copy=False))

    state = jax.tree.map(filled, dataclasses.replace(shapes, params=None), begun)
    return dataclasses.replace(state, params=jax.tree_util.tree_map_with_path(made, shapes.params))


class _LazyHandler(ocp.type_handlers.NumpyHandler):
    """Writes `LazyArray` like Orbax writes numpy arrays."""

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """Write them one by one: each is dropped before the next is made."""
        for index, (value, info) in enumerate(zip(values, infos, strict=True)):
            array = value.make()
            assert (array.shape, array.dtype) == (value.shape, value.dtype), (value.shape, array.shape)
            value.sum = checksum(array)
            for written in await super().serialize([array], [info], args and [args[index]]):
                written.result()
            del array
        return []


_LAZY = ocp.type_handlers.create_type_handler_registry((LazyArray, _LazyHandler(deepcopy_host_arrays=False)))

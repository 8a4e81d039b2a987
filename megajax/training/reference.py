"""What the reference model of a run on preferences, which is the one that the run begins with, thinks of its pairs."""

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megajax.core.errors import RunError
from megajax.core.models.preferences import REFERENCE
from megajax.core.program.program import Program
from megajax.data.tasks.preferences import PreferenceRows
from megajax.evaluation.scoring import score_samples
from megajax.host.files import write_atomically
from megajax.host.processes import on_first_process
from megajax.runs.task_data import TaskData

_FILE = "reference.npy"  # in a run's data folder: of the training pairs, then of the dev pairs


def add_reference(data: Any, program: Program, params: Callable[[], Any], folder: Path, step: int) -> None:
    """Give the pairs of a run what the reference thinks of them: computed once, from the weights before step 1."""
    if not isinstance(data, TaskData) or not isinstance(data.train_samples, PreferenceRows):
        return
    parts = [data.train_samples, data.validation]
    file = folder / _FILE
    if step == 0:
        found = np.concatenate([_reference(program, params(), part) for part in parts])
        on_first_process(lambda: _write(file, found))
    elif not file.is_file():
        raise RunError(f"{file} is missing; it was computed from the weights that the run began with")
    else:
        found = np.load(file, allow_pickle=False)
    if len(found) != sum(map(len, parts)):
        raise RunError(f"{file} is of other pairs than those of --data.train and --data.dev")
    for part, own in zip(parts, np.split(found, [len(parts[0])]), strict=True):
        part.reference = own  # type: ignore[union-attr]


def _reference(program: Program, params: Any, samples: Any) -> npt.NDArray[np.float32]:
    scoring = Program(dataclasses.replace(program.config, own_loss=REFERENCE), program.mesh, program.backend)
    rows = score_samples(scoring, params, samples)
    return np.array([row[REFERENCE.name].loss.sum() for row in rows], np.float32)


def _write(file: Path, found: npt.NDArray[np.float32]) -> list[int]:
    content = io.BytesIO()
    np.save(content, found)
    write_atomically(file, content.getvalue())
    return []

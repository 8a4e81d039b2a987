"""What the reference model of a run on preferences, which is the one that the run begins with, thinks of its pairs."""

import dataclasses
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megajax.core.errors import RunError, UserError
from megajax.core.models.preferences import REFERENCE
from megajax.core.program.program import Program
from megajax.core.program.state import TrainState
from megajax.data.tasks.preferences import PreferenceRows
from megajax.data.text.digests import Digester, root
from megajax.evaluation.scoring import score_samples
from megajax.host import reading
from megajax.host.files import write_atomically
from megajax.host.processes import on_first_process, say
from megajax.runs.checkpoint import Checkpoints
from megajax.runs.directory import last_start, trained_steps
from megajax.runs.init import first_state
from megajax.runs.ownership import MARK
from megajax.runs.task_data import TaskData, records_digest
from megajax.settings.config import Config

_FILE = "reference.npy"  # in the run directory, before in its data folder: of the training pairs, then of the dev pairs
_DIGEST = 32  # characters of the digest at its end
_Values = npt.NDArray[np.float32]


def add_reference(
    data: Any, program: Program, config: Config, weights: Callable[[TrainState], Any], state: TrainState | None
) -> None:
    """Give the pairs of a run what the reference thinks of them: computed from the `weights` of its first `state`, and
    kept; without a state what was kept, which is computed again if it is lost."""
    if not isinstance(data, TaskData) or not isinstance(data.train_samples, PreferenceRows):
        return
    parts = [data.train_samples, data.validation]
    count, pairs = sum(map(len, parts)), records_digest([record for rows in parts for record in rows.records])
    run_dir = Path(config.run_dir)
    places = [run_dir / _FILE, run_dir / "data" / _FILE]
    wanted = range(len(places)) if state is None else ()
    usable = on_first_process(lambda: [n for n in wanted if _kept(places[n], pairs, count) is not None])
    if usable:
        log_probs = _kept(places[usable[0]], pairs, count)
    else:
        params = weights(state) if state else _first_weights(config, program, weights, places[0])
        log_probs = np.concatenate([_reference(program, params, rows) for rows in parts])
    if log_probs is None or not np.isfinite(log_probs).all():
        raise RunError(f"the reference's log-probabilities for {places[0]} are not finite, or cannot be read here")
    if 0 not in usable:
        on_first_process(lambda: write_atomically(places[0], _content(log_probs, pairs)))
    for rows, values in zip(parts, np.split(log_probs, [len(parts[0])]), strict=True):
        rows.reference = values  # type: ignore[union-attr]


def _first_weights(config: Config, program: Program, weights: Callable[[TrainState], Any], file: Path) -> Any:
    """The weights that a run began with: those of its step 0, or else of its `--init`."""
    run_dir = Path(config.run_dir)
    earlier, checkpoints = last_start(run_dir, config), Checkpoints(run_dir, program.layout)
    try:
        if 0 in checkpoints.steps():
            origin, params = "step 0", checkpoints.restore_params(0)
        elif earlier.init:
            if init_has_changed(vars(earlier), run_dir):
                raise RunError(f"{earlier.init} was trained since this run began")
            first = dataclasses.replace(config, init=earlier.init, init_step=earlier.init_step)
            origin, params = f"--init {earlier.init}", weights(first_state(first, program)[0])
        else:
            raise RunError("the run has neither step 0 nor --init")
    except (RunError, UserError) as error:
        problem = f"{file} is missing or damaged, and cannot be computed again: {error}"
        raise RunError(f"{problem}; it was computed from the weights that the run began with") from None
    say(f"{file} is missing or damaged: computed again from {origin}")
    return params


def init_has_changed(began: Mapping[str, Any], run_dir: Path) -> bool:
    """Whether a run `began` with the newest weights of a run that was trained since; of one in a store nobody knows."""
    if not began.get("init") or began.get("init_step", "latest") != "latest":
        return False
    newest = Path(began["init"], "checkpoints", str(trained_steps(Path(began["init"]))))
    return newest.exists() and newest.stat().st_mtime > (run_dir / MARK).stat().st_mtime


def _reference(program: Program, params: Any, samples: Any) -> _Values:
    scoring = Program(dataclasses.replace(program.config, own_loss=REFERENCE), program.mesh, program.backend)
    rows = score_samples(scoring, params, samples)
    return np.array([row[REFERENCE.name].loss.sum() for row in rows], np.float32)


def _content(values: _Values, pairs: str) -> bytes:
    """A file of NumPy's, and after it a digest of it and of the pairs."""
    content, digest = io.BytesIO(), Digester()
    np.save(content, values)
    digest.update(pairs.encode() + content.getvalue())
    return content.getvalue() + root(digest.finish()).encode()


def _kept(file: Path, pairs: str, count: int) -> _Values | None:
    """The values in a file; None unless it is as it was written, for these pairs. Earlier versions, which wrote to the
    data folder, wrote no digest."""
    size = len(_content(np.zeros(count, np.float32), pairs))
    try:
        content = reading.read_bytes(file, size)
    except (OSError, UserError):
        return None
    end = size - _DIGEST
    values = np.frombuffer(content.ljust(size)[end - 4 * count : end], np.float32)
    expected = _content(values, pairs)[: end if file.parent.name == "data" else size]
    return values if content == expected and np.isfinite(values).all() else None

"""What runs leave behind: figures, checkpoints, files."""

import hashlib
import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp


def records(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def training(run_dir: Path) -> list[dict[str, Any]]:
    """The training lines of metrics.jsonl."""
    return [record for record in records(run_dir) if "loss" in record]


def curve(run_dir: Path) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm of every training line."""
    return [(record["step"], record["loss"], record["grad_norm"]) for record in training(run_dir)]


def validation(run_dir: Path) -> dict[int, float]:
    """Validation loss by step."""
    return {record["step"]: record["validation_loss"] for record in records(run_dir) if "validation_loss" in record}


def assert_close_losses(found: Iterable[tuple], expected: Iterable[tuple], relative: float = 1e-6) -> None:
    """Two curves have the same steps, and every loss within `relative`."""
    found, expected = list(found), list(expected)
    assert [point[0] for point in found] == [point[0] for point in expected]
    for (step, loss, _), (_, wanted, _) in zip(found, expected, strict=True):
        assert abs(loss - wanted) <= relative * abs(wanted), (step, loss, wanted)


def checkpoint_steps(run_dir: Path) -> list[int]:
    """Steps of the checkpoints of a run, ascending."""
    return sorted(int(entry.name) for entry in (run_dir / "checkpoints").iterdir() if entry.name.isdecimal())


def checkpoint_arrays(run_dir: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint by name, read by Orbax alone."""
    folder = run_dir.absolute() / "checkpoints" / str(step) / "state"
    with warnings.catch_warnings(action="ignore"), ocp.PyTreeCheckpointer() as reader:
        tree = reader.metadata(folder).item_metadata.tree
        plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        restored = reader.restore(folder, restore_args=plain)
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(restored)}


def assert_same_checkpoint(run_dir: Path, other: Path, step: int) -> None:
    """Two runs' checkpoints of a step hold the same arrays, bit for bit."""
    found, expected = checkpoint_arrays(run_dir, step), checkpoint_arrays(other, step)
    assert found.keys() == expected.keys() and len(found) > 10
    for name, array in found.items():
        wanted = expected[name]
        assert (array.dtype, array.shape) == (wanted.dtype, wanted.shape), name
        assert array.tobytes() == wanted.tobytes(), name


def contents(folder: Path) -> dict[str, str]:
    """Every entry below a folder with a digest of its bytes; empty where there is no folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }

"""A finished run's configuration and weights, on the mesh asked for."""

import dataclasses
from pathlib import Path
from typing import Any

import jax

from megajax.config import Config, MeshConfig
from megajax.errors import RunError, UserError
from megajax.launch import start
from megajax.precision import MAIN_DTYPE
from megajax.presets import load_preset, resolve
from megajax.training.checkpoint import Checkpoints, DamagedCheckpoint, choose_step
from megajax.training.step import Program
from megajax.validation import validate_mesh

_NOT_KEPT = ("mesh.", "pipeline.", "distributed.", "simulate_devices", "optimizer.gradient_dtype")


def check_run(run_dir: Path) -> None:
    """Raises `UserError` where `--checkpoint` is not the directory of a run."""
    if not (run_dir / "config.toml").is_file():
        raise UserError(f"--checkpoint {run_dir}: no config.toml there; valid: the run directory of a training")


def restored_config(run_dir: Path, overrides: dict[str, Any]) -> Config:
    """The run's configuration on the mesh asked for, where none is on all devices as `data`; starts JAX.

    A batch fills the pipeline once.

    Raises:
        UserError: the mesh or the precision does not suit the run.
    """
    preset = {
        key: value for key, value in load_preset(run_dir / "config.toml").items() if not key.startswith(_NOT_KEPT)
    }
    config = resolve(preset, overrides)
    earlier = preset["precision"]
    if MAIN_DTYPE[config.precision] != MAIN_DTYPE[earlier]:
        raise UserError(f"--precision {config.precision}: {run_dir} holds a run in {earlier}; valid: {earlier}")
    start(config)
    if not any(key.startswith("mesh.") for key in overrides):
        config = dataclasses.replace(config, mesh=MeshConfig(data=jax.device_count()))
    validate_mesh(config, jax.device_count())
    rows = config.mesh.data * config.mesh.pipe * config.train.microbatch
    return dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch=rows))


def restore_params(program: Program, run_dir: Path, wanted: str) -> tuple[Any, int]:
    """Weights of a run's checkpoint on the program's mesh, and its step; see `choose_step`.

    Raises:
        UserError: there is no such checkpoint.
        RunError: it is damaged.
    """
    checkpoints = Checkpoints(run_dir, program.layout)
    number = choose_step(run_dir, checkpoints.steps(), wanted)
    try:
        return checkpoints.restore(number).params, number
    except DamagedCheckpoint as error:
        raise RunError(f"damaged checkpoint: {error}; another can be chosen by --step") from None
    finally:
        checkpoints.close()

"""A run's model on the mesh asked for."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax import reading
from megajax.config import Config, MeshConfig
from megajax.data.corpus import kept_tokenizer
from megajax.data.tokenizer import Tokenizer
from megajax.errors import RunError, UserError
from megajax.launch import start
from megajax.models.config import ModelConfig
from megajax.models.registry import FAMILIES
from megajax.paths import check_path
from megajax.program.memory import check_memory
from megajax.program.program import Program
from megajax.program.state import StateLayout, TrainState
from megajax.runs.checkpoint import Checkpoints, choose_step
from megajax.runs.directory import kept_config
from megajax.runs.mismatch import check_fits
from megajax.runs.ownership import check_format, marked_format
from megajax.runs.stored import DamagedCheckpoint
from megajax.validation import validate_mesh


@dataclass(frozen=True)
class TrainedModel:
    """A program with the weights of a checkpoint.

    Attributes:
        params: the weights that layers compute with, where `program.layout.specs` has them.
        step: that they are of.
    """

    program: Program
    params: Any
    step: int

    @classmethod
    def restore(cls, run_dir: Path, config: Config, step: str) -> "TrainedModel":
        """The weights of a run's checkpoint on the configuration's mesh; see `choose_step`.

        Raises:
            UserError: there is no such checkpoint, or not enough memory for it and a microbatch.
            RunError: it is damaged.
        """
        program = Program.on(config)
        check_memory(program, training=False, rows=config.train.microbatch)
        return cls(program, *restore_params(program, run_dir, step))


def restore_params(program: Program, run_dir: Path, step: str) -> tuple[Any, int]:
    """Weights of a run's checkpoint on the program's mesh, and their step; see `choose_step`.

    Raises:
        UserError: there is no such checkpoint.
        RunError: it is damaged.
    """
    checkpoints = Checkpoints(run_dir, program.layout)
    number = choose_step(run_dir, checkpoints.steps(), step)
    with _damage_told(checkpoints, number, program.layout.model):
        return checkpoints.restore_params(number), number


def restore_state(program: Program, run_dir: Path, step: str) -> tuple[TrainState, int]:
    """The whole state of a run's checkpoint on the program's mesh; otherwise as `restore_params`."""
    checkpoints = Checkpoints(run_dir, program.layout)
    number = choose_step(run_dir, checkpoints.steps(), step)
    with _damage_told(checkpoints, number, program.layout.model):
        return checkpoints.restore(number), number


def weights_in_parts(layout: StateLayout, run_dir: Path, step: str) -> tuple[Callable[[list[Any]], list[Any]], int]:
    """A function from paths in the tree of canonical main weights to these, with what their adapters add, of a run's
    checkpoint, and its step; of the others nothing is read. Of paths of adapters these themselves. See `choose_step`;
    the function raises `RunError` where the checkpoint is damaged.

    Raises:
        UserError: there is no such checkpoint.
    """
    checkpoints = Checkpoints(run_dir, layout)
    number = choose_step(run_dir, checkpoints.steps(), step)
    adapters = None if layout.adapters is None else layout.adapters.adapters

    def read(paths: list[Any]) -> list[Any]:
        pairs = {path: pair for path in paths if adapters is not None and (pair := adapters.of(path)) is not None}
        beside = [path for pair in pairs.values() for path in pair.values()]
        with _damage_told(checkpoints, number, layout.model):
            found = checkpoints.read_some_weights(number, [*paths, *beside])
        for path, pair in pairs.items():
            assert adapters is not None
            added = adapters.added(
                {name: jnp.asarray(found[each]) for name, each in pair.items()}, adapters.inner_of(path)
            )
            found[path] = found[path] + np.asarray(added)
        return [found[path] for path in paths]

    return read, number


@contextlib.contextmanager
def _damage_told(checkpoints: Checkpoints, step: int, model: ModelConfig) -> Iterator[None]:
    """For reading a checkpoint.

    Raises:
        UserError: it is of another model.
        RunError: it is damaged.
    """
    try:
        yield
    except DamagedCheckpoint as error:
        check_fits(checkpoints.folder / str(step), model)
        raise RunError(f"damaged checkpoint: {error}; another can be chosen by --step") from None
    finally:
        checkpoints.close()


def check_run(run_dir: Path, flag: str = "--checkpoint") -> None:
    """Refuse what is not the directory of a run, or one of a newer version.

    Raises:
        UserError: that names `flag`.
    """
    check_path(run_dir, flag)
    if not reading.is_file(run_dir / "config.toml"):
        raise UserError(f"{flag} {run_dir}: no config.toml there; valid: the run directory of a training")
    check_format(marked_format(run_dir) or 1, f"{flag} {run_dir}")


def evaluation_config(
    run_dir: Path, overrides: dict[str, Any], *, any_model: bool = False, mesh: MeshConfig | None = None
) -> Config:
    """The run's configuration on the mesh asked for, where none is on all devices as `data`; starts JAX.

    A batch fills the pipeline once.

    Args:
        run_dir: the run.
        overrides: values that replace its own, by key.
        any_model: it need not be a language model.
        mesh: of another run, for which JAX has started already.

    Raises:
        UserError: there is no run, or it cannot be used so.
    """
    check_run(run_dir)
    config = kept_config(run_dir, overrides)
    if not (any_model or FAMILIES[config.model.family].continues_text):
        valid = " or ".join(name for name, entry in FAMILIES.items() if entry.continues_text)
        raise UserError(
            f"--checkpoint {run_dir}: a model of the family {config.model.family} does not predict the next token; "
            f"valid: a run of --model.family {valid}"
        )
    if mesh is None:
        start(config)
    else:
        config = dataclasses.replace(config, mesh=mesh)
    if mesh is None and not any(key.startswith("mesh.") for key in overrides):
        config = dataclasses.replace(config, mesh=MeshConfig(data=jax.device_count()))
    validate_mesh(config, jax.device_count())
    rows = config.mesh.row_shards * config.mesh.pipe * config.train.microbatch
    return dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch=rows))


def run_tokenizer(run_dir: Path, config: Config) -> Tokenizer:
    """The tokenizer that a run was trained with.

    Raises:
        UserError: it has none, or one with more ids than the model.
    """
    folder = run_dir / "data" / "tokenizer"
    if not reading.kind(folder):
        raise UserError(f"--checkpoint {run_dir} has no tokenizer for text; valid: a run with {folder}")
    tokenizer = kept_tokenizer(run_dir / "data")
    if tokenizer.size > config.model.vocab_size:
        raise UserError(
            f"--checkpoint {run_dir}: the tokenizer in {folder} has {tokenizer.size} ids; "
            f"valid: at most the model's {config.model.vocab_size}"
        )
    return tokenizer

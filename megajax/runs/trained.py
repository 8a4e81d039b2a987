"""Load a run's model, on any mesh."""

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.core.config import MODELS_OWN, MeshConfig
from megajax.core.errors import UserError
from megajax.core.models.registry import FAMILIES
from megajax.core.program.program import Program
from megajax.core.program.state import StateLayout
from megajax.data.text.corpus import corpus_tokenizer
from megajax.data.text.tokenizer import Tokenizer
from megajax.host import reading
from megajax.host.paths import apart, check_path
from megajax.host.processes import is_first_process
from megajax.runs.checkpoint import Checkpoints, choose_step
from megajax.runs.directory import stored_config
from megajax.runs.ownership import check_format, marked_format
from megajax.settings.config import Config
from megajax.settings.validation import validate_mesh, with_data
from megajax.start.device_memory import check_memory
from megajax.start.fused_forms import cannot_attend
from megajax.start.launch import start


@dataclass(frozen=True)
class TrainedModel:
    """A program with the weights of a checkpoint."""

    program: Program
    params: Any  # in the compute dtype, sharded like `program.layout.specs`
    step: int  # the checkpoint's

    @classmethod
    def restore(cls, run_dir: Path, config: Config, step: str) -> "TrainedModel":
        """The weights of a run's checkpoint on the configuration's mesh."""
        program = Program.on(config)
        check_memory(program, training=False, rows=config.train.microbatch)
        return cls(program, *restore_params(program, run_dir, step))


def restore_params(program: Program, run_dir: Path, step: str, *, optimizer: bool = False) -> tuple[Any, int]:
    """Weights of a run's checkpoint on the program's mesh (with `optimizer`, its whole `TrainState`), and the step that
    `choose_step` finds."""
    checkpoints = Checkpoints(run_dir, program.layout)
    chosen = choose_step(run_dir, checkpoints.steps(), step)
    if not optimizer:
        _note_average(checkpoints, run_dir, chosen)
        note_attention(program, run_dir)
    return (checkpoints.restore if optimizer else checkpoints.restore_params)(chosen), chosen


def weights_in_parts(layout: StateLayout, run_dir: Path, step: str) -> tuple[Callable[[list[Any]], list[Any]], int]:
    """A function that reads only the canonical main weights (with LoRA merged) or adapters at some paths from a run's
    checkpoint, and the step found by `choose_step`."""
    checkpoints = Checkpoints(run_dir, layout)
    chosen = choose_step(run_dir, checkpoints.steps(), step)
    adapters = layout.adapters
    _note_average(checkpoints, run_dir, chosen)

    def read(paths: list[Any]) -> list[Any]:
        pairs = {path: of for path in paths if adapters is not None and (of := adapters.of(path)) is not None}
        adapter_paths = [path for pair, _ in pairs.values() for path in pair.values()]
        weights = checkpoints.read_some_weights(chosen, [*paths, *adapter_paths])
        for path, (pair, inner) in pairs.items():
            assert adapters is not None
            factors = {name: jnp.asarray(weights[each]) for name, each in pair.items()}
            weights[path] = weights[path] + np.asarray(adapters.added(factors, inner))
        return [weights[path] for path in paths]

    return read, chosen


def _note_average(checkpoints: Checkpoints, run_dir: Path, step: int) -> None:
    """Note on standard error if the weights that are read are averages."""
    if checkpoints.averaged(step):
        _note(run_dir, "using the averaged weights (train.ema); --weights trained selects the latest ones")


def note_attention(program: Program, run_dir: Path) -> None:
    """Note it if the run asks for an implementation of attention that is impossible here, so that blocks are used."""
    if why := cannot_attend(program, training=False):
        _note(run_dir, f"{why[0]}; using blocks")


def _note(run_dir: Path, note: str) -> None:
    if is_first_process():
        print(f"{run_dir}: {note}", file=sys.stderr)


def check_run(run_dir: Path, flag: str = "--checkpoint") -> None:
    """Check that a folder is a run directory of this version or an older one; `flag` names it in error messages."""
    check_path(run_dir, flag)
    if not reading.is_file(run_dir / "config.toml"):
        if reading.is_file(run_dir / "config.json"):
            raise UserError(
                f"{flag} {run_dir}: a model in the Hugging Face format; valid: the RUN made by `megajax "
                f"convert import-hf {run_dir} RUN`"
            )
        run, step = run_dir.parent.parent, run_dir.name
        if run_dir.parent.name == "checkpoints" and reading.is_file(run / "config.toml"):
            step_flag = "--init-step" if flag == "--init" else "--step"
            raise UserError(f"{flag} {run_dir}: a checkpoint; valid: its run, {run}, with {step_flag} {step}")
        several = apart(str(run_dir), lambda part: reading.is_file(Path(part) / "config.toml"))
        raise UserError(f"{flag} {run_dir}: no config.toml found; valid: the directory of a training run{several}")
    check_format(marked_format(run_dir) or 1, f"{flag} {run_dir}")


def evaluation_config(
    run_dir: Path, overrides: dict[str, Any], *, any_model: bool = False, mesh: MeshConfig | None = None
) -> Config:
    """The configuration of a run for an evaluation, with a batch that fills the pipeline once; `any_model` allows
    models that do not generate text. Starts JAX, unless it was started for another run, whose `mesh` is then given. If
    no mesh is given, all devices are `data`."""
    check_run(run_dir)
    config = stored_config(run_dir, overrides)
    if not (any_model or FAMILIES[config.model.family].continues_text):
        valid = " or ".join(name for name, entry in FAMILIES.items() if entry.continues_text)
        raise UserError(
            f"--checkpoint {run_dir}: a model of the family {config.model.family} does not predict the next token; "
            f"valid: a run of --model.family {valid}"
        )
    if mesh is None:
        start(config)
        given = any(key.startswith("mesh.") for key in overrides)
        of_flags = with_data(config, jax.device_count(), trains=False).mesh
        mesh = of_flags if given else MeshConfig(data=jax.device_count())
    config = dataclasses.replace(config, mesh=mesh)
    validate_mesh(config, jax.device_count())
    rows = config.mesh.row_shards * config.mesh.pipe * config.train.microbatch
    train = dataclasses.replace(config.train, global_batch=rows, loss=MODELS_OWN, metrics=())
    return dataclasses.replace(config, train=train)


def run_tokenizer(run_dir: Path, config: Config) -> Tokenizer:
    """The tokenizer that a run was trained with."""
    folder = run_dir / "data" / "tokenizer"
    if not reading.kind(folder):
        raise UserError(f"--checkpoint {run_dir} has no tokenizer; valid: a run with {folder}")
    tokenizer, most = corpus_tokenizer(run_dir / "data"), config.model.vocab_size
    if tokenizer.size > most:
        has = f"the tokenizer in {folder} has {tokenizer.size} ids"
        raise UserError(f"--checkpoint {run_dir}: {has}; valid: at most the model's {most}")
    return tokenizer

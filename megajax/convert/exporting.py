"""A run's checkpoint as a folder that `transformers` loads."""

import dataclasses
from pathlib import Path

import jax

from megajax import reading
from megajax.config import Config
from megajax.convert.families import EXCHANGES
from megajax.convert.importing import check_new
from megajax.convert.tensor_files import WEIGHTS
from megajax.convert.tokenizer_files import write_objects
from megajax.convert.weights import to_tensors
from megajax.data.corpus import kept_tokenizer
from megajax.data.files import folder_atomically
from megajax.data.tokenizer import Tokenizer
from megajax.errors import UserError
from megajax.mesh import make_mesh
from megajax.program.memory import check_memory
from megajax.program.program import Program
from megajax.runs.directory import kept_config
from megajax.runs.trained import check_run, restore_params
from megajax.tasks.registry import TASKS


def export_config(run_dir: Path) -> Config:
    """The configuration of a run on one device, in the precision of its main weights.

    Raises:
        UserError: there is no run.
    """
    check_run(run_dir, "RUN")
    config = kept_config(run_dir, {})
    if config.model.family not in EXCHANGES:
        raise UserError(
            f"RUN {run_dir} holds a model of the family {config.model.family}; valid: {', '.join(EXCHANGES)}"
        )
    return dataclasses.replace(config, precision="fp64" if config.precision == "fp64" else "fp32")


def export_hf(run_dir: Path, config: Config, folder: Path, step: str = "latest") -> tuple[int, Tokenizer | None]:
    """Write main weights in fp32, configuration and tokenizer to `folder`, which appears whole or not at all.

    Args:
        config: `export_config(run_dir)`.
        step: of the checkpoint, `latest`, or `best`.

    Returns:
        The step, and the tokenizer that was written, None if the run has none.

    Raises:
        UserError: there is no such checkpoint; `folder` is not empty, or cannot be written.
        RunError: the checkpoint is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    check_new(folder, "PATH")
    own = run_dir / "data" / "tokenizer"
    tokenizer = kept_tokenizer(run_dir / "data") if reading.kind(own) else None
    exchange = EXCHANGES[config.model.family]
    labels = () if config.pretrains else TASKS[config.task.name].labels
    settings = exchange.settings(config.model, labels, tokenizer)
    program = Program(config, make_mesh(1, 1, 1, jax.devices()[:1]))
    check_memory(program, training=False)
    params, number = restore_params(program, run_dir, step)
    natural = jax.device_get(program.layout.natural_weights(params))
    tensors = to_tensors(exchange.places(config.model), natural, config.model)
    with folder_atomically(folder.absolute()) as new:
        try:
            save_file(tensors, new / WEIGHTS, metadata={"format": "pt"})
        except SafetensorError as error:  # of the system's errors only the words are left
            problem = "no space left on device" if "No space left" in str(error) else str(error)
            raise UserError(f"{new / WEIGHTS}: cannot be written: {problem}; valid: a place that can be") from None
        write_objects(new, settings)
        (new / WEIGHTS).chmod((new / "config.json").stat().st_mode)  # safetensors lets nobody else read it
        if tokenizer:
            exchange.write_tokenizer(tokenizer, config.model.sequence_length, new)
    return number, tokenizer

"""A run's checkpoint as a folder that `transformers` loads."""

import dataclasses
import json
from pathlib import Path

import jax

from megajax import reading
from megajax.config import Config
from megajax.convert.importing import check_new
from megajax.convert.settings import to_settings
from megajax.convert.tensor_files import WEIGHTS
from megajax.convert.tokenizer_files import write_tokenizer
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

EXPORTED = ("gpt2",)  # families that Hugging Face's format is written of


def export_config(run_dir: Path) -> Config:
    """The configuration of a run on one device, in the precision of its main weights.

    Raises:
        UserError: there is no run.
    """
    check_run(run_dir, "RUN")
    config = kept_config(run_dir, {})
    if config.model.family not in EXPORTED:
        raise UserError(
            f"RUN {run_dir} holds a model of the family {config.model.family}; valid: {', '.join(EXPORTED)}"
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
    from safetensors.numpy import save_file

    check_new(folder, "PATH")
    own = run_dir / "data" / "tokenizer"
    tokenizer = kept_tokenizer(run_dir / "data") if reading.kind(own) else None
    program = Program(config, make_mesh(1, 1, 1, jax.devices()[:1]))
    check_memory(program, training=False)
    params, number = restore_params(program, run_dir, step)
    tensors = to_tensors(jax.device_get(program.layout.natural_weights(params)), config.model)
    settings = to_settings(config.model, tokenizer.end_of_text if tokenizer else None)
    with folder_atomically(folder.absolute()) as new:
        named = {f"transformer.{name}": tensor for name, tensor in tensors.items()}
        save_file(named, new / WEIGHTS, metadata={"format": "pt"})
        for name, content in zip(("config.json", "generation_config.json"), settings, strict=True):
            (new / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        (new / WEIGHTS).chmod((new / "config.json").stat().st_mode)  # safetensors lets nobody else read it
        if tokenizer:
            write_tokenizer(tokenizer, config.model.sequence_length, new)
    return number, tokenizer

"""A GPT-2 in Hugging Face's format as a run directory that stands at step 0."""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from megajax.backend import CPU
from megajax.config import Config, to_toml
from megajax.convert.settings import read_settings
from megajax.convert.tensor_files import TensorFiles
from megajax.convert.tokenizer_files import read_tokenizer
from megajax.convert.weights import from_tensors, tensor_shapes
from megajax.data.files import folder_atomically, write_atomically
from megajax.data.tokenizer import Tokenizer
from megajax.errors import UserError
from megajax.mesh import make_mesh
from megajax.models.family import CutModel
from megajax.parallel.borders import F_AND_G
from megajax.paths import check_place
from megajax.program.state import StateLayout
from megajax.runs.checkpoint import Checkpoints
from megajax.runs.ownership import mark


@dataclass(frozen=True)
class Source:
    """A model in Hugging Face's format, checked, its weights not read yet.

    Attributes:
        config: of a run that trains on, its run directory not set.
        prefix: what the names of the tensors begin with.
        added_tokens: tokens that were added to the tokenizer and that ours does not know.
    """

    config: Config
    tensors: TensorFiles
    prefix: str
    tokenizer: Tokenizer | None
    added_tokens: list[str]


def open_source(folder: Path, overrides: Mapping[str, Any] | None = None) -> Source:
    """The model in `folder`; `overrides` by key replace what its `config.json` says.

    Raises:
        UserError: it is not a GPT-2, its files are damaged or do not fit each other, or hold weights as a pickle.
    """
    config = read_settings(folder, overrides or {})
    tensors = TensorFiles(folder)
    prefix = "transformer." if any(name.startswith("transformer.") for name in tensors.shapes) else ""
    if config.model.num_layers > max(len(tensors.shapes), _LAYERS):  # each has several
        raise UserError(
            f"{folder / 'config.json'}: n_layer is {config.model.num_layers}, but there are {len(tensors.shapes)} "
            "tensors in all; valid: the number of layers in the safetensors"
        )
    shapes = {prefix + name: shape for name, shape in tensor_shapes(config.model).items()}
    tensors.check(shapes)
    layers = range(config.model.num_layers)
    masks = {f"{prefix}h.{layer}.attn.{name}" for layer in layers for name in ("bias", "masked_bias")}
    tensors.check_no_others(shapes.keys() | masks | {"lm_head.weight"})
    if "lm_head.weight" in tensors.shapes:
        table = f"{prefix}wte.weight"
        if not np.array_equal(tensors.read("lm_head.weight"), tensors.read(table)):
            raise UserError(f"{folder}: lm_head.weight differs from {table}; valid: the same, the head is tied")
    tokenizer, added = read_tokenizer(folder)
    if tokenizer and tokenizer.size > config.model.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.size} ids, vocab_size in config.json is "
            f"{config.model.vocab_size}; valid: no more ids than that"
        )
    return Source(config, tensors, prefix, tokenizer, added)


_LAYERS = 1000  # are soon looked for one by one


def check_new(folder: Path, name: str) -> None:
    """Raises `UserError` unless `folder`, the argument `name`, is empty, or does not exist and can be made."""
    check_place(folder, name)
    if os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir() or any(folder.iterdir())):
        kind = "a link" if folder.is_symlink() else "not empty" if folder.is_dir() else "a file"
        raise UserError(f"{name} {folder} is {kind}; valid: an empty folder, or a path that does not exist")


def import_hf(source: Source, run_dir: Path) -> None:
    """Write the run directory, which appears whole or not at all: configuration, tokenizer, and a checkpoint of step 0
    with fresh optimizer state.

    Raises:
        UserError: `run_dir` is not empty, or cannot be written.
        RunError: the checkpoint cannot be written.
    """
    check_new(run_dir, "RUN")
    config = dataclasses.replace(source.config, run_dir=str(run_dir))
    weights = from_tensors(lambda name: source.tensors.read(source.prefix + name), config.model)
    layout = StateLayout(config, make_mesh(1, 1, 1, jax.devices()[:1]), CutModel(config.model, F_AND_G, CPU))
    with folder_atomically(run_dir.absolute()) as new:
        mark(new)
        checkpoints = Checkpoints(new, layout, keep=config.checkpoint.keep)
        try:
            checkpoints.save(0, layout.from_natural(layout.begin(weights)))
            checkpoints.wait()
        finally:
            checkpoints.close()
        if source.tokenizer:
            source.tokenizer.save(new / "data" / "tokenizer")
        write_atomically(new / "config.toml", to_toml(config))

"""A model in Hugging Face's format as a run directory that stands at step 0."""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from megajax.backend import CPU
from megajax.config import Config, to_toml
from megajax.convert.exchange import Exchange
from megajax.convert.families import exchange_of
from megajax.convert.origin import Origin
from megajax.convert.settings import RECIPE, Fields
from megajax.convert.stored_weights import StoredWeights
from megajax.convert.tokenizer_files import read_tokenizer
from megajax.convert.weights import Tensor
from megajax.data.files import folder_atomically, write_atomically
from megajax.data.tokenizer import Tokenizer
from megajax.errors import RunError, UserError
from megajax.host.paths import check_place
from megajax.mesh import make_mesh
from megajax.models.family import CutModel
from megajax.models.registry import FAMILIES
from megajax.parallel.boundary import F_AND_G
from megajax.program.state import StateLayout
from megajax.runs.checkpoint import Checkpoints
from megajax.runs.ownership import mark
from megajax.settings.presets import resolve


@dataclass(frozen=True)
class Source:
    """A model in Hugging Face's format, checked, its weights not read yet.

    Attributes:
        config: of a run that trains on, its run directory not set.
        exchange: of its class.
        origin: what the run keeps of it.
        added_tokens: tokens that were added to the tokenizer and that the model has no ids for.
    """

    config: Config
    exchange: Exchange
    origin: Origin
    weights: StoredWeights
    tokenizer: Tokenizer | None
    added_tokens: list[str]


def open_source(folder: Path, overrides: Mapping[str, Any] | None = None) -> Source:
    """The model in `folder`; `overrides` by key replace what its `config.json` says.

    Raises:
        UserError: it is of no class that we know, its files are damaged or do not fit each other, or hold weights as a
            pickle.
    """
    fields, overrides = Fields(folder), overrides or {}
    exchange = exchange_of(fields)
    settings = exchange.read_settings(fields, overrides)
    config = resolve(RECIPE | settings, overrides, decay_follows=False)
    length = settings["model.sequence_length"]
    if config.model.sequence_length > (length if config.model.rotary else 0) and "model.sequence_length" in overrides:
        valid = f"{length} or less, the positions in config.json" if config.model.rotary else "without it"
        positions = "" if config.model.rotary else ", whose positions are learned"
        flag = f"--model.sequence-length {config.model.sequence_length}"
        raise UserError(f"{flag} with {folder}{positions}; valid: {valid}")
    weights = StoredWeights(folder, config.model, exchange)
    origin = Origin.of(fields, exchange.architecture(config.model), weights.dtype, length)
    tokenizer, added = read_tokenizer(folder, FAMILIES[exchange.family].tokenizer, config.model.vocab_size)
    return Source(config, exchange, origin, weights, tokenizer, added)


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
    weight = source.weights.weights(config.seed)
    refused: list[UserError] = []  # of tensors, which are read in another thread

    def checked(path: Any, shape: tuple[int, ...]) -> Tensor:
        try:
            return weight(path, shape)
        except UserError as error:
            refused.append(error)
            raise

    layout = StateLayout(config, make_mesh(jax.devices()[:1]), CutModel(config.model, F_AND_G, CPU))
    with folder_atomically(run_dir.absolute()) as new:
        mark(new)
        # `wait` tells of a failure: here there is no training to go on.
        checkpoints = Checkpoints(new, layout, config.checkpoint.keep, max_failures=2)
        try:
            checkpoints.save_new(checked)
            checkpoints.wait()
        except RunError:
            if refused:
                raise refused[0] from None
            raise
        finally:
            checkpoints.close()
        if source.tokenizer:
            source.tokenizer.save(new / "data" / "tokenizer")
        source.origin.write(new)
        write_atomically(new / "config.toml", to_toml(config))

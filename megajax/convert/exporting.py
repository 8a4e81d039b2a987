"""Export a run's checkpoint as a folder that `transformers` loads."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from megajax.convert.exchange import Exchange
from megajax.convert.families import exchange_for
from megajax.convert.importing import check_new
from megajax.convert.origin import Origin
from megajax.convert.tensor_files import SHARD_BYTES, TORCH_DTYPES, write_tensors
from megajax.convert.tokenizer_files import write_objects, write_tokenizer
from megajax.convert.weights import Tensor, tensors_of, whole_layout
from megajax.data.tasks.registry import TASKS
from megajax.data.text.corpus import corpus_tokenizer
from megajax.data.text.tokenizer import Tokenizer
from megajax.host import reading
from megajax.host.files import folder_atomically
from megajax.runs.directory import stored_config
from megajax.runs.trained import check_run, weights_in_parts
from megajax.settings.config import Config


def export_config(run_dir: Path, overrides: dict[str, Any] | None = None) -> Config:
    """The configuration of a run with `overrides` on one device, in the precision of its main weights.

    Raises:
        UserError: there is no run, or no transformers class can represent its model.
    """
    check_run(run_dir, "RUN")
    config = stored_config(run_dir, overrides or {})
    exchange_of_run(run_dir, config, Origin.read(run_dir))
    return dataclasses.replace(config, precision="fp64" if config.precision == "fp64" else "fp32")


def export_hf(
    run_dir: Path,
    config: Config,
    folder: Path,
    step: str = "latest",
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> tuple[int, Tokenizer | None]:
    """Write main weights, configuration and tokenizer to `folder`, which appears complete or not at all; returns the
    step and the tokenizer (None if the run has none).

    Args:
        config: `export_config(run_dir)`.
        dtype: of the weights, as in `DTYPES`; None: each the one it was imported in, otherwise fp32. Those that the
            class keeps in fp32 are written so.
        shard_bytes: most bytes of tensors in one file.

    Raises:
        UserError: there is no such checkpoint; `folder` is not empty or cannot be written; a weight is too large for
            the dtype.
    """
    check_new(folder, "PATH")
    model, origin = config.model, Origin.read(run_dir)
    tokenizer = corpus_tokenizer(run_dir / "data") if reading.kind(run_dir / "data" / "tokenizer") else None
    exchange = exchange_of_run(run_dir, config, origin)
    labels = () if config.pretrains else TASKS[config.task.name].labels
    settings = exchange.settings(model, labels, tokenizer)
    origin.put_into(settings, model)
    settings["config.json"]["dtype"] = TORCH_DTYPES[dtype or origin.dtype]
    stored, step_number = weights_in_parts(whole_layout(config), run_dir, step)

    def read(paths: list[Any]) -> list[Tensor]:
        return [weight.astype(np.float32, copy=False) for weight in stored(paths)]

    places = exchange.places(model)
    shapes, copies = places.shapes(model), places.written_copies
    shapes |= {copy: shapes[name] for copy, name in copies.items()}
    dtypes = {name: dtype or origin.dtypes.get(copies.get(name, name), origin.dtype) for name in shapes}
    dtypes = {name: exchange.dtype(name, wanted) for name, wanted in dtypes.items()}
    with folder_atomically(folder.absolute()) as new:
        write_tensors(new, shapes, tensors_of(places, model, read), dtypes, shard_bytes)
        write_objects(new, settings)
        if tokenizer:
            write_tokenizer(tokenizer, model.sequence_length, new, exchange.model_type)
    return step_number, tokenizer


def exchange_of_run(run_dir: Path, config: Config, origin: Origin) -> Exchange:
    """The exchange of the transformers class for a run's model; raises `UserError` if there is none."""
    return exchange_for(config.model, origin.architecture, f"RUN {run_dir}")

"""The tasks of `eval.py`: each restores a run's checkpoint on the mesh asked for and returns its figures as a dict."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from megajax.config import Config, load_preset, resolve, validate
from megajax.data.corpus import evaluation_tokens, open_corpus
from megajax.data.gpt import EvaluationSamples, train_and_validation
from megajax.data.tokenizer import Tokenizer
from megajax.errors import RunError
from megajax.evaluation.perplexity import perplexity
from megajax.launch import start
from megajax.mesh import make_mesh
from megajax.training.checkpoint import Checkpoints, DamagedCheckpoint, choose_step
from megajax.training.step import Program


def evaluate_perplexity(run_dir: Path, *, step: str, data: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Loss per token and perplexity on the run's validation split, or on any text file, folder or tokenized dataset.

    Raises:
        UserError: the run, the step, the data or the mesh cannot be used.
    """
    config = _evaluation_config(run_dir, overrides)
    start(config)
    validate(config, jax.device_count())
    length = config.model.sequence_length
    if data:
        documents = evaluation_tokens(data, Tokenizer.load(run_dir / "data" / "tokenizer"))
        samples = EvaluationSamples(documents, None, sequence_length=length)
    else:
        corpus = open_corpus(run_dir / "data", config.model.vocab_size)
        _, samples = train_and_validation(
            corpus.tokens,
            sequence_length=length,
            validation_fraction=config.data.validation_fraction,
            seed=config.seed,
        )
    program = Program(config, make_mesh(config.mesh.data, config.mesh.pipe, config.mesh.tensor))
    params, number = restore_params(program, run_dir, step)
    result = perplexity(program, params, samples)
    return {
        "task": "perplexity",
        "step": number,
        "loss": result.loss,
        "perplexity": result.perplexity,
        "tokens": result.tokens,
    }


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


def _evaluation_config(run_dir: Path, overrides: dict[str, Any]) -> Config:
    """The run's configuration on the mesh asked for, one device where none is; batches fill the pipeline once."""
    preset = {
        key: value for key, value in load_preset(run_dir / "config.toml").items() if not key.startswith(_NOT_KEPT)
    }
    config = resolve(preset, overrides)
    rows = config.mesh.data * config.mesh.pipe * config.train.microbatch
    return dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch=rows))


_NOT_KEPT = ("mesh.", "distributed.", "simulate_devices")

TASKS: dict[str, Callable[..., dict[str, Any]]] = {"perplexity": evaluate_perplexity}

"""The tasks of `eval.py`: each restores a run's checkpoint on the mesh asked for and returns its figures as a dict."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from megajax.config import Config, MeshConfig
from megajax.data.corpus import evaluation_tokens, has_corpus, open_corpus, prepared_prefix
from megajax.data.gpt import EvaluationSamples, train_and_validation
from megajax.data.indexed import IndexedDataset
from megajax.data.tokenizer import Tokenizer
from megajax.data.tokens import TokenDocuments
from megajax.errors import RunError, UserError
from megajax.evaluation.perplexity import perplexity
from megajax.launch import start
from megajax.mesh import make_mesh
from megajax.training.checkpoint import Checkpoints, DamagedCheckpoint, choose_step
from megajax.training.run_directory import kept_config
from megajax.training.step import Program
from megajax.validation import validate_mesh


def evaluate_perplexity(run_dir: Path, *, step: str, data: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Loss per token and perplexity on the run's validation split, or on any text file, folder or tokenized dataset.

    Raises:
        UserError: the run, the step, the data or the mesh cannot be used.
    """
    if not data and not has_corpus(run_dir / "data"):
        raise UserError(
            f"--data missing: {run_dir} has no corpus yet, so no validation split; valid: a text file, a folder, or a "
            "tokenized dataset"
        )
    config = _evaluation_config(run_dir, overrides)
    length = config.model.sequence_length
    if data:
        documents = _documents(data, run_dir, config)
        samples = EvaluationSamples(documents, sequence_length=length, with_positions=config.data.reset_attention)
    else:
        corpus = open_corpus(run_dir / "data", config.model.vocab_size)
        _, samples = train_and_validation(
            corpus.tokens,
            sequence_length=length,
            validation_fraction=config.data.validation_fraction,
            seed=config.seed,
            with_positions=config.data.reset_attention,
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


def _documents(data: str, run_dir: Path, config: Config) -> TokenDocuments:
    """A text in the run's tokens, or a dataset that is tokenized already."""
    if prefix := prepared_prefix(data, flag="--data"):
        tokens = IndexedDataset(prefix)
        tokens.check_vocabulary(config.model.vocab_size)
        return tokens
    tokenizer = run_dir / "data" / "tokenizer"
    if not tokenizer.is_dir():
        raise UserError(f"--data {data}: {run_dir} has no tokenizer for text; valid: a tokenized dataset")
    return evaluation_tokens(data, Tokenizer.load(tokenizer))


def _evaluation_config(run_dir: Path, overrides: dict[str, Any]) -> Config:
    """The run's configuration on the mesh asked for, where none is on all devices as `data`; starts JAX.

    A batch fills the pipeline once.
    """
    config = kept_config(run_dir, overrides)
    start(config)
    if not any(key.startswith("mesh.") for key in overrides):
        config = dataclasses.replace(config, mesh=MeshConfig(data=jax.device_count()))
    validate_mesh(config, jax.device_count())
    rows = config.mesh.data * config.mesh.pipe * config.train.microbatch
    return dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch=rows))


TASKS: dict[str, Callable[..., dict[str, Any]]] = {"perplexity": evaluate_perplexity}

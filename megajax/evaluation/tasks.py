"""The tasks of `eval.py`: each restores a run's checkpoint on the mesh asked for and returns its figures as a dict."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megajax.config import Config
from megajax.data.corpus import evaluation_tokens, open_corpus, prepared_prefix
from megajax.data.gpt import EvaluationSamples, train_and_validation
from megajax.data.indexed import IndexedDataset
from megajax.data.tokenizer import Tokenizer
from megajax.data.tokens import TokenDocuments
from megajax.errors import UserError
from megajax.evaluation.perplexity import perplexity
from megajax.evaluation.restore import restore_params, restored_config
from megajax.mesh import make_mesh
from megajax.training.step import Program


def evaluate_perplexity(run_dir: Path, *, step: str, data: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Loss per token and perplexity on the run's validation split, or on any text file, folder or tokenized dataset.

    Raises:
        UserError: the run, the step, the data or the mesh cannot be used.
    """
    config = restored_config(run_dir, overrides)
    length = config.model.sequence_length
    if data:
        samples = EvaluationSamples(_documents(data, run_dir, config), sequence_length=length)
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


TASKS: dict[str, Callable[..., dict[str, Any]]] = {"perplexity": evaluate_perplexity}

"""What a run says at its end: the validation, a sample, what was written where."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megajax.batch import BatchForm
from megajax.data.tokenizer import Tokenizer
from megajax.evaluation.perplexity import Perplexity
from megajax.generation.choice import Sampling
from megajax.generation.text import continuation_text
from megajax.generation.window import continue_in_windows
from megajax.models.registry import FAMILIES
from megajax.program.program import Program

_WRITTEN = {
    "config.toml": "the run's configuration, itself a preset",
    "metrics.jsonl": "every step's figures",
    "loss.png": "loss curves",
    "tensorboard": "events for TensorBoard",
    "checkpoints": "state, mesh-independent",
    "data": "tokens and tokenizer",
}


def sample(program: Program, params: Any, tokenizer: Tokenizer | None) -> str:
    """The continuation that the configuration asks for; empty if it asks for none, without a tokenizer, or of a model
    that does not continue texts."""
    config = program.config.sample
    if tokenizer is None or config.tokens == 0 or not FAMILIES[program.config.model.family].continues_text:
        return ""
    prompt = tokenizer.encode_prompt(config.prompt)
    one_row = dataclasses.replace(program.config.train, global_batch=program.config.mesh.data, microbatch=1)
    ids = continue_in_windows(
        Program(dataclasses.replace(program.config, train=one_row), program.mesh),
        params,
        prompt,
        num_tokens=config.tokens,
        sampling=Sampling(config.temperature, seed=program.config.seed),
        ends=tokenizer.ends,
    )
    return config.prompt + continuation_text(tokenizer, prompt, ids)


def validation_text(parts: Mapping[str, Perplexity]) -> str:
    """The last validation in a line, from its losses by name."""
    if "next_token" in parts:
        only = parts["next_token"]
        return f"validation perplexity {only.perplexity:.2f} (loss {only.loss:.4f})"
    texts = (
        f"{name} perplexity {part.perplexity:.2f} (loss {part.loss:.4f}, {part.accuracy:.1%} right)"
        for name, part in parts.items()
    )
    return f"validation: {', '.join(texts)}"


def figures_text(figures: Mapping[str, float]) -> str:
    """A task's figures in a line."""
    return ", ".join(
        f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value:,}" for name, value in figures.items()
    )


def parts_of(validation: Mapping[str, Perplexity], form: BatchForm) -> dict[str, float]:
    """The figures of a validation by the names they are logged under; none where there is one loss only, and nothing
    else is watched."""
    if len(validation) == 1 and not form.measures:
        return {}
    figures = {f"validation_{name}_loss": part.loss for name, part in validation.items()}
    return figures | {f"validation_{name}_accuracy": part.accuracy for name, part in validation.items()}


def written(run_dir: Path) -> Iterator[str]:
    """A line for everything that a run has written."""
    yield f"written to {run_dir}:"
    for name, what in _WRITTEN.items():
        if (run_dir / name).exists():
            yield f"  {run_dir / name}  {what}"

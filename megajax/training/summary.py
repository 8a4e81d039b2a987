"""What a run prints at its end: a sample, its last validation, a task's figures, and what it has written."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megajax.core.batch import BatchSpec
from megajax.core.models.registry import FAMILIES
from megajax.core.options import counted
from megajax.core.program.program import Program
from megajax.data.text.tokenizer import Tokenizer
from megajax.evaluation.scoring import Perplexity
from megajax.generation.choice import Sampling
from megajax.generation.text import continuation_text
from megajax.generation.window import continue_in_windows, one_row
from megajax.settings.config import Config
from megajax.training.figures import in_words

_WRITTEN = {
    "config.toml": "the resolved configuration, usable as a preset",
    "metrics.jsonl": "metrics of every step",
    "log.txt": "terminal output of every start",
    "loss.png": "loss curves",
    "experts.png": "load of every expert",
    "tensorboard": "TensorBoard events",
    "profile": "profiles, for XProf, TensorBoard and Perfetto",
    "wandb": "local files of Weights & Biases",
    "mlflow": "MLflow's database and artifacts",
    "checkpoints": "state, mesh-independent",
    "data": "tokens and tokenizer",
}


def sample(config: Config, program: Program, params: Any, tokenizer: Tokenizer | None) -> str:
    """Text sampled as configured; empty without a tokenizer or if the model does not generate text."""
    if tokenizer is None or config.sample.tokens == 0 or not FAMILIES[config.model.family].continues_text:
        return ""
    prompt = tokenizer.encode_prompt(config.sample.prompt)
    new = continue_in_windows(
        one_row(program),
        params,
        prompt,
        num_tokens=config.sample.tokens,
        sampling=Sampling(config.sample.temperature, seed=config.seed),
        ends=tokenizer.ends,
    )
    return config.sample.prompt + continuation_text(tokenizer, prompt, list(new))


def validation_text(config: Config, parts: Mapping[str, Perplexity], bits_per_byte: float | None = None) -> str:
    """A line about a validation, from its losses by name. A task's loss has no perplexity."""
    if "next_token" in parts:
        only, bits = parts["next_token"], "" if bits_per_byte is None else f", {bits_per_byte:.3f} bits per byte"
        return f"validation perplexity {only.perplexity:.2f} (loss {only.loss:.4f}{bits})"
    texts = []
    for name, result in parts.items():
        loss = f"loss {result.loss:.4f}" + f", {in_words('accuracy', result.accuracy)}" * bool(result.hits)
        of_text = result.hits and config.pretrains
        texts.append(f"{name} perplexity {result.perplexity:.2f} ({loss})" if of_text else f"{name} {loss}")
    return f"validation: {', '.join(texts)}"


def end_lines(
    config: Config,
    first: int,
    validation: Mapping[str, Perplexity] | str,
    bits_per_byte: float | None,
    dev: Mapping[str, float],
    waited: float | None,
) -> Iterator[str]:
    """Lines printed after the last step: progress, the last `validation`, or why there is none, a task's figures on
    `dev`, and the share of time that the steps `waited` for data (None without steps). Earlier starts took `first`
    steps."""
    steps = config.train.steps
    if first >= steps:
        yield (
            f"nothing to train: {Path(config.run_dir)} already has {counted(first, 'step', '')} and --train.steps is "
            f"{steps}; pass a larger --train.steps to continue, or another --run-dir for a new run"
        )
    text, part = f"not validated ({validation})", ""
    if not isinstance(validation, str):
        text, part = validation_text(config, validation, bits_per_byte), _part_of_the_split(config, validation)
    yield f"{text} after {counted(max(first, steps), 'step', '')}{part}"
    if dev:
        figures = (in_words(name, value, percent=True) for name, value in dev.items())
        yield f"dev of {config.task.name}: {', '.join(figures)}"
    if waited is not None:
        yield f"waited for data: {waited:.2%} of the training time"


def _part_of_the_split(config: Config, validation: Mapping[str, Perplexity]) -> str:
    """How much of the split the last validation covered, if that may not be all of it."""
    if not config.train.eval_batches or "next_token" not in validation:
        return ""
    tokens = validation["next_token"].tokens
    return f", on {tokens:,} tokens (--train.eval-batches {config.train.eval_batches})"


def parts_of(validation: Mapping[str, Perplexity], form: BatchSpec) -> dict[str, float]:
    """The losses of a validation and their accuracies, by their names in metrics.jsonl; empty if there is only one loss
    whose accuracy is not a measure of the model's own."""
    if len(validation) == 1 and not any(name.startswith("accuracy/") for name in form.measures):
        return {}
    figures = {f"validation_{name}_loss": part.loss for name, part in validation.items()}
    return figures | {f"validation_{name}_accuracy": part.accuracy for name, part in validation.items()}


def written(run_dir: Path) -> Iterator[str]:
    """A line for everything that a run has written."""
    yield f"written to {run_dir}:"
    for name, what in _WRITTEN.items():
        if (run_dir / name).exists():
            yield f"  {run_dir / name}  {what}"

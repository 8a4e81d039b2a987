"""Evaluate models that were fine-tuned on a task, on any mesh. Several models form an ensemble."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from megajax.core.config import MeshConfig
from megajax.core.errors import UserError
from megajax.core.models.registry import FAMILIES
from megajax.core.program.program import Program
from megajax.data.tasks.figures import (
    check_predictions,
    class_figures,
    predicted_classes,
    squad_figures,
    write_predictions,
)
from megajax.data.tasks.registry import TASKS
from megajax.data.tasks.samples import TaskSamples, read_records, task_samples
from megajax.data.tasks.windows import SpanWindows, find_answers, mean_logits
from megajax.data.text.tokenizer import Tokenizer
from megajax.evaluation.scoring import answer_samples, perplexities
from megajax.host.processes import on_first_process, say
from megajax.runs.task_data import TaskData
from megajax.runs.trained import TrainedModel, evaluation_config, run_tokenizer
from megajax.settings.config import Config

Logits = npt.NDArray[np.float32]


def evaluate_task(
    name: str, run_dirs: Sequence[Path], *, step: str, data: Sequence[str], overrides: dict[str, Any], predictions: str
) -> dict[str, Any]:
    """A task's figures on the files `data` (empty: the first run's dev files), for one run that was fine-tuned on it,
    or an ensemble of several. With `predictions`, a file for all answers, records need no labels."""
    continues_text = TASKS[name].continues_text
    if continues_text and len(run_dirs) > 1:
        raise UserError(f"--checkpoint: {len(run_dirs)} runs, but {name} takes one; valid: one run")
    config = _run_config(name, run_dirs[0], overrides)
    paths = data or config.data.dev
    if not paths:
        raise UserError(f"--data missing: {run_dirs[0]} has no dev files; valid: files of {name}")
    records = read_records(name, paths, config.task, "--data", labelled=not predictions)
    if predictions:
        on_first_process(lambda: check_predictions(predictions, records.entries))
    for line in records.lines():
        say(line)
    configs = [config, *(_run_config(name, run_dir, overrides, mesh=config.mesh) for run_dir in run_dirs[1:])]
    tokenizers = [run_tokenizer(run_dir, run_config) for run_dir, run_config in zip(run_dirs, configs, strict=True)]
    if TASKS[name].head == "span":
        _check_same_windows(run_dirs, configs, tokenizers)
    logits, steps, figures = [], [], {}
    for run_dir, run_config, tokenizer in zip(run_dirs, configs, tokenizers, strict=True):
        length, task = run_config.model.sequence_length, run_config.task
        samples = task_samples(name, records.entries, tokenizer, sequence_length=length, config=task, training=False)
        for what, count in samples.counts.items() if continues_text else ():
            say(f"{count} {what}")
        trained = TrainedModel.restore(run_dir, run_config, step)
        steps.append(trained.step)
        if continues_text:
            figures = text_figures(trained.program, trained.params, samples)
        else:
            logits.append(answer_samples(trained.program, trained.params, samples))
        del trained  # the next model's weights may need its memory
    if logits:
        figures, answers = task_answers(config, samples, logits)
        if predictions:
            on_first_process(lambda: write_predictions(predictions, name, samples.records, answers))
    return {"task": name, "step": steps[0] if len(steps) == 1 else steps, **figures}


def _check_same_windows(run_dirs: Sequence[Path], configs: Sequence[Config], tokenizers: Sequence[Tokenizer]) -> None:
    """Check that the runs of an ensemble split contexts into the same windows."""
    inputs = [
        (tokenizer, config.model.sequence_length, config.task.doc_stride, config.task.question_tokens)
        for tokenizer, config in zip(tokenizers, configs, strict=True)
    ]
    for run_dir, own in zip(run_dirs, inputs, strict=True):
        if own != inputs[0]:
            raise UserError(
                f"--checkpoint {run_dir}: another tokenizer, model.sequence_length, task.doc_stride or "
                f"task.question_tokens than {run_dirs[0]}, so its answers cannot be combined; valid: runs "
                "with the same settings, or --task.doc-stride and --task.question-tokens for all"
            )


def _run_config(name: str, run_dir: Path, overrides: dict[str, Any], mesh: MeshConfig | None = None) -> Config:
    """The configuration for evaluating a run that was fine-tuned on the task, or that has a head for it: pretrained,
    imported, or fine-tuned on another task of texts."""
    config, task = evaluation_config(run_dir, overrides, any_model=True, mesh=mesh), TASKS[name]
    of_text = config.pretrains or TASKS[config.task.name].continues_text
    has_head = (config.model.head, config.model.num_classes) == (task.head, task.classes)
    fits = config.task.name == name or (of_text and has_head)
    fits &= FAMILIES[config.model.family].continues_text or not task.continues_text
    if not fits:
        model = f"a {config.model.family} with the head {config.model.head}"
        has = model if config.pretrains else f"a run of {config.task.name}"
        raise UserError(f"--checkpoint {run_dir}: {has}; valid: a run that was fine-tuned on {name}")
    if task.continues_text:
        data = dataclasses.replace(config.data, reset_attention=True)
        config = dataclasses.replace(config, data=data, train=dataclasses.replace(config.train, loss=task.loss))
    return dataclasses.replace(config, task=dataclasses.replace(config.task, name=name))


def dev_figures(
    config: Config, program: Program, params: Any, data: TaskData, between: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """The figures on a run's dev records; `between` is called before every batch."""
    if TASKS[config.task.name].continues_text:
        return text_figures(program, params, data.validation, between)
    logits = answer_samples(program, params, data.validation, between=between)
    return task_answers(config, data.validation, [logits])[0]


def text_figures(
    program: Program, params: Any, samples: TaskSamples, between: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Figures over all counted tokens of texts: mean loss in nats, perplexity, accuracy in percent, and the numbers of
    tokens and records; over pairs of texts without those of tokens.
    """
    (total,) = perplexities(program, params, samples, between=between).values()
    if program.form.by_row:
        return {"loss": total.loss, "accuracy": 100 * total.accuracy, "records": len(samples.records)}
    figures = {"loss": total.loss, "perplexity": total.perplexity, "accuracy": 100 * total.accuracy}
    return figures | {"tokens": total.tokens, "records": len(samples.records)}


def task_answers(config: Config, samples: TaskSamples, logits: Sequence[Logits]) -> tuple[dict[str, float], list[Any]]:
    """A task's figures, and for every record its class or the text of its answer.

    Each model's `logits` are [samples, C], or [samples, T, 2] for spans. For several models probabilities are averaged:
    those of classes or options, or of where spans begin and end.
    """
    task, records = TASKS[config.task.name], cast(Any, samples.records)
    if task.head == "span":
        windows = cast(SpanWindows, samples)
        start_WT, end_WT = (mean_logits(windows, [output[..., end] for output in logits]) for end in (0, 1))
        answers = find_answers(windows, start_WT, end_WT, config.task, unanswerable=task.unanswerable)
        figures = squad_figures(records, answers, unanswerable=task.unanswerable)
        return figures, [answer.text for answer in answers]
    scores_NC = logits[0] if len(logits) == 1 else np.mean([_probabilities(output) for output in logits], axis=0)
    return class_figures(records, scores_NC), predicted_classes(records, scores_NC).tolist()


def _probabilities(logits_NC: Logits) -> npt.NDArray[np.float64]:
    exp_NC = np.exp(logits_NC.astype(np.float64) - logits_NC.max(axis=1, keepdims=True))
    return exp_NC / exp_NC.sum(axis=1, keepdims=True)

"""The evaluations of `megajax eval`, from Python."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megajax.core.errors import UserError, brief
from megajax.data.tasks.registry import TASKS
from megajax.evaluation.finetuned import evaluate_task
from megajax.evaluation.pretrained import EVALUATIONS
from megajax.library.progress import progress


@brief
def evaluate(
    run_dir: str | Path,
    task: str = "perplexity",
    *,
    data: str | Path | Sequence[str | Path] = (),
    step: int | str = "latest",
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The figures of `megajax eval TASK --checkpoint RUN_DIR`, by name.

    Args:
        run_dir: the run directory of a training.
        task: perplexity, wikitext103, lambada, or a task that models are fine-tuned on, such as mnli.
        data: what to evaluate on; by default the run's validation split, or its dev files.
        step: which checkpoint: a step, latest, or best.
        overrides: values that replace the run's, by key, such as a mesh; by default all devices are `data`.
    """
    if task not in EVALUATIONS and task not in TASKS:
        raise UserError(f"task {task!r}; valid: {', '.join([*EVALUATIONS, *TASKS])}")
    paths = [str(path) for path in ([data] if isinstance(data, str | Path) else data) if str(path)]
    values = dict(overrides or {})
    if task in TASKS:
        with progress(f"evaluating {task}"):
            return evaluate_task(task, [Path(run_dir)], step=str(step), data=paths, overrides=values, predictions="")
    if len(paths) > 1:
        raise UserError(f"data: {len(paths)} paths, but {task} takes one; valid: one path")
    with progress(f"evaluating {task}"):
        return EVALUATIONS[task](Path(run_dir), step=str(step), data="".join(paths), overrides=values)
